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


def dying(site: Site, log: Path, name: str = "", occurrence: int = 0) -> dict[str, str]:
    """The variables with which the agent of a run dies right before this effect; 0: it lives."""
    hooks = PROJECT / "tests" / "helpers" / "killer"
    return {
        "PYTHONPATH": os.pathsep.join([str(hooks), str(PROJECT)]),
        "KILL_IN": ENTRY,
        "KILL_AT": str(occurrence),
        "KILL_NAME": name,
        "KILL_ROOT": str(site.runs),
        "KILL_LOG": str(log),
    }


def points(effects: list[str]) -> list[tuple[str, int]]:
    """Where to kill: everywhere up to the moment after the last rank was started, or a spread with that in it.

    An effect's name and its number among those of the same name: the order of several threads' effects differs.
    """
    names = [effect.partition(" ")[2] for effect in effects]
    named = [(name, names[: number + 1].count(name)) for number, name in enumerate(names)]
    start = max(number for number, name in enumerate(names) if "Popen" in name and "python" in name)
    if os.environ.get("TEST_KILLS") == "all":
        return named[: start + 2]
    # What journals the ranks comes from the thread that has started them.
    after = next(number for number, name in enumerate(names) if number > start and "workers" in name)
    return [named[number] for number in sorted({*(number * start // SPREAD for number in range(SPREAD)), start, after})]


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_an_agent_that_is_killed_while_it_starts_leaves_nothing_and_the_next_one_trains(site: Site) -> None:
    log = site.path / "effects"
    # Ranks that have begun all the same, since their agent was slow to die, agree on a stop before their last step.
    params = {"steps": STEPS, "slow_from": 0}
    spec = site.light("killed", params=params, resources={**ONE_PROCESS, "procs_per_node": 2}, code="none")
    undisturbed = site.submit(spec, "--wait", env=dying(site, log))
    weights = [line for line in site.printed(undisturbed) if line.startswith("weights")]
    assert len(weights) == 2
    for point in points(log.read_text().splitlines()):
        run_id = site.submit(spec, env=dying(site, log, *point))
        site.until_state(run_id, "lost", "requeued")
        # Another agent, which nothing kills, and no other process of the run.
        site.call("resume", run_id, "--from-start")
        run = site.until_state(run_id, "completed", "failed", "lost")
        assert (run["state"], run["step"]) == ("completed", STEPS), (point, run["reason"])
        printed = [line for line in site.printed(run_id) if line.startswith("weights")]
        assert sorted(printed) == sorted(weights), point
        # The last agent notes the end of its run before it ends itself.
        until(lambda run_id=run_id: not site.processes(run_id), "the end of all processes")
