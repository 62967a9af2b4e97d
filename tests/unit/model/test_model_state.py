"""The state of a run from its events: whatever their order, whatever is missing."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import pytest
from helpers.story import Story
from hypothesis import given
from hypothesis import strategies as st

from slurmtrain.model.event import Event
from slurmtrain.model.progress import Progress
from slurmtrain.model.run import CAUSES, ENDED, RUN_STATES, STATE_OF_CAUSE, Run
from slurmtrain.model.state import fold

PROCESS = {"host": "n0", "boot": "b", "pid": 5, "start": 9}


@dataclass
class History:
    """Events of one run, each a second after the one before unless ``t`` says otherwise."""

    events: list[Event] = field(default_factory=list)
    now: float = 100.0

    def add(self, source: str, kind: str, t: float | None = None, **data: Any) -> History:
        self.now = self.now + 1 if t is None else t
        self.events.append(Event(self.now, kind, data, source, len(self.events) * 10))
        return self

    def command(self, kind: str, **data: Any) -> History:
        return self.add("journal/submit.jsonl", kind, **data)

    def node(self, kind: str, job: str = "j1", at: int = 0, /, **data: Any) -> History:
        return self.add(f"attempts/{job}.0/node-{at}.jsonl", kind, **data)

    def rank(self, kind: str, job: str = "j1", **data: Any) -> History:
        return self.add(f"attempts/{job}.0/rank-0.jsonl", kind, **data)

    def created(self) -> History:
        return self.command("created", name="digits", plan_hash="h", executor="local", by="me", git={"commit": "c"})

    def submitted(self, job: str = "j1", attempt: int = 1) -> History:
        number = {"submission": attempt, "job_id": job}
        self.command("submitting", **number, attempt=attempt, executor="local", overrides=[], after=None)
        return self.command("submitted", **number, process=PROCESS)

    def started(self, job: str = "j1", nodes: int = 1, attempt: int = 1, step: int = 0) -> History:
        for node in range(nodes):
            self.node("agent", job, node, node=node, nodes=nodes, host=f"n{node}", process=PROCESS, attempt=attempt)
        self.node("rendezvous", job, node=0, master_addr="10.0.0.1", master_port=2000, interface="eth0")
        self.node("workers", job, processes={"0": PROCESS}, resume_from=None)
        return self.rank("session", job, step=step, world_size=nodes, device="cpu")

    def saved(self, step: int, job: str = "j1") -> History:
        return self.rank(
            "saved", job, step=step, path=f"checkpoints/step-{step}", bytes=10, seconds=0.5, saved_at=self.now + 1
        )

    def ended(self, cause: str, job: str = "j1", node: int = 0, **data: Any) -> History:
        return self.node("end", job, node, cause=cause, reason=data.pop("reason", ""), **data)

    def fold(self, **steps: int) -> Run:
        progress = {f"{job}.0": Progress(step, 1.0, {"loss": step / 10}) for job, step in steps.items()}
        return fold("RUN", self.events, progress)


def test_a_run_without_any_event_is_created() -> None:
    run = fold("RUN", [], {})
    assert (run.id, run.name, run.state, run.attempts) == ("RUN", "RUN", "created", [])


def test_a_run_goes_from_created_over_pending_and_running_to_completed() -> None:
    history = History().created()
    assert history.fold().state == "created"
    assert history.submitted().fold().state == "pending"
    assert history.started().fold().state == "running"
    assert history.ended("completed").fold().state == "completed"


def test_the_facts_of_a_completed_run_are_all_there() -> None:
    history = History().created().submitted().started().rank("total", total_steps=20).saved(20)
    run = history.ended("completed").command("mlflow", mlflow_run_id="m", uri="u").fold(j1=20)
    assert (run.name, run.plan_hash, run.executor, run.git) == ("digits", "h", "local", {"commit": "c"})
    assert (run.step, run.total_steps, run.metrics, run.lost_steps) == (20, 20, {"loss": 2.0}, 0)
    assert run.mlflow_run_id == "m"
    assert run.checkpoint is not None
    assert run.checkpoint.step == 20
    [attempt] = run.attempts
    assert (attempt.number, attempt.job_id, attempt.restart, attempt.cause) == (1, "j1", 0, "completed")
    assert (attempt.master_addr, attempt.master_port, attempt.interfaces) == ("10.0.0.1", 2000, {"n0": "eth0"})
    assert run.submitted_at < run.started_at < run.ended_at  # type: ignore[operator]


def test_a_run_of_two_nodes_ends_when_both_have_said_so() -> None:
    history = History().created().submitted().started(nodes=2).ended("completed", node=0)
    assert history.fold().state == "running"
    assert history.ended("completed", node=1).fold().state == "completed"


def test_the_first_node_to_fail_is_the_cause() -> None:
    history = History().created().submitted().started(nodes=2)
    history.ended("crash", node=1, reason="follows", failed_at=205.0, failures=[])
    history.ended("crash", node=0, reason="is the root", failed_at=204.0, failures=[{"rank": 0}])
    run = history.fold()
    assert (run.state, run.reason) == ("failed", "is the root")
    assert run.attempts[0].failures == ({"rank": 0},)


def test_a_cancelled_run_is_cancelled_with_the_step_it_reached() -> None:
    run = History().created().submitted().started().command("cancel", by="me").ended("cancelled").fold(j1=7)
    assert (run.state, run.reason, run.cancelled) == ("cancelled", "cancelled after step 7", True)


def test_a_run_that_completed_in_spite_of_a_cancel_has_completed() -> None:
    run = History().created().submitted().started().command("cancel", by="me").ended("completed").fold()
    assert run.state == "completed"


def test_a_crash_before_the_cancel_stays_a_crash() -> None:
    history = History().created().submitted().started()
    history.command("cancel", by="me").ended("crash", reason="boom", failed_at=history.now - 1)
    assert history.fold().attempts[0].cause == "crash"


def test_a_run_that_was_cancelled_before_it_started_is_cancelled() -> None:
    run = History().created().command("cancel", by="me").fold()
    assert (run.state, run.reason) == ("cancelled", "cancelled before it started")
    assert run.ended_at is not None


def test_a_cancel_of_the_last_attempt_does_not_touch_the_next_one() -> None:
    history = History().created().submitted().started().command("cancel", by="me").ended("cancelled")
    run = history.submitted("j2", 2).started("j2", attempt=2).fold()
    assert (run.state, run.cancelled) == ("running", False)
    assert [attempt.state for attempt in run.attempts] == ["cancelled", "running"]


def test_an_attempt_whose_processes_are_gone_is_lost() -> None:
    history = History().created().submitted().started()
    history.command("observed", job_id="j1", restart=0, state="gone", last_seen=150.0, reason="no process left")
    run = history.fold(j1=3)
    assert (run.state, run.reason, run.ended_at) == ("lost", "no process left after step 3", 150.0)


def test_what_the_job_says_outranks_what_was_observed() -> None:
    history = History().created().submitted().started()
    history.command("observed", job_id="j1", restart=0, state="gone", last_seen=150.0, reason="no process left")
    assert history.ended("completed").fold().state == "completed"


def test_an_attempt_that_was_never_handed_over_is_none() -> None:
    history = History().created().submitted().command("unstarted", job_id="j1", restart=0, reason="sbatch said no")
    run = history.fold()
    assert (run.state, run.reason, run.attempts) == ("created", "sbatch said no", [])


def test_an_attempt_that_runs_was_started_whatever_the_command_thought() -> None:
    history = History().created().submitted().command("unstarted", job_id="j1", restart=0, reason="no answer")
    assert history.started().fold().state == "running"


def test_a_run_of_a_sweep_that_waits_is_pending() -> None:
    history = History().created().submitted()
    history.node("agent", node=0, nodes=1, host="n0", process=PROCESS, attempt=1).node("waiting", run="OTHER")
    run = history.fold()
    assert (run.state, run.reason) == ("pending", "waits until run OTHER has ended")


def test_lost_steps_are_those_since_the_last_checkpoint() -> None:
    history = History().created().submitted().started().saved(10)
    history.command("observed", job_id="j1", restart=0, state="gone", last_seen=150.0, reason="gone")
    assert history.fold(j1=13).lost_steps == 3


def test_lost_steps_are_those_that_the_next_attempt_does_again() -> None:
    history = History().created().submitted().started().saved(10)
    history.command("observed", job_id="j1", restart=0, state="gone", last_seen=150.0, reason="gone")
    history.submitted("j2", 2).started("j2", attempt=2, step=10).ended("completed", "j2")
    run = history.fold(j1=13, j2=20)
    assert [attempt.lost_steps for attempt in run.attempts] == [3, 0]
    assert (run.lost_steps, run.step, run.attempts[1].first_step) == (3, 20, 10)


def test_a_run_without_a_checkpoint_loses_all_its_steps() -> None:
    history = History().created().submitted().started().ended("crash", failed_at=150.0)
    assert history.fold(j1=8).lost_steps == 8


def test_attempts_are_numbered_in_the_order_of_their_submission() -> None:
    history = History().created().submitted("j9").started("j9").ended("crash", "j9", failed_at=109.0)
    run = history.submitted("j1", 2).fold()
    assert [(attempt.number, attempt.job_id) for attempt in run.attempts] == [(1, "j9"), (2, "j1")]
    assert run.newest is run.attempts[-1]


def test_a_pruned_checkpoint_is_forgotten_and_a_damaged_one_is_not_gone_on_from() -> None:
    history = History().created().submitted().started().saved(5).saved(10).saved(15)
    history.rank("pruned", path="checkpoints/step-5")
    history.rank("rejected", step=15, path="checkpoints/step-15", reason="hash differs")
    run = history.fold()
    assert [(one.step, one.complete) for one in run.checkpoints] == [(10, True), (15, False)]
    assert run.checkpoint is not None
    assert run.checkpoint.step == 10


def test_a_restored_checkpoint_is_a_verified_one() -> None:
    history = History().created().submitted().started().saved(5)
    assert [one.verified for one in history.fold().checkpoints] == [False]
    history.rank("restored", step=5, path="checkpoints/step-5", bytes=10, seconds=0.5, saved_at=105.0)
    assert [one.verified for one in history.fold().checkpoints] == [True]


def test_a_checkpoint_that_nobody_told_of_is_known_from_the_observation() -> None:
    history = History().created().submitted().started()
    found = {"step": 7, "path": "checkpoints/step-7", "bytes": 3, "saved_at": 140.0, "seconds": 0.1}
    history.command("observed", job_id="j1", restart=0, state="gone", last_seen=1.0, reason="gone", checkpoints=[found])
    assert [one.step for one in history.fold().checkpoints] == [7]


def test_a_checkpoint_that_was_deleted_without_a_word_is_gone_with_the_observation() -> None:
    history = History().created().submitted().started().saved(5).saved(10)
    there = {"step": 10, "path": "checkpoints/step-10", "bytes": 10, "seconds": 0.5, "saved_at": 1.0}
    own = {"path": "/w/ckpt-3.pt", "step": 3, "bytes": 1, "saved_at": 1.0}
    history.node("found", **own)
    history.command("observed", job_id="j1", restart=0, state="gone", last_seen=1.0, reason="", checkpoints=[there])
    assert [c.path for c in history.fold().checkpoints] == ["/w/ckpt-3.pt", "checkpoints/step-10"]


def test_checkpoints_of_a_users_own_script_are_known_by_path() -> None:
    history = History().created().submitted().started()
    history.node("found", path="/out/ckpt-3.pt", step=3, bytes=9, saved_at=120.0)
    history.node("found", path="/out/last.pt", step=None, bytes=9, saved_at=121.0)
    assert [one.path for one in history.fold().checkpoints] == ["/out/last.pt", "/out/ckpt-3.pt"]


@pytest.mark.parametrize("cause", CAUSES)
def test_every_cause_makes_an_ended_run(cause: str) -> None:
    history = History().created().submitted().started().ended(cause, failed_at=150.0)
    run = history.fold()
    assert run.state == STATE_OF_CAUSE.get(cause, "failed")
    assert run.ended
    assert run.attempts[0].cause == cause


# --- any order, any subset --------------------------------------------------------------------------------------


def rich_history() -> list[Event]:
    history = History().created().submitted().started(nodes=2).rank("total", total_steps=30).saved(5).saved(10)
    history.rank("pruned", path="checkpoints/step-5").rank("interval", steps=3, seconds=1.0, reason="auto")
    history.node("stopping", cause="preempted", why="SIGUSR2").rank("stopped", step=12).rank(
        "raised", type="E", message="m"
    )
    history.ended("crash", node=1, reason="boom", failed_at=115.0, failures=[{"rank": 1}]).ended("crash", node=0)
    history.command("observed", job_id="j1", restart=0, state="gone", last_seen=130.0, reason="gone", checkpoints=[
        {"step": 12, "path": "checkpoints/step-12", "bytes": 3, "saved_at": 140.0}])  # fmt: skip
    history.submitted("j2", 2).command("unstarted", job_id="j2", restart=0, reason="refused")
    history.submitted("j3", 3).node("waiting", "j3", run="OTHER").started("j3", attempt=3, step=10)
    history.rank("restored", "j3", step=10, path="checkpoints/step-10", bytes=10, seconds=0.5, saved_at=110.0)
    history.rank("rejected", "j3", step=12, path="checkpoints/step-12", reason="hash")
    history.rank("save_failed", "j3", step=14, reason="full").node(
        "found", "j3", path="/o/1", step=None, bytes=1, saved_at=1.0
    )
    history.command("cancel", by="me").ended("cancelled", "j3").command("mlflow", mlflow_run_id="m", uri="u")
    history.command("something_newer", surprise=[1])
    # Clocks of nodes differ: some facts carry the time of another one, or an earlier one.
    history.add("attempts/j3.0/node-0.jsonl", "end", t=101.0, cause="completed", reason="")
    history.add("attempts/j3.0/rank-1.jsonl", "session", t=102.0, step=11, world_size=2, device="cpu")
    return history.events


EVENTS = rich_history()
PROGRESS = {"j1.0": Progress(13, 120.0, {"loss": 1.0}), "j3.0": Progress(15, 140.0, {"loss": 0.5, "lr": 0.1})}
subsets = st.lists(st.sampled_from(EVENTS), unique_by=id)


@given(subsets, st.integers())
def test_the_fold_does_not_depend_on_the_order_in_which_facts_became_known(events: list[Event], seed: int) -> None:
    shuffled = random.Random(seed).sample(events, len(events))
    assert fold("RUN", shuffled, PROGRESS) == fold("RUN", sorted(events, key=lambda event: event.order), PROGRESS)


@given(subsets, st.sampled_from([PROGRESS, {}]))
def test_any_subset_of_facts_folds_into_a_run(events: list[Event], progress: dict[str, Progress]) -> None:
    run = fold("RUN", events, progress)
    assert run.state in RUN_STATES
    assert [attempt.number for attempt in run.attempts] == list(range(1, len(run.attempts) + 1))
    for attempt in run.attempts:
        assert (attempt.state in ENDED) == (attempt.cause is not None)
        assert attempt.lost_steps is None or attempt.lost_steps >= 0
    assert run.ended == (run.state in ENDED)


@given(st.permutations(range(len(EVENTS))), st.integers(0, len(EVENTS)))
def test_an_attempt_that_has_ended_stays_ended_whatever_is_learned_later(order: list[int], known: int) -> None:
    before = {a.key: a for a in fold("RUN", [EVENTS[i] for i in order[:known]], PROGRESS).attempts if a.ended}
    after = {a.key: a for a in fold("RUN", EVENTS, PROGRESS).attempts}
    assert all(after[key].ended for key in before if key != "j2.0")


# --- before training ----------------------------------------------------------------------------------------------

_ELECTION = {
    "networks": [{"name": "10.58.0.0/24", "interfaces": {"n0": "hsn0", "n1": "ib0"}, "proved": True, "problems": []}],
    "excluded": [],
    "elected": 0,
}


def test_an_attempt_keeps_its_networks_its_clocks_and_its_checks_by_host() -> None:
    story = Story().submitted().started(0, 2)
    story.node("election", 0, 0, **_ELECTION)
    for node, offset in ((0, 0.0), (1, 12.5)):
        story.node("clock", node, 0, offset_ms=offset, bound_ms=0.1, samples=8, disciplined=True, source="chrony")
        finding = {"check": "disk", "status": "pass", "summary": "81 GB free", "evidence": {"free": 1}}
        story.node("preflight", node, 0, status="pass", seconds=1.0, findings=[finding], blamed=False)
    attempt = story.newest
    assert attempt.network == _ELECTION
    assert attempt.clock == {
        "n0": {"offset_ms": 0.0, "bound_ms": 0.1, "disciplined": True, "source": "chrony"},
        "n1": {"offset_ms": 12.5, "bound_ms": 0.1, "disciplined": True, "source": "chrony"},
    }
    found = [{"check": "disk", "status": "pass", "summary": "81 GB free"}]
    assert attempt.checks == {"n0": found, "n1": found}


def test_what_a_node_says_before_its_clock_was_set_back_is_still_its_own() -> None:
    story = Story().submitted().later(5000)
    story.started()
    story.later(-4000)
    story.node("clock", 0, 0, offset_ms=1.0, bound_ms=0.1, disciplined=True, source="x")
    assert list(story.newest.clock) == ["n0"]
