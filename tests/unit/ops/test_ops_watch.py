"""A watch: its rounds, what it reports of them, its lock, and how it ends; and waiting for runs."""

from __future__ import annotations

import errno
import fcntl
import gc
import os
import signal
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
from helpers.fakeslurm import SlurmCommands
from helpers.simulated_run import RUN_ID, SimulatedRun
from hypothesis import given
from hypothesis import strategies as st

from slurmtrain.errors import PathError
from slurmtrain.model.run.journal_lines import Garbage
from slurmtrain.model.run.layout import RunDir
from slurmtrain.ops import watch as module
from slurmtrain.ops.shared.observe import ListedRuns, Observed
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.ops.sync import Synced, sync
from slurmtrain.ops.watch import (
    MOST_PAUSES,
    ReportFilter,
    WatchEvent,
    WatchLock,
    WatchRound,
    WatchRounds,
    _rest,
    do_round,
    pause_after,
    wait,
    watch,
    watch_lock,
)
from slurmtrain.registry.queries import IndexRow
from slurmtrain.registry.rows import Listed
from slurmtrain.slurm import scheduler
from slurmtrain.slurm.parse import QUEUE_FIELDS
from slurmtrain.system.process import StopSignal, this_process

if TYPE_CHECKING:
    from slurmtrain.registry.store import Store

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


def kinds(events: Sequence[WatchEvent]) -> list[str]:
    return [event.kind for event in events]


