"""SIGKILL of an agent at any effect of its start: nothing of it trains on, and the next start goes on.

By default a spread of points is tried; TEST_KILLS=all tries every one.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from helpers.site import ONE_PROCESS, PROJECT, Site, until

from slurmtrain.runtime.task import ENTRY

SPREAD = 2
STEPS = 3


def dying(site: Site, at: int, log: Path) -> dict[str, str]:
    """The variables with which the agent of a run dies right before this effect; 0: it lives."""
    hooks = PROJECT / "tests" / "helpers" / "killer"
    return {
        "PYTHONPATH": os.pathsep.join([str(hooks), str(PROJECT)]),
        "KILL_IN": ENTRY,
        "KILL_AT": str(at),
        "KILL_ROOT": str(site.runs),
        "KILL_LOG": str(log),
    }


def points(effects: list[str]) -> list[int]:
    """Where to kill: everywhere up to the moment after the last rank was started, or a spread with that in it."""
    start = max(number for number, effect in enumerate(effects, 1) if "Popen" in effect and "python" in effect)
    if os.environ.get("TEST_KILLS") == "all":
        return [*range(1, start + 2)]
    return sorted({*(1 + number * start // SPREAD for number in range(SPREAD)), start, start + 1})


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_an_agent_that_is_killed_while_it_starts_leaves_nothing_and_the_next_one_trains(site: Site) -> None:
    log = site.path / "effects"
    spec = site.light("killed", params={"steps": STEPS}, resources={**ONE_PROCESS, "procs_per_node": 2}, code="none")
    undisturbed = site.submit(spec, "--wait", env=dying(site, 0, log))
    weights = [line for line in site.printed(undisturbed) if line.startswith("weights")]
    assert len(weights) == 2
    for point in points(log.read_text().splitlines()):
        log.unlink()
        run_id = site.submit(spec, env=dying(site, point, log))
        site.until_state(run_id, "lost", "requeued")
        # Another agent, which nothing kills, and no other process of the run.
        site.call("resume", run_id, "--from-start")
        run = site.until_state(run_id, "completed", "failed", "lost")
        assert (run["state"], run["step"]) == ("completed", STEPS), (point, run["reason"])
        printed = [line for line in site.printed(run_id) if line.startswith("weights")]
        assert sorted(printed) == sorted(weights), point
        # The last agent notes the end of its run before it ends itself.
        until(lambda run_id=run_id: not site.processes(run_id), "the end of all processes")
