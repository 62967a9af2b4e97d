"""Watching: what a round costs, what of it is told, who watches, and how it ends."""

from __future__ import annotations

import errno
import fcntl
import gc
import os
import signal
import socket
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers.fakeslurm import SlurmCommands
from hypothesis import given
from hypothesis import strategies as st

from slurmtrain.errors import PlaceError
from slurmtrain.model.run.event import encode
from slurmtrain.model.run.journal import Garbage
from slurmtrain.model.run.layout import RunDir
from slurmtrain.ops import watch as module
from slurmtrain.ops.shared.interrupt import Stop
from slurmtrain.ops.shared.observe import Observed
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.ops.sync import Synced
from slurmtrain.ops.watch import (
    MOST_PAUSES,
    Post,
    ReportFilter,
    WatchEvent,
    WatchRound,
    look,
    pause_after,
    post,
    watch,
    watch_once,
)
from slurmtrain.registry.store import Listed
from slurmtrain.slurm import scheduler
from slurmtrain.slurm.parse import QUEUE_FIELDS
from slurmtrain.system.process import myself

RUN_ID = "0123456789"
DOWN = "squeue: error: Unable to contact slurm controller"


@pytest.fixture
def slurm(slurm: SlurmCommands) -> SlurmCommands:
    slurm.replies("squeue", queued())
    return slurm


@pytest.fixture
def run(workspace: Workspace) -> RunDir:
    """A run that was handed to Slurm as job 7, and has not begun."""
    directory = workspace.root.run(RUN_ID)
    for path in (directory.journals, directory.attempts, directory.checkpoints):
        path.mkdir(parents=True)
    said: list[tuple[str, dict[str, Any]]] = [
        ("created", {"name": "x", "executor": "slurm"}),
        ("submitting", {"submission": 1, "attempt": 1, "executor": "slurm", "host": "login"}),
        ("submitted", {"submission": 1, "job_id": "7"}),
    ]
    lines = [encode(time.time(), kind, data) for kind, data in said]
    (directory.journals / "submit.jsonl").write_bytes(b"".join(lines))
    return directory


def queued(job_id: str = "7", state: str = "PENDING") -> str:
    cells = {"JobArrayID": job_id, "State": state, "Reason": "Priority", "RestartCnt": "0", "Name": f"x-{RUN_ID}"}
    return "".join(f"{cells.get(name, ''):<{width}}" for name, width in QUEUE_FIELDS) + "\n"


def kinds(news: Sequence[WatchEvent]) -> list[str]:
    return [one.kind for one in news]


def unmirrored(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds without a tracking store, which has tests of its own."""
    monkeypatch.setattr(module, "sync", lambda place: module_sync(place, track=False))


module_sync = module.sync


# --- rounds -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def rounds(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A round, told; and the memory of all of them."""
    unmirrored(workspace, monkeypatch)
    memory = ReportFilter()

    def do() -> list[WatchEvent]:
        return memory.news(look(workspace.config), time.time())

    return do, memory


def test_a_round_asks_squeue_once_and_sacct_only_for_what_squeue_leaves_open(
    run: RunDir, slurm: SlurmCommands, rounds: Any
) -> None:
    do, _ = rounds
    for asked in (1, 2, 3):
        do()
        assert (len(slurm.calls("squeue")), len(slurm.calls("sacct"))) == (asked, 0)
    slurm.replies("squeue")
    do()
    assert (len(slurm.calls("squeue")), len(slurm.calls("sacct"))) == (4, 1)


def test_rounds_in_which_nothing_happens_are_quiet(run: RunDir, slurm: SlurmCommands, rounds: Any) -> None:
    do, _ = rounds
    assert [do() for _ in range(3)] == [[], [], []]


def test_a_run_that_ends_is_told_of_once_with_its_reason(run: RunDir, slurm: SlurmCommands, rounds: Any) -> None:
    do, _ = rounds
    assert do() == []
    slurm.replies("squeue", queued(state="CANCELLED"))
    [news] = do()
    assert (news.kind, news.run, news.state) == ("finished", RUN_ID, "cancelled")
    assert news.message.startswith(f"run {RUN_ID} (x) was cancelled")
    assert do() == []


def test_a_single_round_tells_what_ended_since_the_registry_was_last_read(
    run: RunDir, slurm: SlurmCommands, rounds: Any, workspace: Workspace
) -> None:
    look(workspace.config)
    slurm.replies("squeue", queued(state="CANCELLED"))
    assert kinds(ReportFilter().news(look(workspace.config), 0.0)) == ["finished"]
    assert ReportFilter().news(look(workspace.config), 0.0) == []


def test_slurm_that_is_down_is_a_problem_told_once_and_once_more_when_it_is_back(
    run: RunDir, slurm: SlurmCommands, rounds: Any
) -> None:
    do, memory = rounds
    do()
    slurm.fails("squeue", DOWN)
    [problem] = do()
    assert problem.kind == "problem"
    assert "Unable to contact slurm controller" in problem.message
    pauses = [memory.pause(60)]
    for _ in range(5):
        assert do() == []
        pauses.append(memory.pause(60))
    assert pauses == [120, 240, 480, 600, 600, 600]
    assert len(slurm.calls("squeue")) == 7
    slurm.replies("squeue", queued())
    [over] = do()
    assert (over.kind, memory.pause(60)) == ("over", 60)


def test_a_round_that_fails_is_a_problem_and_ends_nothing(
    run: RunDir, slurm: SlurmCommands, rounds: Any, workspace: Workspace
) -> None:
    do, memory = rounds
    do()
    kept = workspace.config.registry.read_bytes()
    workspace.config.registry.write_bytes(b"this is no database" * 100)
    assert kinds(do()) == ["problem"]
    assert do() == []
    assert memory.pause(60) == 60
    workspace.config.registry.write_bytes(kept)
    assert kinds(do()) == ["over"]


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(errno.ESTALE, "Stale file handle", "/runs"), "/runs: stale file handle"),
        (ZeroDivisionError("by zero"), "an error that slurmtrain does not know: ZeroDivisionError: by zero"),
        (PlaceError("the place is not there"), "the place is not there"),
    ],
)
def test_whatever_happens_in_a_round_is_told_in_a_sentence(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch, error: Exception, words: str
) -> None:
    def fail(_: Workspace) -> Synced:
        raise error

    monkeypatch.setattr(module, "sync", fail)
    assert look(workspace.config) == WatchRound(failure=words)


