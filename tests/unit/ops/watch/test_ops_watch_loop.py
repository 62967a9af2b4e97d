"""The loop of a watch: what a round costs, what it survives, how long it rests, and how it ends."""

from __future__ import annotations

import errno
import gc
import os
import signal
import time
from pathlib import Path

import pytest
from helpers.fakeslurm import SlurmCommands
from helpers.simulated_run import RUN_ID, SimulatedRun
from hypothesis import given
from hypothesis import strategies as st

from slurmtrain.errors import PathError
from slurmtrain.model.run.layout import RunDir
from slurmtrain.ops.shared.interrupt import StopSignal
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.ops.sync import Synced, sync
from slurmtrain.ops.watch import rounds as rounds_module
from slurmtrain.ops.watch.lock import watch_lock
from slurmtrain.ops.watch.loop import MOST_PAUSES, WatchRounds, _rest, pause_after, watch, watch_once
from slurmtrain.ops.watch.report import ReportFilter, WatchEvent
from slurmtrain.ops.watch.rounds import WatchRound, do_round
from slurmtrain.slurm import scheduler
from slurmtrain.slurm.parse import QUEUE_FIELDS

DOWN = "squeue: error: Unable to contact slurm controller"


@pytest.fixture
def slurm(slurm: SlurmCommands) -> SlurmCommands:
    slurm.replies("squeue", queued())
    return slurm


@pytest.fixture
def run(workspace: Workspace) -> RunDir:
    """A run that was handed to Slurm as job 7, and has not begun."""
    directory = workspace.root.run(RUN_ID)
    SimulatedRun(directory, now=time.time() - 10).created(name="x").submitted()
    return directory


def queued(job_id: str = "7", state: str = "PENDING") -> str:
    cells = {"JobArrayID": job_id, "State": state, "Reason": "Priority", "RestartCnt": "0", "Name": f"x-{RUN_ID}"}
    return "".join(f"{cells.get(name, ''):<{width}}" for name, width in QUEUE_FIELDS) + "\n"


def kinds(events: list[WatchEvent]) -> list[str]:
    return [event.kind for event in events]


