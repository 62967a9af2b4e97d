"""Loops without a session: what they report, how they learn of a stop, and which rank they are of."""

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
import torch.distributed as dist
from helpers.one_rank import SIGNALS, OneRank, one_rank
from helpers.program import program
from helpers.ranks import Pair

import slurmtrain
from slurmtrain.errors import LaunchError
from slurmtrain.model.diagnosis.hang import Phase
from slurmtrain.model.interruption.exit_report import STOPPED
from slurmtrain.runtime.environment.node import Worker, this_worker
from slurmtrain.runtime.job.process_group import RankGroup
from slurmtrain.runtime.training import loop
from slurmtrain.runtime.training.loop import Loop, this_ranked_worker


@pytest.fixture
def rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[OneRank]:
    with one_rank(tmp_path, monkeypatch) as alone:
        yield alone


@pytest.fixture
def _outside() -> Iterator[None]:
    """Make this process forget the loop that an earlier test made."""
    loop.current.cache_clear()
    yield
    loop.current.cache_clear()


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


def test_steps_metrics_and_the_end_are_recorded(rank: OneRank) -> None:
    phases = []
    for step in (5, 6, 7):
        if step > 5:
            slurmtrain.log({"val/acc": 1}, loss=torch.tensor(0.5))
        slurmtrain.progress(step, 7)
        phases.append((rank.beat.step, rank.beat.phase))
    assert rank.lines() == [(6, {"val/acc": 1, "loss": 0.5}), (7, {"val/acc": 1, "loss": 0.5})]
    assert phases == [(5, Phase.FIRST), (6, Phase.TRAINING), (7, Phase.READY)]
    assert rank.beat.step_s > 0
    assert [(event["kind"], event.get("step", event.get("total_steps"))) for event in rank.events()] == [
        ("session", 5),
        ("total", 7),
        ("measured", None),
        ("finished", 7),
    ]
    measured = rank.events()[-2]
    # This process has torch in it, and a limit that no test has.
    assert measured["memory"] == "process"
    assert 2**26 < measured["peak_bytes"] < 2**36


@pytest.mark.parametrize("step", [-1, 1.5, True, "3", None])
def test_what_is_no_number_of_steps_is_refused(rank: OneRank, step: Any) -> None:
    with pytest.raises(ValueError, match="needs a whole number of steps, not"):
        slurmtrain.progress(step)
    with pytest.raises(TypeError, match="'words' must be one number, not str"):
        slurmtrain.log(words="many")


def test_an_adapter_records_the_numbers_among_what_a_trainer_logs(rank: OneRank) -> None:
    current = loop.current()
    current.progress(0)
    current.progress(1)
    current.record({"loss": torch.tensor(2.0), "name": "x", "histogram": torch.ones(3)})
    current.record({"name": "x"})
    assert rank.lines() == [(1, {}), (1, {"loss": 2.0})]


def test_a_stop_signal_is_answered_once_asked_and_leaving_is_journaled(rank: OneRank) -> None:
    slurmtrain.progress(3, 10)
    assert not slurmtrain.stop_requested()
    os.kill(os.getpid(), signal.SIGTERM)
    assert slurmtrain.stop_requested()
    assert slurmtrain.stop_requested()
    assert rank.beat.phase is Phase.STOPPING
    slurmtrain.log(loss=1)
    slurmtrain.progress(4, 10)
    assert rank.beat.phase is Phase.STOPPING
    slurmtrain.log(late=2)
    # After a stop that the ranks agreed on, reaching the total does not complete the run.
    slurmtrain.progress(10, 10)
    with pytest.raises(SystemExit) as left:
        slurmtrain.leave()
    assert left.value.code == STOPPED
    assert rank.lines() == [(4, {"loss": 1}), (10, {"late": 2})]
    assert (rank.events()[-1]["kind"], rank.events()[-1]["step"]) == ("stopped", 10)
    assert rank.beat.phase is Phase.LEFT
    # What a script does after that, as in an except clause, is too late to be recorded.
    slurmtrain.progress(10, 10)
    assert (rank.kinds()[-1], "finished" in rank.kinds()) == ("stopped", False)


