"""Why a run is in its state, in words, and which other requests would start sooner."""

from __future__ import annotations

from typing import Any

import pytest

from slurmtrain.model.diagnosis.answers import (
    Activity,
    Alternative,
    QueueFacts,
    describe_alternative,
    describe_queue,
    ended,
    running,
    sooner,
    waiting,
)
from slurmtrain.model.run.run import Attempt

NOW = 1_000_000.0
RUN: dict[str, Any] = {
    "id": "r1", "name": "cnn", "state": "running", "reason": "", "step": 400, "total_steps": 1000, "pending": None,
    "steps_per_second": 2.0, "eta_seconds": 300.0, "goodput": 0.9, "deleted_at": None, "lost_steps": 0, "job_id": "7",
    "idle": None,
    "checkpoint": {"step": 350, "saved_at": "1970-01-12T13:46:15.000Z"},
    "started_at": "1970-01-12T13:40:00.000Z", "ended_at": "1970-01-12T13:46:40.000Z",
}  # fmt: skip
ATTEMPT = Attempt(
    number=2, job_id="7", restart=0, state="running", hosts={"0": "n1", "1": "n2"}, started_at=NOW - 400,
    spent={"train": 360.0, "stall": 3.0}, policy={"enabled": True}, last_step=400,
)  # fmt: skip


def answer(activity: Activity | None = None, attempt: dict[str, Any] | None = None, **run: Any) -> Any:
    changed = Attempt(**{**vars(ATTEMPT), **(attempt or {})})
    return running({**RUN, **run}, changed, activity or Activity(), NOW)


def test_a_run_that_trains_says_how_far_it_is_and_when_it_was_saved() -> None:
    assert answer().headline == "it trains: step 400 of 1000 (40 %), 2 steps/s, 300 s to go"
    assert answer().details == [
        "last save: step 350, 25 s ago; 50 steps since then", "goodput 90 %: train 6 min, stall 3 s",
        "attempt 2 on n1, n2",
    ]  # fmt: skip
    assert answer(total_steps=None, eta_seconds=None).headline == "it trains: step 400, 2 steps/s"
    begun = answer(step=None, steps_per_second=None, eta_seconds=None, checkpoint=None, attempt={"last_step": None})
    assert begun.headline == "it has been running for 6 min 40 s, and no step was logged"
    assert answer(checkpoint=None).details[0] == "no checkpoint yet: an interruption now would cost all of its work"
    ending = running(RUN, ATTEMPT, Activity(), NOW, "preempted")
    assert ending.headline == "it is ending, and its ranks save and exit: preempted"


BUSY = Activity(gpus={"n1 GPU 0": 2.0, "n2 GPU 0": 90.0}, cpus={"n1": 99.0})


@pytest.mark.parametrize(
    ("activity", "attempt", "changes", "words"),
    [
        (Activity(last_step_at=NOW - 700, widest_gap_s=2.0), {}, {}, "no step was finished for 11 min 40 s, so"),
        (Activity(last_step_at=NOW - 50, widest_gap_s=2.0), {}, {}, "2 steps/s, 300 s to go"),
        (Activity(last_step_at=NOW - 700, widest_gap_s=90.0), {}, {}, "300 s to go"),
        (Activity(limit_at=NOW + 60), {}, {}, "300 s to go; it reaches its time limit in 60 s, and is then requeued"),
        (Activity(limit_at=NOW + 60), {"policy": None}, {}, "in 60 s, and ends there (requeue.enabled)"),
        (Activity(limit_at=NOW + 600), {}, {}, "300 s to go"),
        (BUSY, {}, {}, "1 of 2 GPUs is idle while processors are 99 % busy, so that the data loader may be too slow"),
        (Activity(gpus={"n1 GPU 0": 2.0}), {}, {}, "1 of 1 GPUs is idle (at least 2 % busy: n1 GPU 0)"),
        (Activity(), {"stragglers": [{"rank": 3, "host": "n2", "ratio": 2.5}]}, {}, "rank 3 on n2 is 2.5 times"),
        (Activity(), {"spent": {"train": 60.0, "stall": 40.0}}, {}, "training waits for saves for 40 % of its time"),
        (
            Activity(last_step_at=NOW - 700, widest_gap_s=2.0),
            {},
            {"reason": "paused after step 400: evaluation", "eta_seconds": None},
            "paused after step 400: evaluation; step 400 of 1000 (40 %), 2 steps/s",
        ),
        (Activity(), {}, {"reason": "job 5 waits for up to 2 more node(s)"}, "300 s to go"),
        (Activity(), {}, {"reason": "its disk is full"}, "its disk is full; step 400 of 1000 (40 %)"),
    ],
)  # fmt: skip
def test_what_is_wrong_or_slow_is_in_the_first_line(
    activity: Activity, attempt: dict[str, Any], changes: dict[str, Any], words: str
) -> None:
    headline = answer(activity, attempt, **changes).headline
    assert words in headline
    if words.endswith("to go"):
        assert headline.endswith(words)


