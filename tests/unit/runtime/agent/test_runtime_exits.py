"""How ranks ended, and commands that start the ranks of a node themselves."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from slurmtrain.model.interruption.exit_report import STOPPED
from slurmtrain.model.run.events.rank import ExceptionRaised, TrainingCompleted
from slurmtrain.model.run.layout import AttemptDir
from slurmtrain.model.spec.launcher import NodeRanks
from slurmtrain.runtime.agent.exits import CommandExits, RankExits
from slurmtrain.system.files import make_directory
from slurmtrain.system.journal import Journal

REPORT = (
    "E1122 12:00:01.456000 4 torch/distributed/elastic/multiprocessing/api.py:9] failed (exitcode: {}) local_rank: {}"
)


@dataclass
class Ended:
    """A process that has ended."""

    returncode: int | None
    pid: int = 7

    def poll(self) -> int | None:
        return self.returncode


@pytest.fixture
def attempt(tmp_path: Path) -> AttemptDir:
    attempt = AttemptDir(tmp_path / "7.0", 1)
    make_directory(attempt.logs)
    return attempt


def raised(attempt: AttemptDir, rank: int, message: str) -> None:
    with Journal(attempt.rank_journal(rank), durable=False) as journal:
        journal.write(ExceptionRaised(type="ValueError", message=message))


def test_a_rank_ends_as_its_journal_and_its_log_say(attempt: AttemptDir) -> None:
    raised(attempt, 3, "boom")
    attempt.rank_log(3).write_text("step 1\nValueError: boom\n")
    rank_exit = RankExits(attempt).read(3, Ended(1), at=5.0)
    assert (rank_exit.rank, rank_exit.node, rank_exit.code, rank_exit.finished) == (3, None, 1, False)
    assert rank_exit.describe() == "rank 3 exited with code 1: ValueError: boom"
    assert rank_exit.last_lines == ["step 1", "ValueError: boom"]


def test_reports_of_leaks_behind_a_traceback_do_not_hide_it(attempt: AttemptDir) -> None:
    leaks = "nanobind: leaked 64 types!\n" + ' - leaked type "ATOMIC_OP"\n' * 40 + " - ... skipped remainder\n"
    attempt.rank_log(3).write_text(f"step 1\nValueError: boom\n{leaks}See https://nanobind.readthedocs.io/leaks\n")
    assert RankExits(attempt).read(3, Ended(1), at=5.0).last_lines == ["step 1", "ValueError: boom"]


def test_a_command_ends_like_the_rank_that_its_launcher_blames(attempt: AttemptDir) -> None:
    raised(attempt, 4, "a peer has closed the connection")
    raised(attempt, 5, "boom")
    attempt.node_log(2).write_text(f"ValueError: boom\n{REPORT.format(1, 1)}\nTraceback: of torchrun\n=====\n")
    exits, process = CommandExits(attempt, 2, NodeRanks((2, 2, 2))), Ended(1)
    assert exits.code(process) == 1
    command_exit = exits.read(2, process, at=5.0)
    assert (command_exit.rank, command_exit.node) == (5, 2)
    assert command_exit.describe() == "rank 5 exited with code 1: ValueError: boom"
    assert command_exit.last_lines == ["ValueError: boom"]


def test_a_launcher_that_blames_a_rank_for_the_loss_of_another_is_not_believed(attempt: AttemptDir) -> None:
    raised(attempt, 4, "Connection closed by peer")
    raised(attempt, 5, "boom")
    attempt.node_log(2).write_text(REPORT.format(-6, 0) + "\n")
    assert CommandExits(attempt, 2, NodeRanks((2, 2, 2))).read(2, Ended(1), at=5.0).describe() == (
        "rank 5 exited with code 1: ValueError: boom"
    )


@pytest.mark.parametrize("code", [STOPPED, -15, -9])
def test_launchers_exit_with_1_whatever_the_code_of_their_rank(attempt: AttemptDir, code: int) -> None:
    # What another one has raised is a consequence.
    raised(attempt, 1, "an unknown consequence")
    attempt.node_log(0).write_text(REPORT.format(code, 0) + "\n")
    exits = CommandExits(attempt, 0, NodeRanks((2, 2)))
    assert exits.code(Ended(1)) == code
    command_exit = exits.read(0, Ended(1), at=5.0)
    assert (command_exit.rank, command_exit.code) == (0, code)


def test_a_command_that_says_nothing_of_its_ranks_ends_by_itself(attempt: AttemptDir) -> None:
    attempt.node_log(0).write_text("torchrun: error: unrecognized arguments: --x\n")
    exits = CommandExits(attempt, 0, NodeRanks((2, 2)))
    assert exits.code(Ended(2)) == 2
    assert exits.read(0, Ended(2), at=5.0).describe() == (
        "the command on node 0 exited with code 2: torchrun: error: unrecognized arguments: --x"
    )
    assert exits.code(Ended(None)) is None


def test_the_work_of_a_command_is_done_if_that_of_all_of_its_ranks_is(attempt: AttemptDir) -> None:
    exits = CommandExits(attempt, 0, NodeRanks((2, 2)))
    for rank, finished in ((0, False), (1, True)):
        with Journal(attempt.rank_journal(rank), durable=False) as journal:
            journal.write(TrainingCompleted(step=9))
        assert exits.read(0, Ended(0), at=5.0).finished is finished
