"""Looking at runs from a machine that may not be the one they are on."""

from __future__ import annotations

import errno
import os
import socket
import time
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.simulated_run import RUN_ID, SimulatedRun
from helpers.workspaces import make_workspace

from slurmtrain.errors import RunBusy
from slurmtrain.model.run.layout import RunDir
from slurmtrain.ops.cancel import cancel
from slurmtrain.ops.shared.observe import observe
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.ops.sync import sync
from slurmtrain.system.journal import Journal
from slurmtrain.system.locks import locked
from slurmtrain.system.process import Process, this_process


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    return make_workspace(tmp_path)


@pytest.fixture
def run(workspace: Workspace) -> SimulatedRun:
    """A run of this machine's executor that was created long ago."""
    return SimulatedRun(workspace.root.run(RUN_ID), executor="local", job="job").created()


def submitted(run: SimulatedRun, process: Process) -> None:
    """A submission that has told which process its job is."""
    run.submitted(host=process.host, process=process.to_dict())


def state(workspace: Workspace) -> tuple[str, str]:
    listed = observe(workspace).runs[RUN_ID]
    return listed.state, listed.reason


def test_a_submission_that_died_before_its_job_began_never_was_an_attempt(
    workspace: Workspace, run: SimulatedRun
) -> None:
    run.submitting(host=socket.gethostname())
    assert state(workspace) == ("created", "its submission was killed before the job began")
    assert observe(workspace).runs[RUN_ID].attempt == 0


def test_a_submission_that_still_holds_its_lock_or_is_on_another_machine_is_left_alone(
    workspace: Workspace, run: SimulatedRun
) -> None:
    run.submitting(host=socket.gethostname())
    with locked(run.directory.lock):
        assert state(workspace)[0] == "pending"
    run.submitting(2, host="elsewhere")
    assert state(workspace)[0] == "pending"


@pytest.mark.parametrize("manner", ["its number is another process's", "the machine was started again"])
def test_a_run_whose_processes_are_gone_is_lost_and_that_is_journaled_once(
    workspace: Workspace, run: SimulatedRun, manner: str
) -> None:
    me = this_process()
    submitted(run, replace(me, start=me.start + 1) if "number" in manner else replace(me, boot="before"))
    assert state(workspace)[0] == "lost"
    assert state(workspace)[0] == "lost"
    assert len(list(run.directory.journals.glob("observe-*.jsonl"))) == 1


def test_a_run_whose_process_lives_is_not_lost(workspace: Workspace, run: SimulatedRun) -> None:
    submitted(run, this_process())
    assert state(workspace)[0] == "pending"


def test_where_the_end_of_a_run_cannot_be_noted_its_reason_says_so(
    workspace: Workspace, run: SimulatedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    me = this_process()
    submitted(run, Process(me.host, me.boot, me.pid, me.start + 1))

    def fail(self: Journal, event: object) -> float:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(Journal, "write", fail)
        before, reason = state(workspace)
    assert before != "lost"
    assert reason.startswith("its processes are gone, but its end cannot be recorded in ")
    assert "no space left on the device" in reason
    assert state(workspace)[0] == "lost"


def test_a_run_on_another_machine_is_neither_lost_nor_cancelled_from_here(
    workspace: Workspace, run: SimulatedRun
) -> None:
    submitted(run, Process("elsewhere", "b", 1, 2))
    assert state(workspace)[0] == "pending"
    with pytest.raises(RunBusy, match="is on elsewhere"):
        cancel(workspace, [RUN_ID])
    assert not list(run.directory.journals.glob("cancel-*"))


def test_a_run_that_was_cancelled_before_its_job_began_stays_cancelled(workspace: Workspace, run: SimulatedRun) -> None:
    cancel(workspace, [RUN_ID])
    assert state(workspace)[0] == "cancelled"


def test_half_made_run_directories_are_removed_unless_young_or_locked(workspace: Workspace, run: SimulatedRun) -> None:
    old, young, held = (workspace.root.unborn(run_id) for run_id in ("2123456789", "3123456789", "4123456789"))
    for directory in (old, young, held):
        directory.path.mkdir()
    later = time.time() + 3600
    with locked(held.lock):
        for directory, at in ((old, 1), (young, later), (held, 1)):
            os.utime(directory.path, (at, at))
        sync(workspace)
    assert [directory.path.exists() for directory in (old, young, held)] == [False, True, True]


@pytest.mark.parametrize("is_over", [True, False])
def test_whose_a_run_is_costs_at_most_one_look_at_its_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_over: bool
) -> None:
    def looks(count: int) -> int:
        """How many paths the third command looks at, if there are this many runs."""
        for number in range(count):
            run = SimulatedRun(RunDir(tmp_path / f"{count}/{number:010d}"), executor="local", job="job")
            run.submitted(process={**this_process().to_dict(), **({"start": 1} if is_over else {})}).started()
            if is_over:
                run.ended("completed")
        for folder in (tmp_path / f"{count}").glob("*/*"):
            os.utime(folder, (1, 1))
        observe(make_workspace(tmp_path / f"{count}"))
        observe(make_workspace(tmp_path / f"{count}"))
        paths: list[object] = []
        with monkeypatch.context() as patched:
            for name in ("stat", "lstat"):
                look = getattr(os, name)
                patched.setattr(os, name, lambda *path, look=look, **more: (paths.append(path), look(*path, **more))[1])
            observe(make_workspace(tmp_path / f"{count}"))
        # Threads of other tests may look elsewhere meanwhile.
        return sum(str(tmp_path) in str(path) for path in paths)

    # Of a run that is over, the two folders in which files appear; of any other, its directory, besides its files.
    assert looks(12) - looks(4) == 8 * (2 if is_over else 1)
