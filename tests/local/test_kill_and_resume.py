"""Runs that are killed or stopped at any step, and go on."""

from __future__ import annotations

import random
import signal
from pathlib import Path

import pytest
from helpers.site import Site, until

STEPS = 40
EVERY = 7
KEYS = {"params": {"steps": STEPS, "step_ms": 12, "hold_rng": True}, "checkpoint": {"every": {"steps": EVERY}}}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The weights of a run that nothing happened to."""
    site = Site(tmp_path_factory.mktemp("undisturbed"))
    run_id = site.submit(site.spec(**KEYS), "--wait")
    return (site.runs / run_id / "weights.txt").read_text()


def weights(site: Site, run_id: str) -> str:
    return (site.runs / run_id / "weights.txt").read_text()


def newest_checkpoint(run: Path) -> int:
    found = [int(path.parent.name.split("-")[1]) for path in run.glob("checkpoints/step-*/MANIFEST.json")]
    return max(found, default=0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_a_run_killed_at_a_random_step_and_resumed_ends_with_the_weights_of_an_undisturbed_one(
    site: Site, undisturbed: str, seed: int
) -> None:
    target = random.Random(seed).randint(EVERY + 1, STEPS - 2)
    run_id = site.submit(site.spec(**KEYS))
    until(lambda: site.step(run_id) >= target, f"step {target}")
    site.signal_all(run_id, signal.SIGKILL)
    last, kept = site.step(run_id), newest_checkpoint(site.runs / run_id)

    [resumed] = site.json("resume", run_id, "--wait")["runs"]

    assert resumed["state"] == "completed"
    assert weights(site, run_id) == undisturbed
    assert resumed["lost_steps"] == last - kept
    first, second = site.show(run_id)["attempts"]
    assert (first["cause"], first["last_step"], first["lost_steps"]) == ("lost", last, last - kept)
    assert (second["cause"], second["first_step"], second["lost_steps"]) == ("completed", kept, 0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_a_run_that_gets_sigterm_loses_no_step(site: Site, undisturbed: str, seed: int) -> None:
    target = random.Random(seed).randint(1, STEPS - 15)
    run_id = site.submit(site.spec(**KEYS))
    until(lambda: site.step(run_id) >= target, f"step {target}")
    site.signal_all(run_id, signal.SIGTERM)
    until(lambda: not site.processes(run_id), "the end of all processes")

    stopped = site.status(run_id)
    assert (stopped["state"], stopped["lost_steps"]) == ("cancelled", 0)
    assert "SIGTERM" in stopped["reason"]
    assert stopped["checkpoint"]["step"] == stopped["step"] == site.step(run_id)
    [resumed] = site.json("resume", run_id, "--wait")["runs"]
    assert (resumed["state"], resumed["lost_steps"]) == ("completed", 0)
    assert weights(site, run_id) == undisturbed


def test_without_the_states_of_the_random_numbers_the_weights_differ(site: Site, undisturbed: str) -> None:
    run_id = site.submit(site.spec(**{**KEYS, "params": {**KEYS["params"], "hold_rng": False}}))
    until(lambda: site.step(run_id) > EVERY, "a checkpoint")
    site.signal_all(run_id, signal.SIGKILL)
    site.call("resume", run_id, "--wait")
    assert weights(site, run_id) != undisturbed