@pytest.mark.parametrize(
    ("state", "reason", "headline"),
    [
        ("pending", "its nodes are busy (Resources)", "it waits: its nodes are busy (Resources)"),
        ("pending", "after pretrain (running, step 120)", "it starts after pretrain (running, step 120)"),
        ("pending", "it waits for another job (Dependency)", "it waits for another job (Dependency)"),
        ("pending", "cannot start: run x failed", "it cannot start: run x failed"),
        ("pending", "waits for its turn: of its sweep", "it waits for its turn: of its sweep"),
        ("pending", "", "it waits: nothing says for what"),
        ("requeued", "a node failed", "it was interrupted, and waits to go on: a node failed"),
        ("created", "not handed to the scheduler yet", "it has no job: not handed to the scheduler yet"),
    ],
)  # fmt: skip
def test_a_run_that_waits_says_for_what(state: str, reason: str, headline: str) -> None:
    assert waiting({**RUN, "state": state, "reason": reason}).headline == headline


def test_a_run_that_has_ended_says_how() -> None:
    before = Attempt(**{**vars(ATTEMPT), "number": 1, "cause": "preempted"})
    completed = {**RUN, "state": "completed", "step": 1000, "lost_steps": 7}
    assert ended(completed, [before, ATTEMPT]).headline == (
        "it completed 1000 steps in 6 min 40 s, 2 attempts (1 preempted), 7 steps trained twice"
    )
    stopped = {**RUN, "state": "cancelled", "reason": "cancelled in Slurm"}
    assert ended(stopped, [ATTEMPT], "ada").headline == (
        "it was cancelled in Slurm by ada, 1970-01-12T13:46:40.000Z; its newest checkpoint has step 350"
    )
    assert ended({**stopped, "checkpoint": None}, []).advice == ["`slurmtrain resume r1 --from-start` starts it again"]
    searched = ended({**stopped, "reason": "others are better"}, [])
    assert searched.headline.startswith("it was cancelled: others are better, 1970")
    deleted = {**completed, "deleted_at": NOW, "reason": "its files were deleted"}
    assert ended(deleted, []).headline == "it is completed, and its files were deleted"
    assert ended({**RUN, "state": "unreadable", "reason": "x is a link"}, []).headline == "x is a link"


def alternative(at: float, partition: str = "", **more: Any) -> Alternative:
    return Alternative(words=f"in {partition or 'it'}", override="k=v", partition=partition, starts_at=at, **more)


def test_only_what_is_really_sooner_is_named() -> None:
    soon, later, other = alternative(NOW), alternative(NOW + 590), alternative(NOW, "ondemand", preempts=["5"])
    facts = QueueFacts(job_id="7", ahead=0, waiting={"ondemand": 0}, alternatives=[other, later, soon])
    assert sooner(facts, "Resources", NOW + 600, NOW) == [soon, other]
    # Jobs before it would be before the others of its partition, too.
    assert sooner(facts, "Priority", NOW + 600, NOW) == [other]
    crowded = QueueFacts(job_id="7", ahead=1, waiting={"ondemand": 1}, alternatives=[other, soon])
    assert sooner(crowded, "Resources", NOW + 600, NOW) == []
    assert sooner(facts, "Resources", NOW + 30, NOW) == []
    # Without an estimate, or with one that is over, what the same request would get counts.
    assert sooner(QueueFacts(job_id="7", unchanged_at=NOW, alternatives=[soon]), "Resources", None, NOW) == []
    assert sooner(QueueFacts(job_id="7", unchanged_at=NOW, alternatives=[soon]), "Resources", NOW - 5, NOW) == []
    assert sooner(QueueFacts(job_id="7", alternatives=[later]), "PartitionTimeLimit", None, NOW) == [later]
    assert (
        describe_alternative(other, NOW, {"5": "cnn-r5"}) == "in ondemand it would start now, preempting job 5 (cnn-r5)"
    )
    assert describe_alternative(later, NOW, {}) == "in it it would start 1970-01-12T13:56:30.000Z"


def test_a_job_is_described_by_what_it_asks_for_and_depends_on() -> None:
    record = {
        "Partition": "spot",
        "NumNodes": "2-4",
        "TimeLimit": "01:00:00",
        "Dependency": "afterok:5(unfulfilled),after:6_1",
    }
    facts = QueueFacts(job_id="7", record=record, ahead=1, notes=["x"])
    assert [*describe_queue(facts, "Dependency", 90.0, {"5": "cnn-r5"})] == [
        "job 7 waits in partition spot, for 90 s now: nodes 2-4, time limit 01:00:00",
        "it waits for the success of job 5 (cnn-r5)", "it waits for the start of job 6_1", "x",
    ]  # fmt: skip
    lines = [*describe_queue(QueueFacts(job_id="7", record={"Partition": "p"}, ahead=1), "Priority", None, {})]
    assert lines[1] == "1 other job waits before it for the same nodes"
    assert [*describe_queue(QueueFacts(job_id="7"), "", None, {})] == []
