"""What the page reads of the run that is selected, and how it follows its logs."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from helpers.simulated_run import RUN_ID, SimulatedRun
from helpers.workspaces import build_run, make_workspace

from slurmtrain.cli.top.follow import FollowedRun, Follower, News


@pytest.fixture
def sim(tmp_path: Path) -> SimulatedRun:
    return build_run(make_workspace(tmp_path / "runs"), executor="slurm").submitted().started()


@pytest.fixture
def logs(sim: SimulatedRun) -> Path:
    folder = sim.directory.attempt(sim.job, 0).logs
    folder.mkdir(parents=True)
    return folder


class Reports(list[News]):
    """A follower, and what it has reported since it was last asked to look."""

    def __init__(self, tmp_path: Path, *, interval_s: float = 0.0) -> None:
        super().__init__()
        self.follower = Follower(make_workspace(tmp_path / "runs").config, self.append, interval_s)

    def look(self, subject: FollowedRun | None = None) -> list[News]:
        self.clear()
        if subject is not None:
            self.follower.subject = subject
        self.follower.look()
        return list(self)


def test_nothing_is_read_until_a_run_is_selected(tmp_path: Path) -> None:
    assert Reports(tmp_path).look() == []


def test_the_last_lines_come_first_then_what_is_added(tmp_path: Path, logs: Path) -> None:
    (logs / "rank-0.log").write_text("".join(f"line {number}\n" for number in range(50)))
    reports = Reports(tmp_path)
    [first] = reports.look(FollowedRun(RUN_ID, lines=2))
    assert (list(first.lines), first.first) == (["line 48", "line 49"], True)
    assert first.attempts is not None
    assert [attempt["state"] for attempt in first.attempts] == ["running"]
    assert reports.look() == []
    with (logs / "rank-0.log").open("a") as log:
        log.write("\x1b]0;title\x07new\nunfinished")
    [news] = reports.look()
    assert (list(news.lines), news.first, news.attempts) == (["new"], False, None)


def test_without_a_log_of_rank_0_the_others_are_read_and_named(tmp_path: Path, logs: Path) -> None:
    reports = Reports(tmp_path)
    assert [list(news.lines) for news in reports.look(FollowedRun(RUN_ID, 9))] == [[]]
    (logs / "node-1.log").write_text("torchrun starts\n")
    assert [list(news.lines) for news in reports.look()] == [["[1/node 1] torchrun starts"]]


def test_the_logs_of_all_ranks_are_named(tmp_path: Path, logs: Path) -> None:
    for rank in range(2):
        (logs / f"rank-{rank}.log").write_text(f"of {rank}\n")
    reports = Reports(tmp_path)
    assert [list(news.lines) for news in reports.look(FollowedRun(RUN_ID, 9))] == [["of 0"]]
    assert [list(news.lines) for news in reports.look(FollowedRun(RUN_ID, 9, all_ranks=True))] == [
        ["[1/rank 0] of 0", "[1/rank 1] of 1"]
    ]


def test_a_new_attempt_is_reported_and_its_log_followed(tmp_path: Path, sim: SimulatedRun, logs: Path) -> None:
    (logs / "rank-0.log").write_text("first\n")
    reports = Reports(tmp_path)
    reports.look(FollowedRun(RUN_ID, 9))
    sim.stopped().node("requeue", cause="preempted", why="its nodes were needed").started(1)
    later = sim.directory.attempt(sim.job, 1).logs
    later.mkdir(parents=True)
    (later / "rank-0.log").write_text("second\n")
    [news] = reports.look()
    assert list(news.lines) == ["second"]
    assert news.attempts is not None
    assert [attempt["cause"] for attempt in news.attempts] == ["preempted", None]


def test_journals_are_read_no_more_often_than_the_interval(tmp_path: Path, sim: SimulatedRun, logs: Path) -> None:
    (logs / "rank-0.log").write_text("first\n")
    reports = Reports(tmp_path, interval_s=3600.0)
    reports.look(FollowedRun(RUN_ID, 9))
    sim.crashed()
    assert reports.look() == []


def test_a_run_that_is_gone_is_a_problem_that_is_reported_once(tmp_path: Path, sim: SimulatedRun) -> None:
    reports = Reports(tmp_path)
    [news] = reports.look(FollowedRun("9999999999", 9))
    assert "there is no run 9999999999 any more" in news.problem
    assert reports.look() == []
    shutil.rmtree(tmp_path / "runs")
    (tmp_path / "runs").write_text("no directory")
    [news] = reports.look()
    assert str(tmp_path / "runs") in news.problem
