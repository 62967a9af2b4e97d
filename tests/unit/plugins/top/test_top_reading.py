"""What one look of the page reads and asks, and what it does when that fails."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from helpers.fakeslurm import SlurmCommands, squeue_line
from helpers.simulated_run import RUN_ID, SimulatedRun
from helpers.workspaces import build_run, make_workspace

from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.plugins.top.reading import FollowedRun, Follower, News, RunsReader

pytestmark = pytest.mark.usefixtures("slurm")

LONG_AGO = (10**18, 10**18)


def add_run(workspace: Workspace, number: int, *, executor: str = "slurm") -> SimulatedRun:
    directory = workspace.root.run(f"{number:010}")
    return SimulatedRun(directory, spec={"name": f"run-{number}"}, executor=executor, job=str(number), now=99.0)


def finish(sim: SimulatedRun) -> None:
    """The run has ended so long ago that its directories show every change."""
    sim.submitted().started().ended("completed")
    for folder in (sim.directory.journals, sim.directory.attempts):
        os.utime(folder, ns=LONG_AGO)


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SlurmCommands:
    slurm = SlurmCommands(tmp_path / "bin")
    monkeypatch.setenv("PATH", slurm.on_path())
    slurm.replies("squeue")
    slurm.replies("sacct")
    return slurm


@pytest.fixture
def root(tmp_path: Path) -> Workspace:
    """A runs root with eight runs that have ended, two that train, and one that waits."""
    workspace = make_workspace(tmp_path / "runs")
    for number in range(8):
        finish(add_run(workspace, number, executor="local"))
    for number in (8, 9):
        add_run(workspace, number).submitted().started().reached(1)
    add_run(workspace, 10).submitted()
    return workspace


def test_only_runs_that_may_have_changed_are_read_again(root: Workspace, slurm: SlurmCommands) -> None:
    slurm.replies("squeue", squeue_line("10", run_id=f"{10:010}"))
    reader = RunsReader(root.config)
    assert reader.look().read == 11
    before = reader.look()
    after = reader.look()
    assert after.read == 3
    assert all(after.rows[run_id] is row for run_id, row in before.rows.items())
    assert after.rows[f"{10:010}"].run["pending"]["code"] == "Priority"


def test_a_run_that_has_changed_gets_a_new_row_and_no_other_run_does(root: Workspace) -> None:
    reader = RunsReader(root.config)
    reader.look()
    before = reader.look().rows
    add_run(root, 8).reached(7)
    after = reader.look().rows
    assert [run_id for run_id in after if after[run_id] is not before[run_id]] == [f"{8:010}"]
    assert after[f"{8:010}"].run["step"] == 7


def test_slurm_is_asked_once_per_interval_and_the_age_of_its_answer_is_known(
    root: Workspace, slurm: SlurmCommands
) -> None:
    reader = RunsReader(root.config)
    looks = [reader.look() for _ in range(4)]
    assert len(slurm.calls("squeue")) == 1
    assert len(slurm.calls("sacct")) <= 1
    assert looks[0].slurm_at is not None
    assert {look.slurm_at for look in looks} == {looks[0].slurm_at}


def test_slurm_is_not_asked_for_runs_of_this_machine(tmp_path: Path, slurm: SlurmCommands) -> None:
    workspace = make_workspace(tmp_path / "runs")
    finish(add_run(workspace, 1, executor="local"))
    assert RunsReader(workspace.config).look().slurm_at is None
    assert slurm.calls("squeue") == []


def test_a_slurm_that_does_not_answer_is_a_problem_and_the_runs_stay(root: Workspace, slurm: SlurmCommands) -> None:
    slurm.fails("squeue", "squeue: error: Unable to contact slurm controller")
    look = RunsReader(root.config).look()
    assert len(look.rows) == 11
    assert any("Unable to contact slurm controller" in problem for problem in look.problems)
    assert look.slurm_at is None


def test_no_runs_root_is_no_problem_and_none_is_made(tmp_path: Path) -> None:
    workspace = make_workspace(tmp_path / "runs")
    look = RunsReader(workspace.config).look()
    assert (dict(look.rows), look.problems) == ({}, ())
    assert not (tmp_path / "runs").exists()


def test_a_runs_root_that_cannot_be_listed_leaves_the_runs_as_they_were(root: Workspace) -> None:
    reader = RunsReader(root.config)
    before = reader.look()
    runs = root.config.runs
    runs.rename(runs.with_name("moved"))
    runs.write_text("not a directory")
    look = reader.look()
    assert look.rows == before.rows
    assert str(runs) in look.problems[0]


def test_a_broken_registry_is_a_problem_and_the_run_directories_are_read(root: Workspace) -> None:
    root.config.registry.write_bytes(b"not a database" * 100)
    reader = RunsReader(root.config)
    for look in (reader.look(), reader.look()):
        assert len(look.rows) == 11
        assert any("is not a readable database" in problem for problem in look.problems)


def test_a_registry_that_was_repaired_is_noted_for_a_while(root: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = RunsReader(root.config)
    before = reader.look()
    root.config.registry.write_bytes(b"not a database" * 100)
    for look in (reader.look(), reader.look()):
        assert look.rows.keys() == before.rows.keys()
        assert any("was damaged" in problem for problem in look.problems)
    monkeypatch.setattr("slurmtrain.ops.shared.looking._NOTE_S", 0.0)
    assert reader.look().problems == ()


def test_a_run_whose_journals_cannot_be_read_is_shown_as_that(root: Workspace) -> None:
    reader = RunsReader(root.config)
    reader.look()
    journals = root.root.run(f"{9:010}").journals
    shutil.rmtree(journals)
    journals.write_text("a file")
    row = reader.look().rows[f"{9:010}"]
    assert row.run["state"] == "unreadable"
    assert "journal" in row.run["reason"]


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
    assert first.why.startswith("it has been running for ")
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
    assert "run 9999999999 no longer exists" in news.problem
    assert reports.look() == []
    shutil.rmtree(tmp_path / "runs")
    (tmp_path / "runs").write_text("no directory")
    [news] = reports.look()
    assert str(tmp_path / "runs") in news.problem