def test_rounds_leave_nothing_open_and_keep_nothing(
    run: RunDir, workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler, "ask", lambda *_, **__: queued())
    unmirrored(workspace, monkeypatch)
    memory = ReportFilter()

    def held(rounds: int) -> tuple[int, int]:
        for _ in range(rounds):
            memory.news(look(workspace.config), 0.0)
        gc.collect()
        return len(os.listdir("/proc/self/fd")), len(gc.get_objects())

    open_before, objects_before = held(10)
    open_after, objects_after = held(60)
    assert open_after <= open_before
    assert objects_after - objects_before < 60 * 5


# --- what is told -----------------------------------------------------------------------------------------------------


def listed(state: str = "running", attempt: int = 1, reason: str = "") -> Listed:
    return Listed({"name": "x", "state": state, "attempt": attempt, "reason": reason})


def found(
    state: str = "running", *, attempt: int = 1, reason: str = "", down: bool = False, **synced: Any
) -> WatchRound:
    observed = Observed({"r1": listed(state, attempt, reason)}, problems=synced.pop("unasked", ()))
    return WatchRound(Synced(observed, **synced), slurm_down=down)


def test_what_a_round_did_is_a_line_for_each_run() -> None:
    memory = ReportFilter()
    assert [one.message for one in memory.news(found("pending", attempt=2, started=["r1"]), 0.0)] == [
        "run r1 (x) was started again, as attempt 2"
    ]
    assert [one.message for one in memory.news(found("pending", released=["r1"]), 0.0)] == [
        "run r1 (x) was held; its job was released"
    ]
    [ended] = memory.news(found("failed", reason="rank 1 exited with code 1"), 0.0)
    assert (ended.message, ended.state) == ("run r1 (x) has failed: rank 1 exited with code 1", "failed")


@pytest.mark.parametrize("kind", ["mirrored", "cancelled"])
def test_what_happens_in_every_round_of_a_run_is_told_at_its_first_and_at_its_end(kind: str) -> None:
    memory = ReportFilter()
    told = [kinds(memory.news(found("running", **{kind: ["r1"]}), 0.0)) for _ in range(3)]
    assert told == [[kind], [], []]
    assert set(kinds(memory.news(found("completed", **{kind: ["r1"]}), 0.0))) == {"finished", kind}
    assert memory.news(found("completed"), 0.0) == []


def test_a_note_and_unreadable_lines_are_told_while_they_are_new() -> None:
    memory = ReportFilter()
    bad = Garbage("journal/submit.jsonl", 3, b"x")
    with_garbage = found(notes=["n1 is left out"])
    assert with_garbage.synced is not None
    with_garbage.synced.observed = replace(with_garbage.synced.observed, garbage=[("r1", bad), ("r1", bad)])
    assert [one.message for one in memory.news(with_garbage, 0.0)] == [
        "n1 is left out",
        "run r1: 2 unreadable line(s) in journal/submit.jsonl",
    ]
    assert memory.news(found(notes=["n1 is left out"]), 0.0) == []
    assert memory.news(found(), 0.0) == []


@given(st.lists(st.tuples(st.sets(st.sampled_from("abc")), st.sampled_from(["whole", "down", "failed"])), max_size=12))
def test_each_problem_is_told_once_until_it_is_over_and_over_only_after_a_whole_round(
    rounds: list[tuple[set[str], str]],
) -> None:
    memory, lasting = ReportFilter(), set()
    for problems, how in rounds:
        if how == "failed":
            news = memory.news(WatchRound(failure="z"), 0.0)
            problems = {"z"}
        else:
            news = memory.news(found(problems=sorted(problems), down=how == "down"), 0.0)
        assert {one.message for one in news if one.kind == "problem"} == problems - lasting
        gone = lasting - problems if how == "whole" else set()
        assert {one.message for one in news if one.kind == "over"} == {f"no longer so: {text}" for text in gone}
        lasting = (lasting | problems) - gone