@pytest.fixture
def untracked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds without a tracking store, which has tests of its own."""
    monkeypatch.setattr(rounds_module, "sync", lambda workspace: sync(workspace, track=False))


class Recorded:
    """Rounds of one watch, and what each of them reports."""

    def __init__(self, workspace: Workspace) -> None:
        self._events: list[WatchEvent] = []
        self._rounds = WatchRounds(workspace.config, self._events.append)

    def next(self) -> list[WatchEvent]:
        """Do a round, and return the events that it reported."""
        self._events.clear()
        self._rounds.next()
        return list(self._events)

    @property
    def pause_s(self) -> float:
        return self._rounds.pause_s(60)


@pytest.fixture
def rounds(workspace: Workspace, untracked: None) -> Recorded:
    return Recorded(workspace)


def test_a_round_asks_squeue_once_and_sacct_only_for_what_squeue_leaves_open(
    run: RunDir, slurm: SlurmCommands, rounds: Recorded
) -> None:
    for count in (1, 2, 3):
        rounds.next()
        assert (len(slurm.calls("squeue")), len(slurm.calls("sacct"))) == (count, 0)
    slurm.replies("squeue")
    rounds.next()
    assert (len(slurm.calls("squeue")), len(slurm.calls("sacct"))) == (4, 1)


def test_rounds_in_which_nothing_happens_are_quiet(run: RunDir, slurm: SlurmCommands, rounds: Recorded) -> None:
    assert [rounds.next() for _ in range(3)] == [[], [], []]


def test_a_run_that_ends_is_reported_once_with_its_reason(run: RunDir, slurm: SlurmCommands, rounds: Recorded) -> None:
    assert rounds.next() == []
    slurm.replies("squeue", queued(state="CANCELLED"))
    [event] = rounds.next()
    assert (event.kind, event.run, event.state) == ("finished", RUN_ID, "cancelled")
    assert event.message.startswith(f"run {RUN_ID} (x) was cancelled")
    assert rounds.next() == []


def test_a_single_round_reports_what_ended_since_the_registry_was_last_read(
    run: RunDir, slurm: SlurmCommands, untracked: None, workspace: Workspace
) -> None:
    do_round(workspace.config)
    slurm.replies("squeue", queued(state="CANCELLED"))
    assert kinds(Recorded(workspace).next()) == ["finished"]
    assert Recorded(workspace).next() == []


def test_slurm_that_is_down_is_a_problem_reported_once_and_once_more_when_it_is_back(
    run: RunDir, slurm: SlurmCommands, rounds: Recorded
) -> None:
    rounds.next()
    slurm.fails("squeue", DOWN)
    [problem] = rounds.next()
    assert problem.kind == "problem"
    assert "Unable to contact slurm controller" in problem.message
    pauses = [rounds.pause_s]
    for _ in range(5):
        assert rounds.next() == []
        pauses.append(rounds.pause_s)
    assert pauses == [120, 240, 480, 600, 600, 600]
    assert len(slurm.calls("squeue")) == 7
    slurm.replies("squeue", queued())
    [over] = rounds.next()
    assert (over.kind, rounds.pause_s) == ("over", 60)


def test_a_round_that_fails_is_a_problem_and_ends_nothing(
    run: RunDir, slurm: SlurmCommands, rounds: Recorded, workspace: Workspace
) -> None:
    registry = workspace.config.registry
    if not isinstance(registry, Path):
        pytest.skip("here a file is replaced")
    rounds.next()
    aside = registry.rename(registry.with_name("aside"))
    registry.mkdir()
    assert kinds(rounds.next()) == ["problem"]
    assert rounds.next() == []
    assert rounds.pause_s == 60
    registry.rmdir()
    aside.rename(registry)
    assert kinds(rounds.next()) == ["over"]


def test_a_round_that_repairs_the_registry_notes_it_once(run: RunDir, rounds: Recorded, workspace: Workspace) -> None:
    registry = workspace.config.registry
    if not isinstance(registry, Path):
        pytest.skip("here a file is damaged")
    rounds.next()
    registry.write_bytes(b"this is no database" * 100)
    [event] = rounds.next()
    assert (event.kind, "was damaged" in event.message) == ("note", True)
    assert rounds.next() == []


@pytest.mark.parametrize(
    ("error", "failure"),
    [
        (OSError(errno.ESTALE, "Stale file handle", "/runs"), "/runs: stale file handle"),
        (ZeroDivisionError("by zero"), "an unexpected error: ZeroDivisionError: by zero"),
        (PathError("the place is not there"), "the place is not there"),
    ],
)
def test_whatever_fails_in_a_round_is_described_in_a_sentence(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch, error: Exception, failure: str
) -> None:
    def fail(_: Workspace) -> Synced:
        raise error

    monkeypatch.setattr(rounds_module, "sync", fail)
    assert do_round(workspace.config) == WatchRound(failure=failure)


def test_rounds_leave_nothing_open_and_keep_nothing(
    run: RunDir, workspace: Workspace, untracked: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler, "run_command", lambda *_, **__: queued())
    report = ReportFilter()

    def held(rounds: int) -> tuple[int, int]:
        for _ in range(rounds):
            report.new_events(do_round(workspace.config), 0.0)
        gc.collect()
        return len(os.listdir("/proc/self/fd")), len(gc.get_objects())

    open_before, objects_before = held(5)
    open_after, objects_after = held(20)
    assert open_after <= open_before
    assert objects_after - objects_before < 20 * 5


@given(st.integers(0, 10_000), st.floats(10, 3600))
def test_pauses_grow_up_to_ten_times_the_usual_one(failures: int, every_s: float) -> None:
    assert pause_after(0, every_s) == every_s
    assert every_s <= pause_after(failures, every_s) <= pause_after(failures + 1, every_s) <= MOST_PAUSES * every_s


def test_a_single_round_beside_a_watch_does_nothing(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds_module, "sync", lambda _: pytest.fail("it did a round"))
    workspace.prepare()
    events: list[WatchEvent] = []
    with watch_lock(workspace.root.watch_lock, 60):
        assert watch_once(workspace.config, 60, events.append) is not None
        with StopSignal() as stop:
            assert watch(workspace.config, 60, events.append, stop) is not None
    assert events == []


def test_a_signal_lets_the_round_end_and_then_ends_the_watch(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[WatchEvent] = []
    completed: list[str] = []

    def sync_with_signal(place: Workspace) -> Synced:
        os.kill(os.getpid(), signal.SIGTERM)
        synced = sync(place, track=False)
        completed.append("round")
        return synced

    monkeypatch.setattr(rounds_module, "sync", sync_with_signal)
    with StopSignal() as stop:
        assert watch(workspace.config, 3600, events.append, stop) is None
    assert (completed, kinds(events)) == (["round"], ["watching", "stopped"])
    assert events[1].message == "stopped by SIGTERM; runs go on"
    assert workspace.root.watch_lock.read_bytes() == b""


def test_the_file_is_touched_while_the_watch_rests(tmp_path: Path) -> None:
    path = tmp_path / ".watch.lock"
    with watch_lock(path, 60) as lock, StopSignal() as stop:
        os.utime(path, (1, 1))
        _rest(0.02, 0.01, lock, stop)
        assert path.stat().st_mtime > 1
