"""What a local run waits for: the one that was submitted before it, what runs still use, and its own node 0."""

from __future__ import annotations

import contextlib
import os
import subprocess
from pathlib import Path

import pytest
from helpers.simulated_run import SimulatedRun

from slurmtrain.errors import LaunchError
from slurmtrain.model.run.root import RunsRoot
from slurmtrain.runtime.agent import local_slots
from slurmtrain.runtime.agent.local_slots import (
    SlotRequest,
    Slots,
    gpus_of_account,
    is_to_come,
    take_slot,
    used_by_ranks,
)
from slurmtrain.system.process import identify, this_process

BEFORE, WAITING = "0000000001", "0000000002"


@pytest.fixture
def root(tmp_path: Path) -> RunsRoot:
    return RunsRoot(tmp_path)


def is_waited_for(root: RunsRoot) -> bool:
    return is_to_come(root.run(WAITING), BEFORE)()


@pytest.mark.parametrize("until", ["it has had its turn", "it waits for a run elsewhere", "its processes are dead"])
def test_a_run_that_has_just_been_started_is_waited_for_until_its_turn_has_come_or_cannot(
    root: RunsRoot, until: str
) -> None:
    assert not is_waited_for(root)
    sim = SimulatedRun(root.run(BEFORE), spec={"name": "n"}, executor="local", job="local-a").created(sweep="sweep")
    process = this_process().to_dict()
    if until == "its processes are dead":
        sim.submitted(process={**process, "start": 1})
    else:
        sim.submitted(process=process)
        assert is_waited_for(root)
        sim.started()
        assert is_waited_for(root)
        if until == "it has had its turn":
            root.run(BEFORE).attempt("local-a", 0).turn.write_text("{}")
        else:
            sim.node("waiting", run="0000000009")
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
        # From another runs root, its GPUs alone are in use.
        elsewhere = RunsRoot(root.path / "elsewhere")
        others = Slots(elsewhere.slots("here"), "sweep", 2, gpus_of_account("here"))
        assert used_by_ranks(elsewhere.run(WAITING), others) == {others.gpu("3"), others.gpu("MIG-a/b")}
        rank.communicate()
    assert used_by_ranks(root.run(WAITING), slots) == set()


def test_an_agent_gives_up_once_the_one_of_node_0_has_ended_or_never_begins(
    root: RunsRoot, monkeypatch: pytest.MonkeyPatch
) -> None:
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
            local_slots._wait_for_node_0(attempt, kill_it_at_the_second_look)
    assert len(looks) == 2
    # What it wrote before it ended counts.
    attempt.turn.write_text('{"gpus": ["1"]}')
    assert local_slots._wait_for_node_0(attempt, lambda: False) == ["1"]
    monkeypatch.setattr(local_slots, "_BEGIN_S", 0.0)
    with pytest.raises(LaunchError, match="node 0 has ended before"):
        local_slots._wait_for_node_0(root.run(BEFORE).attempt("another", 0), lambda: False)


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