@given(st.integers(0, 10_000), st.floats(10, 3600))
def test_pauses_grow_up_to_ten_times_the_usual_one(failures: int, every: float) -> None:
    assert pause_after(0, every) == every
    assert every <= pause_after(failures, every) <= pause_after(failures + 1, every) <= MOST_PAUSES * every


# --- who watches ------------------------------------------------------------------------------------------------------


@pytest.fixture
def lock(tmp_path: Path) -> Path:
    return tmp_path / ".watch.lock"


def elsewhere(lock: Path, *, silent_s: float, host: str = "other-login", **more: Any) -> None:
    """What one on another machine has left in the file."""
    Post(None, os.open(lock, os.O_RDWR | os.O_CREAT, 0o600)).take(60)
    text = lock.read_text().replace(f'"{socket.gethostname()}"', f'"{host}"')
    for name, value in more.items():
        text = text.replace(f'"{name}": {getattr(myself(), name)}', f'"{name}": {value}')
    lock.write_text(text)
    os.utime(lock, (time.time() - silent_s,) * 2)


def without_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)


def test_the_second_one_learns_who_watches_and_the_next_may_after_that_one_has_left(lock: Path) -> None:
    with post(lock, 60) as first:
        assert first.other is None
        with post(lock, 60) as second:
            assert second.other is not None
            assert second.other.process == myself()
            assert str(second.other).startswith(f"process {os.getpid()} on {socket.gethostname()}, since 2")
    with post(lock, 60) as third:
        assert third.other is None


def test_the_file_of_the_lock_is_private(lock: Path) -> None:
    with post(lock, 60):
        assert lock.stat().st_mode & 0o777 == 0o600


def test_one_that_holds_the_lock_and_has_not_said_who_it_is_watches_too(lock: Path) -> None:
    with post(lock, 60):
        lock.write_bytes(b"")
        with post(lock, 60) as second:
            assert str(second.other) == "another process"


@pytest.mark.parametrize("text", ["", "{", "[]", '{"host": 1}', '{"host": "a", "boot": "b", "pid": "x", "start": 1}'])
def test_a_file_that_says_nothing_of_use_keeps_nobody_away(lock: Path, text: str) -> None:
    lock.write_text(text)
    with post(lock, 60) as place:
        assert place.other is None


@pytest.mark.parametrize("locks", [True, False])
@pytest.mark.parametrize(("silent_s", "lives"), [(100, True), (-100, True), (200, False), (-1e6, False)])
def test_one_on_another_machine_lives_as_long_as_it_touches_the_file(
    lock: Path, monkeypatch: pytest.MonkeyPatch, silent_s: float, lives: bool, locks: bool
) -> None:
    elsewhere(lock, silent_s=silent_s)
    if not locks:
        without_locks(monkeypatch)
    with post(lock, 60) as place:
        assert (place.other is not None) == lives


def test_one_that_was_killed_on_this_machine_keeps_nobody_away(lock: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere(lock, silent_s=0, host=socket.gethostname(), start=1)
    with post(lock, 60) as place:
        assert place.other is None
    elsewhere(lock, silent_s=0, host=socket.gethostname(), start=1)
    without_locks(monkeypatch)
    with post(lock, 60) as place:
        assert place.other is None


def test_without_locks_one_that_runs_on_this_machine_keeps_others_away(
    lock: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_locks(monkeypatch)
    elsewhere(lock, silent_s=1e6, host=socket.gethostname())
    monkeypatch.setattr(module, "myself", lambda: replace(myself(), pid=os.getppid()))
    with post(lock, 60) as place:
        assert place.other is not None


def test_a_single_round_beside_one_that_watches_does_nothing(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "sync", lambda _: pytest.fail("it did a round"))
    workspace.prepare()
    told: list[WatchEvent] = []
    with post(workspace.root.watch_lock, 60):
        assert watch_once(workspace.config, 60, told.append) is not None
        with Stop() as stop:
            assert watch(workspace.config, 60, told.append, stop) is not None
    assert told == []


# --- until it is ended ------------------------------------------------------------------------------------------------


def test_a_signal_lets_the_round_end_and_then_ends_the_watch(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[WatchEvent] = []
    done: list[str] = []

    def one_round(place: Workspace) -> Synced:
        os.kill(os.getpid(), signal.SIGTERM)
        synced = module_sync(place, track=False)
        done.append("round")
        return synced

    monkeypatch.setattr(module, "sync", one_round)
    with Stop() as stop:
        assert watch(workspace.config, 3600, told.append, stop) is None
    assert (done, kinds(told)) == (["round"], ["watching", "stopped"])
    assert told[1].message == "stopped by SIGTERM; runs go on"
    assert workspace.root.watch_lock.read_bytes() == b""


def test_the_file_is_touched_while_the_watch_rests(lock: Path) -> None:
    with post(lock, 60) as place, Stop() as stop:
        os.utime(lock, (1, 1))
        module._rest(0.02, 0.01, place, stop)
        assert lock.stat().st_mtime > 1
