"""Loops without a session: what they report, and how they learn of a stop."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.program import program
from helpers.ranks import Pair

import slurmtrain
from slurmtrain.model.diagnosis.hang import Beat, Phase
from slurmtrain.model.interruption.exit_report import STOPPED
from slurmtrain.model.run.layout import AttemptDir, RunDir
from slurmtrain.runtime.job.environment import Worker, this_worker
from slurmtrain.runtime.job.heartbeat import Board
from slurmtrain.runtime.job.process_group import RankGroup
from slurmtrain.runtime.training import loop
from slurmtrain.runtime.training.loop import Loop

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT)


@pytest.fixture
def board() -> Iterator[Board]:
    board = Board(1)
    yield board
    board.close()


@pytest.fixture
def attempt(tmp_path: Path, board: Board, monkeypatch: pytest.MonkeyPatch) -> Iterator[AttemptDir]:
    """Make this process the only rank of an attempt."""
    handlers = {each: signal.getsignal(each) for each in SIGNALS}
    directory = RunDir(tmp_path / "0123456789").attempt("job", 0)
    directory.path.mkdir(parents=True)
    monkeypatch.setenv("SLURMTRAIN_ATTEMPT_DIR", str(directory.path))
    monkeypatch.setenv("SLURMTRAIN_SUBMISSION", "1")
    monkeypatch.setenv("SLURMTRAIN_HEARTBEAT", board.path)
    loop.current.cache_clear()
    yield directory
    loop.current()._close()
    loop.current.cache_clear()
    for each, handler in handlers.items():
        signal.signal(each, handler)


@pytest.fixture
def _outside() -> Iterator[None]:
    """Make this process forget the loop that an earlier test made."""
    loop.current.cache_clear()
    yield
    loop.current.cache_clear()


def events(attempt: AttemptDir) -> list[dict[str, Any]]:
    journal = attempt.rank_journal(0)
    return [json.loads(line) for line in journal.read_text().splitlines()] if journal.exists() else []


def kinds(attempt: AttemptDir) -> list[str]:
    return [event["kind"] for event in events(attempt)]


def lines(attempt: AttemptDir) -> list[tuple[int, dict[str, float]]]:
    """The steps and metrics that were written."""
    if not attempt.metrics.exists():
        return []
    records = [json.loads(line) for line in attempt.metrics.read_text().splitlines()]
    return [(record["step"], record.get("metrics", {})) for record in records]


def beat(board: Board) -> Beat:
    return board.read()[0]


@pytest.mark.usefixtures("_outside")
def test_outside_a_job_nothing_is_done_but_leaving(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    before = signal.getsignal(signal.SIGTERM)
    slurmtrain.progress(0, 10)
    slurmtrain.log(loss=1)
    with slurmtrain.pause("evaluation"):
        slurmtrain.progress(10, 10)
    assert slurmtrain.stop_requested() is False
    assert signal.getsignal(signal.SIGTERM) is before
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(SystemExit) as left:
        slurmtrain.leave()
    assert left.value.code == STOPPED


def test_steps_metrics_and_the_end_are_recorded(attempt: AttemptDir, board: Board) -> None:
    phases = []
    for step in (5, 6, 7):
        if step > 5:
            slurmtrain.log({"val/acc": 1}, loss=torch.tensor(0.5))
        slurmtrain.progress(step, 7)
        phases.append((beat(board).step, beat(board).phase))
    assert lines(attempt) == [(6, {"val/acc": 1, "loss": 0.5}), (7, {"val/acc": 1, "loss": 0.5})]
    assert phases == [(5, Phase.FIRST), (6, Phase.TRAINING), (7, Phase.READY)]
    assert beat(board).step_s > 0
    assert [(event["kind"], event.get("step", event.get("total_steps"))) for event in events(attempt)] == [
        ("session", 5),
        ("total", 7),
        ("finished", 7),
    ]


def test_a_step_without_metrics_is_recorded_too(attempt: AttemptDir) -> None:
    slurmtrain.progress(0)
    slurmtrain.progress(1)
    assert lines(attempt) == [(1, {})]
    assert kinds(attempt) == ["session", "total"]


def test_another_total_is_journaled_when_it_becomes_known(attempt: AttemptDir) -> None:
    for total in (None, 20, 20, 30):
        slurmtrain.progress(1, total)
    assert [event["total_steps"] for event in events(attempt) if event["kind"] == "total"] == [None, 20, 30]


@pytest.mark.parametrize("step", [-1, 1.5, True, "3", None])
def test_what_is_no_number_of_steps_is_refused(attempt: AttemptDir, step: Any) -> None:
    with pytest.raises(ValueError, match="takes whole numbers of steps, not"):
        slurmtrain.progress(step)


def test_a_metric_that_is_no_number_is_refused_where_it_is_logged(attempt: AttemptDir) -> None:
    with pytest.raises(TypeError, match="'words' must be one number, not str"):
        slurmtrain.log(words="many")


def test_an_adapter_records_the_numbers_among_what_a_trainer_logs(attempt: AttemptDir) -> None:
    current = loop.current()
    current.progress(0)
    current.progress(1)
    current.record({"loss": torch.tensor(2.0), "name": "x", "histogram": torch.ones(3)})
    current.record({"name": "x"})
    assert lines(attempt) == [(1, {}), (1, {"loss": 2.0})]


def test_a_stop_signal_is_answered_once_asked_and_leaving_is_journaled(attempt: AttemptDir, board: Board) -> None:
    slurmtrain.progress(3, 10)
    assert not slurmtrain.stop_requested()
    os.kill(os.getpid(), signal.SIGTERM)
    assert slurmtrain.stop_requested()
    assert slurmtrain.stop_requested()
    assert beat(board).phase is Phase.STOPPING
    slurmtrain.log(loss=1)
    slurmtrain.progress(4, 10)
    assert beat(board).phase is Phase.STOPPING
    slurmtrain.log(late=2)
    with pytest.raises(SystemExit) as left:
        slurmtrain.leave()
    assert left.value.code == STOPPED
    assert lines(attempt) == [(4, {"loss": 1}), (4, {"late": 2})]
    assert (events(attempt)[-1]["kind"], events(attempt)[-1]["step"]) == ("stopped", 4)
    assert beat(board).phase is Phase.LEFT
    # What a script does after that, as in an except clause, is too late to be recorded.
    slurmtrain.progress(10, 10)
    assert kinds(attempt)[-1] == "stopped"


def test_after_a_stop_that_the_ranks_agreed_on_reaching_the_total_does_not_complete_the_run(
    attempt: AttemptDir,
) -> None:
    slurmtrain.progress(3, 10)
    os.kill(os.getpid(), signal.SIGTERM)
    assert slurmtrain.stop_requested()
    slurmtrain.progress(10, 10)
    assert "finished" not in kinds(attempt)


def test_handlers_that_a_trainer_has_replaced_are_taken_back(attempt: AttemptDir) -> None:
    current = loop.current()
    current.listen()
    own = signal.getsignal(signal.SIGTERM)
    signal.signal(signal.SIGTERM, lambda *_: None)
    current.listen()
    assert signal.getsignal(signal.SIGTERM) == own
    os.kill(os.getpid(), signal.SIGTERM)
    assert current.stop_requested()


def test_a_session_and_a_loop_in_one_process_are_refused(attempt: AttemptDir) -> None:
    from slurmtrain.runtime.job.signals import StopFlag

    StopFlag().install()
    with pytest.raises(RuntimeError, match=r"has a slurmtrain.session\(\): use run.steps\(\)"):
        slurmtrain.progress(0)


def test_a_forked_child_reports_nothing(attempt: AttemptDir) -> None:
    slurmtrain.progress(0, 5)
    child = os.fork()
    if child == 0:
        slurmtrain.progress(5, 5)
        slurmtrain.log(loss=1)
        os._exit(int(slurmtrain.stop_requested()))
    assert os.waitpid(child, 0)[1] == 0
    assert (lines(attempt), kinds(attempt)) == ([], ["session", "total"])


def test_the_time_in_another_phase_is_none_of_a_step(
    attempt: AttemptDir, board: Board, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(loop, "time", SimpleNamespace(monotonic=lambda: now[0]))
    current = loop.current()
    current.progress(0)
    now[0] += 2
    current.progress(1)
    with current.during(Phase.SAVING):
        assert beat(board).phase is Phase.SAVING
        now[0] += 50
    assert beat(board).phase is Phase.TRAINING
    now[0] += 2
    current.progress(2)
    assert (beat(board).step_s, beat(board).save_s) == (2, 50)


def test_a_pause_is_shown_and_is_none_of_a_step(
    attempt: AttemptDir, board: Board, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(loop, "time", SimpleNamespace(monotonic=lambda: now[0]))
    slurmtrain.progress(0)
    now[0] += 2
    slurmtrain.progress(1)
    with slurmtrain.pause("evaluation", timedelta(seconds=7)), slurmtrain.pause("part of it"):
        assert (beat(board).phase, beat(board).activity, beat(board).pause_s) == (Phase.PAUSED, "evaluation", 7)
        now[0] += 50
    assert beat(board).phase is Phase.TRAINING
    now[0] += 2
    slurmtrain.progress(2)
    assert beat(board).step_s == 2
    with pytest.raises(ValueError, match="takes a positive limit, not 0:00:00"):
        slurmtrain.pause(limit=timedelta())


_LOGS_AND_ENDS = """
import slurmtrain
slurmtrain.progress(4, 5)
slurmtrain.log(accuracy=0.5)
"""


def test_what_was_logged_after_the_last_step_is_written_when_the_process_ends(attempt: AttemptDir) -> None:
    with program(_LOGS_AND_ENDS) as process:
        assert process.ended() == (0, "")
    assert lines(attempt) == [(4, {"accuracy": 0.5})]


# --- two ranks --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    pair = Pair()
    yield pair
    pair.close()


def worker(ranks: RankGroup, directory: str) -> Worker:
    """Make this process a rank of another run; it keeps the handlers of the one before."""
    for each in SIGNALS:
        signal.signal(each, signal.SIG_DFL)
    os.environ.update(
        {"SLURMTRAIN_ATTEMPT_DIR": directory, "SLURMTRAIN_SUBMISSION": "1", "RANK": str(ranks.rank), "WORLD_SIZE": "2"}
    )
    return this_worker()


def calls_until_stop(ranks: RankGroup, directory: str, signalled_after: int) -> tuple[int, int | None]:
    """How often a rank asks until it is to stop, and how it leaves; rank 1 alone gets a signal."""
    current = Loop(worker(ranks, directory))
    calls = 0
    while True:
        calls += 1
        current.progress(calls)
        if ranks.rank == 1 and calls == signalled_after:
            os.kill(os.getpid(), signal.SIGTERM)
        if current.stop_requested():
            break
    try:
        current.leave()
    except SystemExit as left:
        return calls, left.code  # type: ignore[return-value]


@pytest.mark.parametrize("signalled_after", [1, 50])
def test_ranks_stop_after_the_same_step_if_only_one_of_them_gets_a_signal(
    pair: Pair, tmp_path: Path, signalled_after: int
) -> None:
    attempt = RunDir(tmp_path / "0123456789").attempt("job", 0)
    attempt.path.mkdir(parents=True)
    first, second = pair.run(calls_until_stop, str(attempt.path), signalled_after)
    assert first == second
    assert first[0] >= signalled_after
    assert first[1] == STOPPED
    assert kinds(attempt) == ["session", "total", "stopped"]
    assert not attempt.rank_journal(1).exists()


def leaves_late(ranks: RankGroup, directory: str) -> bool:
    """Leave, on rank 1 only after it has saved; returns whether that was done by then."""
    current = Loop(worker(ranks, directory))
    saved = Path(directory) / "saved"
    if ranks.rank == 1:
        threading.Event().wait(0.3)
        saved.touch()
    try:
        current.leave()
    except SystemExit:
        return saved.exists()


def test_nobody_leaves_before_all_ranks_have_saved(pair: Pair, tmp_path: Path) -> None:
    assert pair.run(leaves_late, str(tmp_path)) == [True, True]
