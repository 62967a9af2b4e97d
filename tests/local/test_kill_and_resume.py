"""Runs that are killed or stopped at any step, and continue."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path
from typing import NamedTuple

import pytest
from helpers.site import Site, until

STEPS = 40
EVERY = 5
# How often a run is killed before it may end, and how many runs are: more of them by hand.
KILLS = int(os.environ.get("TEST_KILLS_OF_A_RUN", "1"))
SEEDS = int(os.environ.get("TEST_SEEDS", "1"))
KEYS = {"params": {"steps": STEPS, "step_ms": 30, "hold_rng": True}, "checkpoint": {"every": {"steps": EVERY}}}


class Undisturbed(NamedTuple):
    """What a run leaves that nothing happened to: its weights, and the loss after each step."""

    weights: str
    losses: dict[int, float]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    site = Site(tmp_path_factory.mktemp("undisturbed"))
    run_id = site.submit(site.spec(**KEYS), "--wait")
    return Undisturbed(weights(site, run_id), losses(site, run_id))


def losses(site: Site, run_id: str) -> dict[int, float]:
    """What survives of the loss, by step."""
    [run] = site.json("plot", run_id, "loss")["runs"]
    [points] = run["metrics"].values()
    return dict(zip(points["step"], points["value"], strict=True))


def weights(site: Site, run_id: str) -> str:
    return (site.runs / run_id / "weights.txt").read_text()


def newest_checkpoint(run: Path, *, complete: bool = False) -> int:
    """The step of the newest checkpoint; ``complete``: also of one that only lacks its name, which it gets later."""
    manifests = [*run.glob("checkpoints/step-*/MANIFEST.json")]
    manifests += run.glob("checkpoints/.*-step-*/MANIFEST.json") if complete else []
    return max((int(path.parent.name.rpartition("-")[2]) for path in manifests), default=0)


def has_come(site: Site, run_id: str, attempt: int, target: int) -> bool:
    """Whether this attempt has finished a step, and this one is among those of the run."""
    begun = len(list((site.runs / run_id).glob("attempts/*/metrics.jsonl"))) == attempt
    return begun and site.step(run_id) >= target


def killed(site: Site, run_id: str, attempt: int, target: int) -> tuple[int, int]:
    """Kill an attempt at a step, or after: the last step that it has finished, and the last that is kept."""
    run = site.runs / run_id
    until(lambda: has_come(site, run_id, attempt, target) and newest_checkpoint(run), f"step {target}")
    site.signal_all(run_id, signal.SIGKILL)
    return site.step(run_id), newest_checkpoint(run, complete=True)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(SEEDS))
def test_a_run_killed_at_random_steps_and_resumed_ends_with_the_weights_and_the_curve_of_an_undisturbed_one(
    site: Site, undisturbed: Undisturbed, seed: int
) -> None:
    targets = sorted(random.Random(seed).sample(range(EVERY + 1, STEPS - 9), KILLS))
    run_id = site.submit(site.spec(**KEYS))
    ends = []
    for attempt, target in enumerate(targets, 1):
        ends.append(killed(site, run_id, attempt, target))
        if attempt < KILLS:
            site.call("resume", run_id)
    [resumed] = site.json("resume", run_id, "--wait")["runs"]

    assert resumed["state"] == "completed"
    assert weights(site, run_id) == undisturbed.weights
    assert losses(site, run_id) == undisturbed.losses
    assert list(undisturbed.losses) == list(range(1, STEPS + 1))
    lost = [last - kept for last, kept in ends]
    assert resumed["lost_steps"] == sum(lost)
    *before, final = site.show(run_id)["attempts"]
    starts = [0, *(kept for _, kept in ends)]
    attempts = [(one["cause"], one["first_step"], one["last_step"], one["lost_steps"]) for one in before]
    assert attempts == [
        ("lost", first, last, steps) for first, (last, _), steps in zip(starts, ends, lost, strict=False)
    ]
    assert (final["cause"], final["first_step"], final["lost_steps"]) == ("completed", starts[-1], 0)


@pytest.mark.slow
def test_a_run_that_gets_sigterm_loses_no_step_and_sync_starts_it_again(site: Site, undisturbed: Undisturbed) -> None:
    run_id = site.submit(site.spec(**KEYS))
    stops = 2
    for attempt, target in enumerate(sorted(random.Random(0).sample(range(1, STEPS - 15), stops)), 1):
        until(lambda attempt=attempt, target=target: has_come(site, run_id, attempt, target), f"step {target}")
        site.signal_all(run_id, signal.SIGTERM)
        until(lambda: not site.processes(run_id), "the end of all processes")

        stopped = site.status(run_id)
        assert (stopped["state"], stopped["lost_steps"]) == ("requeued", 0)
        assert "SIGTERM" in stopped["reason"]
        assert stopped["checkpoint"]["step"] == stopped["step"] == site.step(run_id)
        site.call("sync")
    site.call("wait", run_id)
    run = site.show(run_id)
    assert (run["state"], run["lost_steps"]) == ("completed", 0)
    assert [attempt["cause"] for attempt in run["attempts"]] == ["preempted"] * stops + ["completed"]
    assert weights(site, run_id) == undisturbed.weights
    assert losses(site, run_id) == undisturbed.losses
