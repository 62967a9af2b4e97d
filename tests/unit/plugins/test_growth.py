"""Requests for more nodes, and the files by which newcomers and node 0 find each other."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest
from helpers.site import until

from slurmtrain.errors import LaunchError, SlurmDown
from slurmtrain.model.interruption.members import Newcomer, Stage
from slurmtrain.model.run.events.agent_events import NodesRequested
from slurmtrain.model.run.layout import AttemptDir, RunDir, SubmissionDir
from slurmtrain.plugins import growth
from slurmtrain.plugins.growth import (
    Admission,
    Extension,
    Growth,
    announce,
    pop_extension,
    read_admission,
    read_newcomers,
    wait_for_admission,
    withdraw,
)
from slurmtrain.runtime.environment.node import Launch, Node
from slurmtrain.runtime.environment.variables import EXTENDS, is_extension
from slurmtrain.runtime.job import lease
from slurmtrain.system.files import make_directory
from slurmtrain.system.journal import Journal


class Requests:
    """A scheduler that gives each request a job."""

    def __init__(self) -> None:
        self.made: list[tuple[str, int, tuple[str, ...]]] = []
        self.cancels = 0
        self.states: dict[str, str] = {}
        self.is_down = False

    def request(
        self, _job_id: str, extension: Extension, nodes: int, _limit_s: float | None, without: Sequence[str]
    ) -> str:
        if self.is_down:
            raise SlurmDown("sbatch: Invalid account")
        self.made.append((str(extension), nodes, tuple(without)))
        return str(100 + len(self.made))

    def cancel_all(self) -> None:
        self.cancels += 1

    def record(self, job_id: str) -> Mapping[str, str]:
        return {"JobState": self.states.get(job_id, "PENDING")}


@pytest.fixture
def attempt(tmp_path: Path) -> AttemptDir:
    """An attempt that has its run's lease."""
    run = RunDir(tmp_path / "RUN")
    own = run.attempt("7", 0)
    make_directory(own.path)
    lease.grant(run.submission(1))
    assert lease.acquire(own, 1)
    return own


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_LOOK_S", "_ADMISSION_POLL_S", "_ANNOUNCE_S"):
        monkeypatch.setattr(growth, name, 0.01)


@pytest.fixture
def requests() -> Requests:
    return Requests()


@pytest.fixture
def grows(attempt: AttemptDir, requests: Requests) -> Iterator[Growth]:
    getting = Growth(attempt, requests, job_id="7", first=1, most=3, ends_at=None)
    yield getting
    getting.end()
    getting.join()


def joining(number: int, count: int = 1, job_id: str = "101") -> Newcomer:
    return Newcomer(number=number, host=f"n{number}", job_id=job_id, job_nodes=count)


# --- node 0 -----------------------------------------------------------------------------------------------------------


def test_missing_nodes_are_requested_once_and_what_an_earlier_attempt_left_is_cancelled(
    grows: Growth, requests: Requests
) -> None:
    grows.ranks_started(1)
    until(lambda: requests.made, "the request")
    assert requests.cancels == 1
    until(lambda: read_admission(AttemptDir(grows._attempt.path))[1] > 3, "some looks")
    assert requests.made == [("7.0:1", 2, ())]
    assert grows.take_events() == [NodesRequested(job_id="101", nodes=2)]
    assert grows.take_events() == []
    grows.end()
    grows.join()
    assert requests.cancels == 2