def test_handlers_that_a_trainer_has_replaced_are_taken_back(rank: OneRank) -> None:
    current = loop.current()
    current.listen()
    own = signal.getsignal(signal.SIGTERM)
    signal.signal(signal.SIGTERM, lambda *_: None)
    current.listen()
    assert signal.getsignal(signal.SIGTERM) == own
    os.kill(os.getpid(), signal.SIGTERM)
    assert current.stop_requested()


def test_a_session_and_a_loop_in_one_process_are_refused(rank: OneRank) -> None:
    from slurmtrain.runtime.job.signals import StopFlag

    StopFlag().install()
    with pytest.raises(RuntimeError, match=r"has a slurmtrain.session\(\): use its run.steps\(\)"):
        slurmtrain.progress(0)


def test_a_forked_child_reports_nothing(rank: OneRank) -> None:
    slurmtrain.progress(0, 5)
    child = os.fork()
    if child == 0:
        slurmtrain.progress(5, 5)
        slurmtrain.log(loss=1)
        os._exit(int(slurmtrain.stop_requested()))
    assert os.waitpid(child, 0)[1] == 0
    assert (rank.lines(), rank.kinds()) == ([], ["session", "total"])


@pytest.mark.parametrize("ends", ["by itself", "with the next step"])
def test_the_time_of_a_save_is_none_of_a_step(rank: OneRank, monkeypatch: pytest.MonkeyPatch, ends: str) -> None:
    now = [100.0]
    monkeypatch.setattr(loop, "time", SimpleNamespace(monotonic=lambda: now[0]))
    current = loop.current()
    current.progress(0)
    now[0] += 2
    current.progress(1)
    current.begin_save()
    assert rank.beat.phase is Phase.SAVING
    now[0] += 50
    if ends == "by itself":
        current.continue_steps()
        assert rank.beat.phase is Phase.TRAINING
        now[0] += 2
    current.progress(2)
    assert rank.beat.phase is Phase.TRAINING
    assert rank.beat.save_s == 50
    assert rank.beat.step_s <= 2