@pytest.fixture
def untracked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds without a tracking store, which has tests of its own."""
    monkeypatch.setattr(module, "sync", lambda workspace: sync(workspace, track=False))


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
        return pause_after(self._rounds.failures, 60)


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

    monkeypatch.setattr(module, "sync", fail)
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
    monkeypatch.setattr(module, "sync", lambda _: pytest.fail("it did a round"))
    workspace.prepare()
    events: list[WatchEvent] = []
    with watch_lock(workspace.root.watch_lock, 60):
        assert watch(workspace.config, 60, events.append) is not None
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

    monkeypatch.setattr(module, "sync", sync_with_signal)
    with StopSignal() as stop:
        assert watch(workspace.config, 3600, events.append, stop) is None
    assert (completed, kinds(events)) == (["round"], ["watching", "stopped"])
    assert events[1].message == "stopped by SIGTERM; the runs continue"
    assert workspace.root.watch_lock.read_bytes() == b""


def test_the_file_is_touched_while_the_watch_rests(tmp_path: Path) -> None:
    path = tmp_path / ".watch.lock"
    with watch_lock(path, 60) as lock, StopSignal() as stop:
        os.utime(path, (1, 1))
        _rest(0.02, 0.01, lock, stop)
        assert path.stat().st_mtime > 1


def messages(events: Sequence[WatchEvent]) -> list[str]:
    return [event.message for event in events]


def outcome(
    state: str = "running", *, attempt: int = 1, reason: str = "", down: bool = False, **synced: Any
) -> WatchRound:
    """A round after which the run r1 is in this state; ``synced``: what else the round did."""
    listed = Listed({"name": "x", "state": state, "attempt": attempt, "reason": reason})
    index = {"r1": IndexRow("r1", "x", state, settled=False, journals_at=0, attempts_at=0)}
    store = cast("Store", SimpleNamespace(index=lambda: index, listed=lambda _: {"r1": listed}))
    observed = Observed(ListedRuns(store), problems=synced.pop("unasked", ()))
    return WatchRound(Synced(observed, **synced), slurm_down=down)


def test_what_a_round_did_is_a_line_for_each_run() -> None:
    report = ReportFilter()
    assert messages(report.new_events(outcome("pending", attempt=2, started=["r1"]), 0.0)) == [
        "run r1 (x) was started again, as attempt 2"
    ]
    assert messages(report.new_events(outcome("pending", released=["r1"]), 0.0)) == [
        "run r1 (x) was held; its job was released"
    ]
    [ended] = report.new_events(outcome("failed", reason="rank 1 exited with code 1"), 0.0)
    assert (ended.message, ended.state) == ("run r1 (x) has failed: rank 1 exited with code 1", "failed")


@pytest.mark.parametrize("kind", ["mirrored", "cancelled"])
def test_what_happens_in_every_round_of_a_run_is_reported_at_its_first_and_at_its_end(kind: str) -> None:
    report = ReportFilter()
    events = [kinds(report.new_events(outcome("running", **{kind: ["r1"]}), 0.0)) for _ in range(3)]
    assert events == [[kind], [], []]
    assert set(kinds(report.new_events(outcome("completed", **{kind: ["r1"]}), 0.0))) == {"finished", kind}
    assert report.new_events(outcome("completed"), 0.0) == []


def test_a_note_and_unreadable_lines_are_reported_while_they_are_new() -> None:
    report = ReportFilter()
    bad = Garbage("journal/submit.jsonl", 3, b"x")
    with_garbage = outcome(notes=["n1 is left out"])
    with_garbage.synced.observed = replace(with_garbage.synced.observed, garbage=[("r1", bad), ("r1", bad)])
    assert messages(report.new_events(with_garbage, 0.0)) == [
        "n1 is left out",
        "run r1: 2 unreadable line(s) in journal/submit.jsonl",
    ]
    assert report.new_events(outcome(notes=["n1 is left out"]), 0.0) == []
    assert report.new_events(outcome(), 0.0) == []


@given(
    st.lists(st.tuples(st.sets(st.sampled_from("abc")), st.sampled_from(["complete", "down", "failed"])), max_size=12)
)
def test_each_problem_is_reported_once_until_it_is_over_and_over_only_after_a_complete_round(
    rounds: list[tuple[set[str], str]],
) -> None:
    report, lasting = ReportFilter(), set()
    for problems, kind in rounds:
        if kind == "failed":
            events = report.new_events(WatchRound(failure="z"), 0.0)
            problems = {"z"}
        else:
            events = report.new_events(outcome(problems=sorted(problems), down=kind == "down"), 0.0)
        assert {event.message for event in events if event.kind == "problem"} == problems - lasting
        over = lasting - problems if kind == "complete" else set()
        assert {event.message for event in events if event.kind == "over"} == {f"problem over: {text}" for text in over}
        lasting = (lasting | problems) - over


@pytest.fixture
def lock_file(tmp_path: Path) -> Path:
    return tmp_path / ".watch.lock"


def holder_elsewhere(lock_file: Path, *, silent_s: float, host: str = "other-login", **more: Any) -> None:
    """What one on another machine has left in the file."""
    WatchLock(None, os.open(lock_file, os.O_RDWR | os.O_CREAT, 0o600)).record_holder(60)
    text = lock_file.read_text().replace(f'"{socket.gethostname()}"', f'"{host}"')
    for name, value in more.items():
        text = text.replace(f'"{name}": {getattr(this_process(), name)}', f'"{name}": {value}')
    lock_file.write_text(text)
    os.utime(lock_file, (time.time() - silent_s,) * 2)


def without_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)


def test_a_second_watch_learns_who_holds_the_lock_and_another_may_take_it_afterwards(lock_file: Path) -> None:
    with watch_lock(lock_file, 60) as first:
        assert first.other is None
        assert lock_file.stat().st_mode & 0o777 == 0o600
        with watch_lock(lock_file, 60) as second:
            assert second.other.process == this_process()
            assert str(second.other).startswith(f"process {os.getpid()} on {socket.gethostname()}, since 2")
        # It may not have written its name yet.
        lock_file.write_bytes(b"")
        with watch_lock(lock_file, 60) as second:
            assert str(second.other) == "another process"
    with watch_lock(lock_file, 60) as third:
        assert third.other is None


@pytest.mark.parametrize("text", ["", "{", "[]", '{"host": 1}', '{"host": "a", "boot": "b", "pid": "x", "start": 1}'])
def test_a_lock_file_with_nothing_of_use_keeps_no_watch_away(lock_file: Path, text: str) -> None:
    lock_file.write_text(text)
    with watch_lock(lock_file, 60) as lock:
        assert lock.other is None


@pytest.mark.parametrize("locks", [True, False])
@pytest.mark.parametrize(("silent_s", "lives"), [(100, True), (-100, True), (200, False), (-1e6, False)])
def test_one_on_another_machine_lives_as_long_as_it_touches_the_file(
    lock_file: Path, monkeypatch: pytest.MonkeyPatch, silent_s: float, lives: bool, locks: bool
) -> None:
    holder_elsewhere(lock_file, silent_s=silent_s)
    if not locks:
        without_locks(monkeypatch)
    with watch_lock(lock_file, 60) as lock:
        assert (lock.other is not None) == lives


def test_a_watch_killed_on_this_machine_keeps_no_other_away(lock_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    holder_elsewhere(lock_file, silent_s=0, host=socket.gethostname(), start=1)
    with watch_lock(lock_file, 60) as lock:
        assert lock.other is None
    holder_elsewhere(lock_file, silent_s=0, host=socket.gethostname(), start=1)
    without_locks(monkeypatch)
    with watch_lock(lock_file, 60) as lock:
        assert lock.other is None


def test_without_locks_one_that_runs_on_this_machine_keeps_others_away(
    lock_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_locks(monkeypatch)
    holder_elsewhere(lock_file, silent_s=1e6, host=socket.gethostname())
    monkeypatch.setattr(module, "this_process", lambda: replace(this_process(), pid=os.getppid()))
    with watch_lock(lock_file, 60) as lock:
        assert lock.other is not None


OTHER_ID = "0123456788"


def test_a_run_that_stays_unreadable_is_no_longer_waited_for_after_a_while(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PATIENCE_S", 0.3)
    SimulatedRun(workspace.root.run(OTHER_ID), executor="local").submitted().started().ended("completed")
    run = workspace.root.run(RUN_ID)
    SimulatedRun(run, executor="local").submitted().started()
    os.mkfifo(run.journals / "x.jsonl")
    completed, synced = wait(workspace, [OTHER_ID, RUN_ID], lambda _: None)
    assert not completed
    assert [listed.state for listed in synced.observed.runs.fetch([OTHER_ID, RUN_ID]).values()] == [
        "completed",
        "unreadable",
    ]


def test_a_run_that_cannot_be_read_for_a_moment_is_waited_for(workspace: Workspace) -> None:
    run = workspace.root.run(RUN_ID)
    SimulatedRun(run, executor="local").submitted().started().ended("completed")
    os.mkfifo(run.journals / "x.jsonl")
    states: list[str] = []
    shown_once = threading.Event()

    def show(runs: object) -> None:
        states.extend(listed.state for listed in runs.values())  # type: ignore[attr-defined]
        if not shown_once.is_set():
            shown_once.set()
            (run.journals / "x.jsonl").unlink()

    completed, _ = wait(workspace, [RUN_ID], show)
    assert (completed, states) == (True, ["unreadable", "completed"])