def test_a_newcomer_counts_as_long_as_it_announces_itself(
    grows: Growth, attempt: AttemptDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    grows.ranks_started(1)
    announce(attempt, joining(1), 1)
    until(grows.newcomers, "the newcomer")
    monkeypatch.setattr(growth, "_SILENCE_S", 0.0)
    until(lambda: not grows.newcomers(), "its silence")
    monkeypatch.setattr(growth, "_SILENCE_S", 60.0)
    announce(attempt, joining(1), 2)
    until(grows.newcomers, "the newcomer again")
    withdraw(attempt, 1)
    until(lambda: not grows.newcomers(), "its leave")


def test_more_nodes_are_requested_after_some_have_joined_but_not_those_that_it_has(
    grows: Growth, attempt: AttemptDir, requests: Requests, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(growth, "pause_before_request", lambda _requests: 0.0)
    grows.ranks_started(1)
    until(lambda: requests.made, "the request")
    announce(attempt, joining(1), 1)
    until(grows.newcomers, "the newcomer")
    stage = Stage.first(1).grown(grows.newcomers(), {0: "n0"}, round=1, lost=())
    grows.admit(stage)
    assert read_admission(attempt)[0] == stage
    grows.ranks_started(2)
    assert grows.newcomers() == []
    until(lambda: len(requests.made) == 2, "the second request")
    assert requests.made[1] == ("7.0:3", 1, ("n0", "n1"))


def test_a_node_that_has_left_is_requested_again_but_no_unfit_one(
    grows: Growth, attempt: AttemptDir, requests: Requests, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    grows.ranks_started(1)
    until(lambda: requests.made, "the request")
    both = [joining(1, 2), joining(2, 2)]
    stage = Stage.first(1).grown(both, {0: "n0"}, round=1, lost=())
    grows.admit(stage)
    with Journal(tmp_path / "node-0.jsonl") as journal:
        grows.note_unfit(journal, stage)
    grows.ranks_started(1)
    monkeypatch.setattr(growth, "pause_before_request", lambda _requests: 0.0)
    until(lambda: len(requests.made) == 2, "the second request")
    assert requests.made[1] == ("7.0:3", 2, ("n0", "n1", "n2"))
    monkeypatch.setattr(growth, "pause_before_request", lambda _requests: 60.0)
    third = stage.without_newcomers().grown([joining(3, job_id="102")], {0: "n0"}, round=3, lost=())
    grows.admit(third)
    grows.nodes_left("102", ["n3"])
    grows.ranks_started(1)
    monkeypatch.setattr(growth, "pause_before_request", lambda _requests: 0.0)
    until(lambda: len(requests.made) == 3, "the third request")
    assert requests.made[2] == ("7.0:5", 2, ("n0", "n1", "n2"))
    kinds = [json.loads(line) for line in (tmp_path / "node-0.jsonl").read_text().splitlines()]
    # What their agents journal about their end says nothing about the attempt.
    assert [(event["kind"], event.get("lost"), event.get("hosts")) for event in kinds] == [
        ("restart", [1, 2], None), ("nodes_left", None, ["n1", "n2"]),
    ]  # fmt: skip


def test_nothing_is_requested_again_after_a_person_has_cancelled_the_second_job(
    grows: Growth, requests: Requests, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(growth, "pause_before_request", lambda _requests: 0.0)
    monkeypatch.setattr(growth, "_ASK_S", 0.0)
    requests.states["101"] = "TIMEOUT"
    requests.states["102"] = "CANCELLED"
    grows.ranks_started(1)
    until(lambda: grows._is_refused, "the answer")
    pulse = read_admission(grows._attempt)[1]
    until(lambda: read_admission(grows._attempt)[1] > pulse + 3, "some looks")
    assert [nodes for _, nodes, _ in requests.made] == [2, 2]


def test_a_refused_request_is_journaled_and_made_again_only_later(grows: Growth, requests: Requests) -> None:
    requests.is_down = True
    grows.ranks_started(1)
    events: list[NodesRequested] = []
    until(lambda: events.extend(grows.take_events()) or events, "the refusal")  # type: ignore[func-returns-value]
    assert events == [NodesRequested(nodes=2, problem="sbatch: Invalid account")]
    pulse = read_admission(grows._attempt)[1]
    until(lambda: read_admission(grows._attempt)[1] > pulse + 3, "some looks")
    assert grows.take_events() == []


def test_files_that_announce_nobody_are_ignored(attempt: AttemptDir) -> None:
    announce(attempt, joining(4), 1)
    attempt.newcomer(5).write_text("{")
    attempt.newcomer(6).write_bytes(attempt.newcomer(4).read_bytes())
    attempt.newcomer(7).write_text('{"number": 7, "count": 1}')
    assert list(read_newcomers(attempt)) == [4]


# --- newcomers --------------------------------------------------------------------------------------------------------


def agent(index: int = 0) -> Node:
    return Node(
        index=index, count=2, host=f"m{index}", job_id="101", restart=0, executor="slurm", submission=1,
        launch=Launch(attempt=1),
    )  # fmt: skip


class Waiting:
    """A newcomer that waits, in a thread."""

    def __init__(self, submission: SubmissionDir, node: Node) -> None:
        self.is_over = False
        self.admission: Admission | None = None
        self.thread = threading.Thread(target=self._wait, args=(submission, node), daemon=True)
        self.thread.start()

    def _wait(self, submission: SubmissionDir, node: Node) -> None:
        self.admission = wait_for_admission(submission, node, Extension("7.0", 3), lambda: self.is_over)

    def end(self) -> Admission | None:
        self.thread.join(30)
        assert not self.thread.is_alive()
        return self.admission


def test_a_newcomer_takes_part_in_the_stage_that_admits_it(grows: Growth, attempt: AttemptDir) -> None:
    grows.ranks_started(1)
    both = [Waiting(attempt.run.submission(1), agent(index)) for index in (0, 1)]
    until(lambda: len(grows.newcomers()) == 2, "two newcomers")
    stage = Stage.first(1).grown(grows.newcomers(), {0: "n0"}, round=2, lost=())
    grows.admit(stage)
    for place, waiting in enumerate(both, 1):
        admission = waiting.end()
        assert admission is not None
        assert (admission.attempt, admission.stage) == (attempt, stage)
        assert (admission.node.index, admission.node.job_id, admission.node.count) == (2 + place, "7", 3)
        at = admission.node.at(stage)
        assert (at.index, at.hosts) == (place, {0: "n0", 1: "m0", 2: "m1"})
    until(lambda: not read_newcomers(attempt), "their files to go")


@pytest.mark.parametrize("end", ["signal", "over", "another attempt", "silence"])
def test_a_newcomer_leaves_as_soon_as_nobody_waits_for_it(
    attempt: AttemptDir, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting = Waiting(attempt.run.submission(1), agent())
    until(lambda: read_newcomers(attempt), "its announcement")
    if end == "signal":
        waiting.is_over = True
    elif end == "over":
        lease.close(attempt.run, 1, "completed")
    elif end == "another attempt":
        assert lease.acquire(attempt.run.attempt("7", 1), 1)
    else:
        monkeypatch.setattr(growth, "_NODE_0_SILENCE_S", 0.0)
    assert waiting.end() is None
    assert read_newcomers(attempt) == {}


def test_a_job_knows_from_its_environment_which_attempt_it_extends(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not is_extension()
    monkeypatch.setenv(EXTENDS, "12_3.1:4")
    assert is_extension()
    extension = pop_extension()
    assert extension == Extension("12_3.1", 4)
    assert str(extension) == "12_3.1:4"
    assert not is_extension()
    for wrong in ("12", "12.1:", "12.1:x", "x:1"):
        monkeypatch.setenv(EXTENDS, wrong)
        with pytest.raises(LaunchError, match="names no attempt"):
            pop_extension()
