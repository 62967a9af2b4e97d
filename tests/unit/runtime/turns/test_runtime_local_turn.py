"""Whether a run of a local sweep waits for the one that was submitted before it."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.simulated_run import SimulatedRun

from slurmtrain.model.run.layout import RunDir, RunsRoot
from slurmtrain.runtime.turns.local_turn import is_to_come
from slurmtrain.system.process import this_process

BEFORE, WAITING = "0000000001", "0000000002"


@pytest.fixture
def root(tmp_path: Path) -> RunsRoot:
    return RunsRoot(tmp_path)


@pytest.fixture
def before(root: RunsRoot) -> SimulatedRun:
    """The run before, whose controller lives, and whose agent is about to start."""
    sim = SimulatedRun(root.run(BEFORE), spec={"name": "n"}, executor="local", job="local-a")
    return sim.created(sweep="sweep").submitted(process=this_process().to_dict())


def is_waited_for(root: RunsRoot) -> bool:
    return is_to_come(root.run(WAITING), BEFORE)()


def test_a_run_that_has_just_been_started_is_waited_for(root: RunsRoot, before: SimulatedRun) -> None:
    assert is_waited_for(root)
    before.started()
    assert is_waited_for(root)


def test_a_run_that_has_had_its_turn_is_not(root: RunsRoot, before: SimulatedRun) -> None:
    attempt = before.started().directory
    assert isinstance(attempt, RunDir)
    attempt.attempt("local-a", 0).turn.write_text("{}")
    assert not is_waited_for(root)


def test_a_run_that_waits_for_one_outside_of_the_sweep_is_not(root: RunsRoot, before: SimulatedRun) -> None:
    before.started().node("waiting", run="0000000009")
    assert not is_waited_for(root)


def test_a_run_whose_processes_are_dead_or_that_is_gone_is_not(root: RunsRoot) -> None:
    assert not is_waited_for(root)
    gone = {**this_process().to_dict(), "start": 1}
    sim = SimulatedRun(root.run(BEFORE), spec={"name": "n"}, executor="local", job="local-a")
    sim.created(sweep="sweep").submitted(process=gone)
    assert not is_waited_for(root)
    assert not is_to_come(root.run(WAITING), None)()
