"""What a local run waits for: the one that was submitted before it, what runs still use, and its own node 0."""

from __future__ import annotations

import contextlib
import os
import subprocess
from pathlib import Path

import pytest
from helpers.simulated_run import SimulatedRun

from slurmtrain.errors import LaunchError
from slurmtrain.model.run.layout import RunDir
from slurmtrain.model.run.root import RunsRoot
from slurmtrain.runtime.turns import local_turn
from slurmtrain.runtime.turns.local_turn import gpus_of_account, is_to_come, used_by_ranks
from slurmtrain.runtime.turns.slots import SlotRequest, Slots, take_slot
from slurmtrain.system.process import identify, this_process

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


def test_what_ranks_whose_agent_is_dead_have_is_in_use_until_they_end(root: RunsRoot) -> None:
    slots = Slots(root.slots("here"), "sweep", 2)
    attempt = root.run(BEFORE).attempt("local-a", 0)
    attempt.path.mkdir(parents=True)
    attempt.turn.write_text('{"gpus": ["3", "MIG-a/b"], "slot": "sweep/1"}')
    environ = {**os.environ, "SLURMTRAIN_ATTEMPT_DIR": str(attempt.path)}
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, env=environ) as rank:
        used = used_by_ranks(root.run(WAITING), slots)
        assert used == {slots.slot(1), slots.gpu("3"), slots.gpu("MIG-a/b")}
        # What its own last attempt has left is killed once it has its turn.
        assert used_by_ranks(root.run(BEFORE), slots) == set()
        rank.communicate()
    assert used_by_ranks(root.run(WAITING), slots) == set()


def test_an_agent_gives_up_once_the_one_of_node_0_has_ended(root: RunsRoot) -> None:
    sim = SimulatedRun(root.run(BEFORE), spec={"name": "n"}, executor="local", job="local-a").created()
    attempt = root.run(BEFORE).attempt("local-a", 0)
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as agent:
        process = identify(agent.pid)
        assert process is not None
        sim.submitted().started(nodes=2, process=process.to_dict())
        looks: list[int] = []

        def kill_it_at_the_second_look() -> bool:
            looks.append(1)
            if len(looks) == 2:
                agent.kill()
                agent.wait()
            return False

        with pytest.raises(LaunchError, match="node 0 has ended before"):
            local_turn._wait_for_node_0(attempt, kill_it_at_the_second_look)
    assert len(looks) == 2
    # What it wrote before it ended counts.
    attempt.turn.write_text('{"gpus": ["1"]}')
    assert local_turn._wait_for_node_0(attempt, lambda: False) == ["1"]


def test_an_agent_does_not_wait_for_ever_for_one_that_never_begins(
    root: RunsRoot, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_turn, "_BEGIN_S", 0.0)
    with pytest.raises(LaunchError, match="node 0 has ended before"):
        local_turn._wait_for_node_0(root.run(BEFORE).attempt("local-a", 0), lambda: False)


def test_a_gpu_is_used_by_one_run_of_the_account_whatever_its_runs_root(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus = gpus_of_account("here")
    own, other = (Slots(RunsRoot(tmp_path / name).slots("here"), "single", None, gpus) for name in ("a", "b"))
    request = SlotRequest(run=WAITING, gpus=["0", "1"], needed=1)
    with contextlib.ExitStack() as held, contextlib.ExitStack() as others:
        first = take_slot(own, request, held, give_up=lambda: False)
        second = take_slot(other, request, others, give_up=lambda: False)
        assert [share and share.gpus for share in (first, second)] == [["0"], ["1"]]
        waits = iter([False, True])
        assert take_slot(other, request, others, give_up=lambda: next(waits)) is None
    assert gpus_of_account("elsewhere") != gpus
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")
    assert gpus_of_account("here") is None


def test_gpus_of_ranks_in_another_runs_root_are_in_use_and_its_slots_are_not(root: RunsRoot, tmp_path: Path) -> None:
    elsewhere = RunsRoot(tmp_path / "elsewhere")
    slots = Slots(root.slots("here"), "sweep", 2, gpus_of_account("here"))
    attempt = elsewhere.run(BEFORE).attempt("local-a", 0)
    attempt.path.mkdir(parents=True)
    attempt.turn.write_text('{"gpus": ["3"], "slot": "sweep/1"}')
    environ = {**os.environ, "SLURMTRAIN_ATTEMPT_DIR": str(attempt.path)}
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, env=environ) as rank:
        assert used_by_ranks(root.run(WAITING), slots) == {slots.gpu("3")}
        rank.communicate()
