"""Models that are distributed over the nodes of a real cluster."""

from __future__ import annotations

import pytest
from helpers.cluster import Cluster, ClusterSite, Person
from helpers.cluster_runs import events, preempt
from helpers.gpt import TOLERANCE, logged_losses, losses_with
from helpers.rare import rare

STEPS = 24
# Those of experiments/gpt that are neither for a single process nor for a changing number of nodes.
NAMES = (
    "accumulation", "activation-checkpointing", "bf16", "bf16-hook", "ddp", "fp16", "hierarchical", "hsdp",
    "interleaved", "mesh", "offload", "pipeline", "powersgd", "tensor", "topk", "zero1", "zero2", "zero3",
)  # fmt: skip
# bfloat16 has 8 significant bits, so that each number is off by up to 1 part in 256; most of that cancels out. What
# PowerSGD and Top-k leave out of the gradients of a step comes with the next ones.
TOLERANCES = {"bf16": 0.005, "fp16": 0.001, "bf16-hook": 0.005, "powersgd": 0.1, "topk": 0.2}
# PowerSGD begins before the preemption.
WITH_STATE = {"powersgd": ("strategy.start_powersgd_iter=2",)}


def submit(site: ClusterSite, name: str, *overrides: str) -> str:
    """Submit an experiment of the GPT, with four ranks on two nodes; returns the run's id."""
    mem = "resources.mem=800MB" if name == "offload" else "resources.mem=null"
    few = (f"params.steps={STEPS}", "tracking.mlflow.enabled=false", mem, "+slurm.partition=spot")
    four = ("resources.nodes=2", "resources.procs_per_node=2", f"workdir={site.person.code}")
    return site.submit(site.person.code / "experiments" / "gpt" / f"{name}.yaml", *few, *four, *overrides)


def losses_of(site: ClusterSite, run_id: str) -> list[float]:
    """The losses of all steps of a completed run that has lost none."""
    run = site.show(run_id)
    assert (run["step"], run["lost_steps"]) == (STEPS, 0)
    steps, losses = zip(*logged_losses(site.runs / run_id), strict=True)
    assert list(steps) == list(range(1, STEPS + 1))
    return list(losses)


def losses_of_preempted(site: ClusterSite, cluster: Cluster, name: str, *overrides: str) -> list[float]:
    """The losses of an experiment that is preempted once and completed."""
    run_id = submit(site, name, *overrides, "+params.seconds_per_step=0.2")
    site.until_step(run_id, 4)
    job = site.job(run_id)
    preempt(cluster, lambda: cluster.restarts(job) == 1)
    site.until_state(run_id, "completed")
    assert len(set(site.show(run_id)["attempts"][-1]["nodes"])) == 2
    assert len(events(site, run_id, "restored")) == 1
    return losses_of(site, run_id)


@pytest.fixture(scope="module")
def one_process(person: Person) -> list[float]:
    return losses_with(str(person.python), STEPS)


@rare
@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_each_strategy_over_two_nodes_is_preempted_and_goes_on_bit_for_bit(
    site: ClusterSite, cluster: Cluster, one_process: list[float], name: str
) -> None:
    begun_soon = WITH_STATE.get(name, ())
    undisturbed = submit(site, name, *begun_soon)
    site.until_state(undisturbed, "completed")
    losses = losses_of_preempted(site, cluster, name, *begun_soon)
    assert losses == losses_of(site, undisturbed)
    assert losses == pytest.approx(one_process, rel=TOLERANCES.get(name, TOLERANCE))


# Times, and so the shares, are not those of another run.
@rare
@pytest.mark.slow
def test_a_run_with_shares_by_speed_is_preempted_and_has_the_losses_of_one_process(
    site: ClusterSite, cluster: Cluster, one_process: list[float]
) -> None:
    assert losses_of_preempted(site, cluster, "mixed") == pytest.approx(one_process, rel=TOLERANCE)
