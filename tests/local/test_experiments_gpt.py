"""The byte-level GPT: with each strategy it has the losses of one process, and is stopped without losing a step."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from helpers.gpt import GPT, TOLERANCE, logged_losses, losses_of_one_process
from helpers.rare import rare
from helpers.site import PROJECT, Site, until

STEPS = 24
# bfloat16 has 8 significant bits, so that each number is off by up to 1 part in 256; most of that cancels out.
TOLERANCES = {"bf16": 0.005, "fp16": 0.001, "bf16-hook": 0.005, "powersgd": 0.1, "topk": 0.2}
SHORT = (f"params.steps={STEPS}", "tracking.mlflow.enabled=false")
SLOW = "params.seconds_per_step=0.1"
NAMES = (
    "accumulation",
    "activation-checkpointing",
    "bf16",
    "bf16-hook",
    "components",
    "ddp",
    "dp",
    "elastic",
    "fp16",
    "hierarchical",
    "hsdp",
    "interleaved",
    "mesh",
    "mixed",
    "offload",
    "pipeline",
    "tensor",
    "topology",
    "zero1",
    "zero2",
    "zero3",
)
# Those with scripts of their own.
OF_OTHERS = {"deepspeed": "deepspeed", "megatron": "torch"}
# Those whose hooks have a state; PowerSGD begins before the preemption.
WITH_STATE = {"powersgd": ("strategy.start_powersgd_iter=2",), "topk": ()}


def test_there_is_a_test_for_every_spec_of_the_gpt() -> None:
    assert sorted([*NAMES, *WITH_STATE]) == sorted(path.stem for path in GPT.glob("*.yaml"))


@pytest.fixture(scope="module")
def expected() -> list[float]:
    return losses_of_one_process(STEPS)


def start(site: Site, name: str, *overrides: str) -> str:
    """Submit a spec, and wait until it has made a few steps. Returns the run's id."""
    return start_spec(site, GPT / f"{name}.yaml", f"+{SLOW}", *overrides)


def start_spec(site: Site, spec: Path, *overrides: str) -> str:
    """The same for any ``spec``."""
    [run] = site.json("submit", str(spec), "--executor", "local", *SHORT, *overrides, cwd=PROJECT)["runs"]
    until(lambda: len(logged_losses(site.runs / run["id"])) > 3, "the first steps")
    return str(run["id"])


def preempt(site: Site, run_id: str) -> None:
    """Preempt a run, and wait until it has started again and is completed."""
    site.signal_all(run_id, signal.SIGTERM)
    until(lambda: not site.processes(run_id), "the end of all processes")
    site.call("sync")
    site.until_state(run_id, "completed")


def check(site: Site, run_id: str, expected: list[float], tolerance: float) -> None:
    """A run was stopped once, lost no step, and has the ``expected`` losses."""
    run = site.show(run_id)
    assert (run["state"], run["step"], len(run["attempts"]), run["lost_steps"]) == ("completed", STEPS, 2, 0)
    steps, losses = zip(*logged_losses(site.runs / run_id), strict=True)
    assert list(steps) == list(range(1, STEPS + 1))
    assert list(losses) == pytest.approx(expected, rel=tolerance)
    assert losses[-1] < losses[0] - 1


@pytest.mark.slow
def test_zero3_is_stopped_and_goes_on_as_zero1_on_half_the_processes(site: Site, expected: list[float]) -> None:
    run_id = start(site, "zero3")
    site.call("cancel", run_id)
    site.call("resume", run_id, "--wait", "strategy=zero1", "resources.procs_per_node=2")
    check(site, run_id, expected, TOLERANCE)


# tests/unit/plugins/strategies has each of them make a few steps.
@rare
@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_each_is_preempted_and_has_the_losses_of_one_process(site: Site, expected: list[float], name: str) -> None:
    run_id = start(site, name)
    preempt(site, run_id)
    check(site, run_id, expected, TOLERANCES.get(name, TOLERANCE))


# test_launchers.py preempts scripts that such launchers start.
@rare
@pytest.mark.slow
@pytest.mark.parametrize(("name", "module"), OF_OTHERS.items())
def test_scripts_of_other_trainers_are_preempted_and_have_them_too(
    site: Site, expected: list[float], name: str, module: str
) -> None:
    pytest.importorskip(module)
    run_id = start_spec(site, GPT.parent / name / f"{name}.yaml", SLOW)
    preempt(site, run_id)
    check(site, run_id, expected, TOLERANCE)


# tests/unit/plugins/strategies saves and restores them.
@rare
@pytest.mark.slow
@pytest.mark.parametrize("name", WITH_STATE)
def test_what_a_hook_has_not_sent_survives_a_preemption_bit_for_bit(
    site: Site, expected: list[float], name: str
) -> None:
    undisturbed = start(site, name, *WITH_STATE[name])
    site.until_state(undisturbed, "completed")
    run_id = start(site, name, *WITH_STATE[name])
    preempt(site, run_id)
    check(site, run_id, expected, TOLERANCES[name])
    assert logged_losses(site.runs / run_id) == logged_losses(site.runs / undisturbed)