def test_a_pause_is_shown_and_is_none_of_a_step(rank: OneRank, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(loop, "time", SimpleNamespace(monotonic=lambda: now[0]))
    slurmtrain.progress(0)
    now[0] += 2
    slurmtrain.progress(1)
    with slurmtrain.pause("evaluation", timedelta(seconds=7)), slurmtrain.pause("part of it"):
        assert (rank.beat.phase, rank.beat.activity, rank.beat.pause_s) == (Phase.PAUSED, "evaluation", 7)
        now[0] += 50
    assert rank.beat.phase is Phase.TRAINING
    now[0] += 2
    slurmtrain.progress(2)
    assert rank.beat.step_s == 2
    with pytest.raises(ValueError, match="needs a positive limit, not 0:00:00"):
        slurmtrain.pause(limit=timedelta())


_LOGS_AND_ENDS = """
import slurmtrain
slurmtrain.progress(4, 5)
slurmtrain.log(accuracy=0.5)
"""


def test_what_was_logged_after_the_last_step_is_written_when_the_process_ends(rank: OneRank) -> None:
    with program(_LOGS_AND_ENDS) as process:
        assert process.ended() == (0, "")
    assert rank.lines() == [(4, {"accuracy": 0.5})]


_SAVES_SLOWLY = """
import os, signal, threading, slurmtrain
slurmtrain.progress(4, 9)
os.kill(os.getpid(), signal.SIGTERM)
assert slurmtrain.stop_requested()
print("saves", flush=True)
threading.Event().wait({save_s})
print("saved", flush=True)
slurmtrain.leave()
"""
_LEAVES_A_CHILD_ALONE = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", {text!r}], stdout=subprocess.PIPE, text=True)
assert child.stdout.readline() == "saves\\n"
"""


def test_a_save_may_take_longer_than_a_forced_exit_while_the_agent_lives(
    rank: OneRank, monkeypatch: pytest.MonkeyPatch
) -> None:
    # It is put off four times as often; the rest is for a machine that lets the process wait.
    monkeypatch.setenv("SLURMTRAIN_FORCED_EXIT_S", "2")
    with program(_SAVES_SLOWLY.format(save_s=3)) as process:
        assert process.ended() == (STOPPED, "")


def test_a_rank_whose_agent_is_gone_does_not_save_for_ever(rank: OneRank, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURMTRAIN_FORCED_EXIT_S", "1")
    with program(_LEAVES_A_CHILD_ALONE.format(text=_SAVES_SLOWLY.format(save_s=600))) as process:
        # The child has the pipe too: this returns when it has ended.
        code, errors = process.ended()
    assert code == 0
    assert "still running 1 s after SIGTERM" in errors


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
    first, second = pair.run(calls_until_stop, str(tmp_path), signalled_after)
    assert first == second
    assert first[0] >= signalled_after
    assert first[1] == STOPPED
    assert [json.loads(line)["kind"] for line in (tmp_path / "rank-0.jsonl").read_text().splitlines()] == [
        "session",
        "total",
        "measured",
        "stopped",
    ]
    [line] = (tmp_path / "rank-1.jsonl").read_text().splitlines()
    assert json.loads(line)["kind"] == "measured"


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


# The second of two nodes with two processes each.
NODE = {"SLURMTRAIN_LAUNCHER": "node", "SLURMTRAIN_WORLD_SIZE": "4", "SLURMTRAIN_FIRST_RANK": "2"}


@pytest.fixture(autouse=True)
def _outside_any_job(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("SLURMTRAIN_", "TORCHELASTIC_")) or name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
            monkeypatch.delenv(name)


def set_variables(monkeypatch: pytest.MonkeyPatch, **variables: str) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


def test_the_round_is_that_of_the_agent_and_not_the_count_of_a_launcher(
    monkeypatch: pytest.MonkeyPatch, tmp_path: os.PathLike[str]
) -> None:
    job = {"SLURMTRAIN_ATTEMPT_DIR": str(tmp_path), "SLURMTRAIN_SUBMISSION": "1", "SLURMTRAIN_ROUND": "2"}
    set_variables(monkeypatch, **NODE, **job, RANK="0", TORCHELASTIC_RESTART_COUNT="0")
    attempt = this_ranked_worker().attempt
    assert attempt is not None
    assert attempt.round == 2


def test_a_rank_that_its_launcher_has_restarted_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    set_variables(monkeypatch, **NODE, RANK="3", TORCHELASTIC_RESTART_COUNT="1")
    with pytest.raises(LaunchError, match="restarted this rank itself"):
        this_ranked_worker()
    # With ranks of slurmtrain's own this is the number of the round.
    monkeypatch.setenv("SLURMTRAIN_LAUNCHER", "ranks")
    assert this_ranked_worker().rank == 3


def test_a_process_that_cannot_know_its_rank_is_refused_unless_it_is_the_only_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    set_variables(monkeypatch, **NODE)
    with pytest.raises(LaunchError, match="does not know its rank: with 'launcher: node'"):
        this_ranked_worker()
    set_variables(monkeypatch, SLURMTRAIN_WORLD_SIZE="1", SLURMTRAIN_FIRST_RANK="0")
    assert (this_ranked_worker().rank, this_ranked_worker().launched) == (0, False)


def test_the_rank_in_a_process_group_of_the_script_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    set_variables(monkeypatch, **{**NODE, "SLURMTRAIN_LAUNCHER": "none"})
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        monkeypatch.setattr(dist, "get_rank", lambda: 3)
        monkeypatch.setattr(dist, "get_world_size", lambda: 4)
        worker = this_ranked_worker()
    finally:
        monkeypatch.undo()
        dist.destroy_process_group()
    assert (worker.rank, worker.local_rank, worker.world_size, worker.launched) == (3, 1, 4, True)
