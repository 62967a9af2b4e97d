"""Nodes of a real cluster that get slower: shares of the batch follow their speeds, and the result stays the same."""

from __future__ import annotations

import json
import os
import signal
from typing import Any

import pytest
from helpers.cluster import ClusterSite
from helpers.cluster_runs import events, pid_of
from helpers.cpu_limits import cpu_limit
from helpers.gpt import losses_with
from helpers.rare import rare
from helpers.site import PATIENCE_S, until

STEPS = 1500
BATCH = 32
# How many samples of a batch rank 1 may have with this part of a CPU: in proportion a third and a fifth, but gradients
# take their time, too, and these CPUs are not ours alone.
MOST = {0.5: BATCH * 7 // 16, 0.25: BATCH * 5 // 16}
# Rounding errors of float32 grow with the steps: less than this in all of them with a small learning rate.
TOLERANCE = 1e-4
LEARNING_RATE = 1e-5


def points(site: ClusterSite, run_id: str) -> list[tuple[int, float]]:
    """The steps and losses of a run's only attempt as they were logged, the repeated ones twice."""
    [path] = (site.runs / run_id).glob("attempts/*/metrics.jsonl")
    records = [json.loads(line) for line in path.read_text().split("\n")[:-1]]
    return [(record["step"], record["metrics"]["loss"]) for record in records if "loss" in record["metrics"]]


def chosen(site: ClusterSite, run_id: str) -> list[dict[str, Any]]:
    """Which shares were chosen, and those that were repeated."""
    return events(site, run_id, "shares")


@rare
@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_shares_follow_a_node_with_half_and_a_quarter_of_a_cpu_and_are_repeated_after_a_kill(site: ClusterSite) -> None:
    run_id = site.submit(
        site.person.code / "experiments" / "gpt" / "mixed.yaml",
        f"params.steps={STEPS}", f"params.lr={LEARNING_RATE}", "tracking.mlflow.enabled=false", "resources.mem=null",
        "resources.nodes=2", "resources.procs_per_node=1", f"workdir={site.person.code}",
        f"checkpoint.every.steps={STEPS}", "+requeue.backoff_s=0",
    )  # fmt: skip
    site.until_step(run_id, 20)
    with cpu_limit() as limit:
        for part, most in MOST.items():
            limit.set(part)
            limit.add(pid_of(site, run_id, 1))
            until(
                lambda most=most: any(each["shares"][1] <= most for each in chosen(site, run_id)),
                f"at most {most} samples on rank 1",
            )
        until_killed = chosen(site, run_id)
        reached = max(each["step"] for each in until_killed)
        site.until_step(run_id, reached + 5)
        os.kill(pid_of(site, run_id, 0), signal.SIGKILL)
        # All steps anew, of which each computes for as long as a busy machine lets it.
        site.until_state(run_id, "completed", patience_s=5 * PATIENCE_S)
    run = site.show(run_id)
    assert (run["step"], len(run["attempts"]), len(run["attempts"][0]["restarts"])) == (STEPS, 1, 1)

    logged = points(site, run_id)
    restart = next(index for index in range(1, len(logged)) if logged[index][0] == 1)
    killed, repeated = logged[:restart], logged[restart:]
    assert len(killed) > reached
    assert repeated[: len(killed)] == killed
    choices = [(each["step"], each["shares"]) for each in chosen(site, run_id)]
    first = [(each["step"], each["shares"]) for each in until_killed]
    assert choices[: 2 * len(first)] == [*first, *first]
    assert [loss for _, loss in repeated] == pytest.approx(
        losses_with(str(site.person.python), STEPS, lr=LEARNING_RATE), rel=TOLERANCE
    )
