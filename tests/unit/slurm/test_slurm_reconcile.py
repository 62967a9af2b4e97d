"""What Slurm's answers add to what is known of a run: each way in which its job can end, and any order of answers."""

from __future__ import annotations

from dataclasses import replace

import pytest
from helpers.simulated_run import DOWN, LIMIT_S, SimulatedRun
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from slurmtrain.model.run.job_state import ABSENT, GONE
from slurmtrain.model.run.run import ENDED, RUN_STATES, Attempt
from slurmtrain.slurm.parse import Job
from slurmtrain.slurm.scheduler import GIVEN_UP_S, Accounting, Queue, may_change, needs_accounting

NO_ACCOUNTING = "sacct: Slurm accounting storage is disabled"

# --- what is asked ----------------------------------------------------------------------------------------------


def unnamed() -> SimulatedRun:
    """A run whose submission has named no job yet."""
    return SimulatedRun().submitting()


def test_a_run_without_an_attempt_is_nothing_to_ask_slurm_about() -> None:
    sim = SimulatedRun().created()
    assert not may_change(sim.run)
    assert not needs_accounting(sim.run, sim.queue())
    assert sim.look(sim.queue(), sim.accounting()) == []


def test_a_run_is_open_until_its_end_is_beyond_doubt() -> None:
    sim = SimulatedRun().submitted()
    assert may_change(sim.run)
    assert may_change(sim.started().run)
    assert may_change(sim.stopped().run)
    assert not may_change(sim.observed(sim.slurm("PREEMPTED")).run)
    over = SimulatedRun().submitted().started().ended("completed").later(2 * GIVEN_UP_S)
    assert not may_change(over.run)
    assert over.look(over.queue(), over.accounting()) == []


@pytest.mark.parametrize(
    ("state", "expected"), [("PENDING", False), ("RUNNING", False), ("COMPLETED", False), ("FAILED", True)]
)
def test_sacct_is_asked_for_what_squeue_leaves_open(state: str, expected: bool) -> None:
    sim = SimulatedRun().submitted().started()
    assert needs_accounting(sim.run, sim.queue(sim.slurm(state, restart=0))) is expected
    # Also for a job that squeue does not know, for a submission without one, and for a start before this one.
    assert needs_accounting(sim.run, sim.queue())
    assert needs_accounting(unnamed().run, sim.queue())
    assert needs_accounting(sim.run, sim.queue(sim.slurm("PENDING", restart=1)))
    assert not needs_accounting(sim.run, DOWN)


# --- jobs that wait or run --------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", ["PENDING", "RUNNING", "COMPLETING", "CONFIGURING", "SUSPENDED", "SOMETHING_NEW"])
def test_a_job_that_is_under_way_is_no_news(state: str) -> None:
    sim = SimulatedRun().submitted()
    other = replace(sim.slurm("FAILED"), id="8")
    assert sim.look(sim.queue(other, sim.slurm(state, restart=0))) == []
    assert sim.run.state == "pending"
    assert unnamed().look(sim.queue(sim.slurm(state)), sim.accounting()) == []


# --- jobs that ended --------------------------------------------------------------------------------------------


def test_a_preempted_job_that_was_asked_to_stop_is_preempted_once_sacct_says_so() -> None:
    sim = SimulatedRun().submitted().started().later(100).stopped()
    [observed] = sim.look(sim.queue(), sim.accounting(sim.slurm("PREEMPTED")))
    assert (observed.source, observed.state, observed.restart) == ("sacct", "PREEMPTED", 0)
    assert sim.causes == ["preempted"]
    assert sim.run.state == "failed"


def test_slurm_decides_for_a_job_one_of_whose_nodes_journaled_no_end() -> None:
    sim = SimulatedRun().submitted().started(nodes=2).later(100).stopped(0)
    assert sim.look(sim.queue(sim.slurm("RUNNING", restart=0))) == []
    assert sim.run.state == "running"
    sim.look(sim.queue(sim.slurm("NODE_FAIL", restart=0, nodes="n[0-1]")))
    assert (sim.causes, sim.newest.reason) == (["node_fail"], "a node failed (n[0-1])")


@pytest.mark.parametrize("state", ["FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "CANCELLED by 1001"])
def test_a_crash_that_a_job_has_journaled_needs_no_state_of_slurms(state: str) -> None:
    sim = SimulatedRun().submitted().started().ended("crash", reason="boom", failed_at=1005.0)
    assert sim.look(sim.queue(), sim.accounting(sim.slurm(state))) == []
    assert (sim.causes, sim.run.reason) == (["crash"], "boom")


@pytest.mark.parametrize(
    ("state", "row", "source", "cause"),
    [("OUT_OF_MEMORY", None, "squeue", "oom"), ("FAILED", "OUT_OF_MEMORY", "sacct", "oom")],
)
def test_squeue_is_enough_for_a_job_that_has_just_ended_unless_it_failed_as_sacct_knows_its_steps(
    state: str, row: str | None, source: str, cause: str
) -> None:
    sim = SimulatedRun().submitted().started().later(100)
    accounting = sim.accounting(sim.slurm(row)) if row else None
    [observed] = sim.look(sim.queue(sim.slurm(state, restart=0)), accounting)
    assert (observed.source, sim.causes) == (source, [cause])


@pytest.mark.parametrize("accounting", [None, "behind", "down"])
def test_squeue_decides_for_a_failed_job_that_sacct_does_not_know(accounting: str | None) -> None:
    sim = SimulatedRun().submitted().started().later(100)
    answers = {
        None: None,
        "behind": sim.accounting(sim.slurm("RUNNING", ends_at=None)),
        "down": Accounting(problem="sacct: down"),
    }
    sim.look(sim.queue(sim.slurm("FAILED", restart=0, exit_code=2)), answers[accounting])
    assert (sim.causes, sim.newest.reason) == (["crash"], "Slurm says FAILED with exit code 2")


def element(job: str = "26_2") -> SimulatedRun:
    """A run that waits in an array."""
    return SimulatedRun(job=job).submitted().later(30)


def shared(sim: SimulatedRun, state: str, *elements: int) -> Job:
    """The row that elements of an array share: squeue's does not name them."""
    indices = tuple(range(index, index + 1) for index in elements)
    return replace(sim.slurm(state), id="26", restart=0, elements=indices)


@pytest.mark.parametrize("source", ["squeue", "sacct"])
def test_an_element_that_was_cancelled_before_it_began_is_known_by_a_row_that_it_shares(source: str) -> None:
    sim = element()
    queue = sim.queue(shared(sim, "CANCELLED by 0")) if source == "squeue" else sim.queue()
    starts = {"26": [shared(sim, "CANCELLED by 0", 2, 3)]} if source == "sacct" else {}
    [observed] = sim.look(queue, Accounting(starts, at=sim.now))
    assert (observed.job_id, observed.source) == ("26_2", source)
    assert (sim.causes, sim.newest.job_id) == (["cancelled"], "26_2")


def test_an_array_element_with_a_row_of_its_own_is_not_described_by_the_arrays_row() -> None:
    sim = element()
    array = shared(sim, "CANCELLED by 0", 2)
    queue = sim.queue(array, sim.slurm("RUNNING", restart=0))
    assert sim.look(queue, Accounting({"26": [array]}, at=sim.now)) == []


@pytest.mark.parametrize("row", ["none", "that of others", "an old one"])
def test_an_element_of_which_a_cancel_has_left_nothing_is_cancelled_and_not_lost(row: str) -> None:
    sim = element()
    rows = {"none": [], "that of others": [shared(sim, "CANCELLED", 3)], "an old one": [shared(sim, "PENDING", 2, 3)]}
    other = replace(sim.slurm("RUNNING"), id="26_0")
    for state in (ABSENT, "CANCELLED"):
        [observed] = sim.look(sim.queue(), Accounting({"26_0": [other], "26": rows[row]}, at=sim.now + 1))
        assert observed.state == state
        sim.later(GIVEN_UP_S)
    assert sim.causes == ["cancelled"]


def test_an_element_that_ran_is_not_cancelled_with_those_that_never_began() -> None:
    sim = element().started().later(100)
    array = shared(sim, "CANCELLED by 0", 3)
    [observed] = sim.look(sim.queue(array), Accounting({"26": [array]}, at=sim.now + 1))
    assert observed.state == ABSENT
    unseen = element()
    own = replace(unseen.slurm("NODE_FAIL"), restart=None)
    unseen.look(unseen.queue(array), Accounting({"26_2": [own], "26": [array]}, at=unseen.now + 1))
    assert unseen.causes == ["node_fail"]


# --- jobs that Slurm starts again -------------------------------------------------------------------------------


def test_a_job_that_was_put_back_into_the_queue_is_requeued_and_then_runs() -> None:
    sim = SimulatedRun().submitted().started().later(100).stopped()
    first = sim.slurm("REQUEUED")
    again = sim.slurm("PENDING", restart=1)
    observed = sim.look(sim.queue(again), sim.accounting(first))
    assert [(each.restart, each.state) for each in observed] == [(0, "REQUEUED"), (1, "PENDING")]
    assert (sim.run.state, sim.causes) == ("requeued", ["preempted", None])
    sim.later(60).started(1)
    assert sim.look(sim.queue(replace(again, state="RUNNING")), sim.accounting(first)) == []
    assert (sim.run.state, sim.newest.number) == ("running", 2)


def test_a_start_that_squeue_shows_over_is_preempted_also_while_sacct_is_silent() -> None:
    for accounting in (None, Accounting(problem=NO_ACCOUNTING, absent=True), Accounting(problem="sacct: down")):
        sim = SimulatedRun().submitted().started().later(100).stopped()
        sim.look(sim.queue(sim.slurm("PENDING", restart=1)), accounting)
        assert (sim.run.state, sim.causes) == ("requeued", ["preempted", None])


@pytest.mark.parametrize(("state", "cause"), [("NODE_FAIL", "node_fail"), ("PREEMPTED", "preempted")])
@pytest.mark.parametrize("ended", [False, True])
def test_why_an_earlier_start_ended_is_asked_of_sacct_though_its_job_went_on(
    state: str, cause: str, ended: bool
) -> None:
    sim = SimulatedRun().submitted().started(nodes=2).later(100).stopped(0)
    over = sim.slurm(state)
    sim.later(60).started(1, nodes=2)
    assert len(sim.run.attempts) == 2
    if ended:
        sim.ended("completed", 0, 1).ended("completed", 1, 1)
        sim.look(sim.queue(), sim.accounting(over, sim.slurm("COMPLETED")))
        assert (sim.causes, may_change(sim.run)) == ([cause, "completed"], False)
    else:
        [observed] = sim.look(sim.queue(sim.slurm("RUNNING", restart=1)), sim.accounting(over))
        assert (observed.restart, sim.causes, sim.run.state) == (0, [cause, None], "running")


def test_starts_that_were_never_observed_are_known_from_sacct() -> None:
    sim = SimulatedRun().submitted().later(1000)
    starts = [
        sim.slurm("PREEMPTED", starts_at=1100.0, ends_at=1200.0),
        sim.slurm("NODE_FAIL", starts_at=1300.0, ends_at=1400.0),
        sim.slurm("OUT_OF_MEMORY", starts_at=1500.0, ends_at=1600.0),
    ]
    sim.look(sim.queue(), sim.accounting(*starts))
    assert sim.causes == ["preempted", "node_fail", "oom"]
    assert [attempt.number for attempt in sim.run.attempts] == [1, 2, 3]
    assert [attempt.started_at for attempt in sim.run.attempts] == [1100.0, 1300.0, 1500.0]


def test_a_row_of_sacct_that_is_final_by_an_old_answer_does_not_end_a_start_that_squeue_shows_alive() -> None:
    sim = SimulatedRun().submitted().started().later(100)
    stale = sim.accounting(sim.slurm("REQUEUED"))
    assert sim.look(sim.queue(sim.slurm("RUNNING", restart=0)), stale) == []
    assert sim.run.state == "running"


def test_an_old_answer_of_squeue_does_not_undo_what_a_node_said_since() -> None:
    sim = SimulatedRun().submitted().started().later(100).stopped()
    old = sim.queue(sim.slurm("RUNNING", restart=0))
    sim.later(60).started(1)
    assert sim.look(old, None) == []
    assert (sim.run.state, sim.newest.restart) == ("running", 1)


def test_without_a_restart_count_from_squeue_a_job_is_taken_for_the_newest_start() -> None:
    sim = SimulatedRun().submitted().started().stopped().later(60).started(1)
    sim.look(sim.queue(sim.slurm("NODE_FAIL", restart=None)), sim.accounting(sim.slurm("PREEMPTED")))
    assert sim.causes == ["preempted", "node_fail"]


# --- jobs that nobody knows -------------------------------------------------------------------------------------


@pytest.mark.parametrize("sacct", ["knows no job", "is absent", "knows that it ran"])
def test_an_unknown_job_is_first_missed_and_given_up_only_after_a_while(sacct: str) -> None:
    sim = SimulatedRun().submitted().started().later(100)
    runs = sim.slurm("RUNNING", ends_at=None)

    def answer() -> Accounting:
        if sacct == "is absent":
            return Accounting(problem=NO_ACCOUNTING, absent=True, at=sim.now)
        return sim.accounting(runs) if sacct == "knows that it ran" else sim.accounting()

    [missed] = sim.look(sim.queue(), answer())
    assert missed.state == ABSENT
    assert sim.run.state == "running"
    assert sim.newest.absent_since is not None
    sim.later(GIVEN_UP_S - 10)
    assert sim.look(sim.queue(), answer()) == []
    sim.later(20)
    # Nor while one of both does not answer.
    assert sim.look(sim.queue(), Accounting(problem="sacct: down", at=sim.now)) == []
    assert sim.look(DOWN, answer()) == []
    [given_up] = sim.look(sim.queue(), answer())
    assert given_up.state == GONE
    assert (sim.run.state, sim.causes) == ("lost", ["lost"])
    assert "Slurm no longer knows its job" in sim.run.reason


@pytest.mark.parametrize("state", ["PENDING", "RUNNING"])
def test_a_job_that_is_back_is_missed_no_more(state: str) -> None:
    sim = SimulatedRun().submitted().later(100)
    sim.look(sim.queue(), sim.accounting())
    [back] = sim.look(sim.queue(sim.slurm(state, restart=0)))
    assert back.state == state
    assert sim.newest.absent_since is None
    sim.later(2 * GIVEN_UP_S)
    [missed] = sim.look(sim.queue(), sim.accounting())
    assert missed.state == ABSENT
    assert sim.started().newest.absent_since is None


@pytest.mark.parametrize("silent", ["squeue", "sacct", "not asked"])
def test_a_job_is_not_missed_unless_both_squeue_and_sacct_have_answered(silent: str) -> None:
    sim = SimulatedRun().submitted().started().later(2 * GIVEN_UP_S)
    answers = {"squeue": sim.accounting(sim.slurm("FAILED")), "sacct": Accounting(problem="sacct: down", at=sim.now)}
    assert sim.look(DOWN if silent == "squeue" else sim.queue(), answers.get(silent)) == []
    assert sim.run.state == "running"
    if silent == "sacct":
        waits = element()
        queue = waits.queue(shared(waits, "CANCELLED"))
        assert waits.look(queue, Accounting(problem="sacct: timed out", at=waits.now)) == []


def test_a_job_is_not_missed_by_answers_from_before_it_was_submitted() -> None:
    before = SimulatedRun()
    queue, accounting = before.queue(), before.accounting()
    sim = SimulatedRun().submitted()
    assert sim.look(queue, sim.accounting()) == []
    assert sim.look(sim.queue(), accounting) == []
    assert len(sim.look(sim.queue(), sim.accounting())) == 1


# --- any order of answers ---------------------------------------------------------------------------------------

WORDS = ["PENDING", "RUNNING", "COMPLETING", "SOMETHING_NEW", "REQUEUE_HOLD", "SUSPENDED"]
LAST_WORDS = ["PREEMPTED", "REQUEUED", "NODE_FAIL", "TIMEOUT", "FAILED", "OUT_OF_MEMORY", "CANCELLED by 0", "COMPLETED",
              "BOOT_FAIL", "DEADLINE"]  # fmt: skip
restarts = st.integers(0, 2)


class AnyStory(RuleBasedStateMachine):
    """Nodes, a person and Slurm say whatever they like in any order; answers are late, wrong or missing."""

    def __init__(self) -> None:
        super().__init__()
        self.sim = SimulatedRun().submitted()
        self.over: dict[str, Attempt] = {}

    @rule(restart=restarts, nodes=st.integers(1, 2))
    def agents_speak(self, restart: int, nodes: int) -> None:
        self.sim.started(restart, nodes)

    @rule(restart=restarts, node=st.integers(0, 1), cascade=st.booleans())
    def a_node_crashes(self, restart: int, node: int, cascade: bool) -> None:
        self.sim.ended("crash", node, restart, reason="boom", failed_at=self.sim.now, cascade=cascade)

    @rule(restart=restarts, node=st.integers(0, 1))
    def a_node_is_asked_to_stop(self, restart: int, node: int) -> None:
        self.sim.stopped(node, restart)

    @rule(restart=restarts, node=st.integers(0, 1))
    def a_node_completes(self, restart: int, node: int) -> None:
        self.sim.ended("completed", node, restart)

    @rule()
    def a_person_cancels(self) -> None:
        self.sim.cancel()

    @rule(seconds=st.sampled_from([1.0, 60.0, GIVEN_UP_S + 1, LIMIT_S]))
    def time_passes(self, seconds: float) -> None:
        self.sim.later(seconds)

    @rule(
        queued=st.none() | st.tuples(st.sampled_from(WORDS + LAST_WORDS), st.none() | restarts),
        starts=st.none() | st.lists(st.sampled_from(WORDS + LAST_WORDS), max_size=3),
        squeue_down=st.booleans(),
        sacct_down=st.booleans(),
        age=st.sampled_from([0.0, 10.0, 1000.0]),
    )
    def slurm_is_asked(
        self,
        queued: tuple[str, int | None] | None,
        starts: list[str] | None,
        squeue_down: bool,
        sacct_down: bool,
        age: float,
    ) -> None:
        self.note_what_is_over()
        sim, now = self.sim, self.sim.now
        jobs = [] if queued is None else [sim.slurm(queued[0], restart=queued[1])]
        queue = DOWN if squeue_down else Queue({job.id: job for job in jobs}, at=now - age)
        rows: list[Job] = [sim.slurm(state) for state in starts or []]
        accounting = Accounting({sim.job: rows} if starts is not None else {}, at=now - age)
        # It checks, too, that to ask again adds nothing.
        sim.look(queue, Accounting(problem="sacct: down", at=now) if sacct_down else accounting)
        self.what_was_over_is_as_it_was()

    def note_what_is_over(self) -> None:
        self.over = {a.key: a for a in self.sim.run.attempts if a.ended and a.confirmed}

    def what_was_over_is_as_it_was(self) -> None:
        attempts = {attempt.key: attempt for attempt in self.sim.run.attempts}
        for key, before in self.over.items():
            is_started_again = any(a.job_id == before.job_id and a.restart > before.restart for a in attempts.values())
            if before.cause == "cancelled" and is_started_again:
                continue  # so it was not, whatever a person had asked for
            # When Slurm says when it began, the end of the queue moves.
            assert replace(attempts[key], number=0, spent={}) == replace(before, number=0, spent={})

    @invariant()
    def the_run_makes_sense(self) -> None:
        run = self.sim.run
        assert run.state in RUN_STATES
        for attempt in run.attempts:
            assert (attempt.state in ENDED) == (attempt.cause is not None)
            assert attempt.ended or not attempt.confirmed
        assert [attempt.number for attempt in run.attempts] == list(range(1, len(run.attempts) + 1))


AnyStory.TestCase.settings = settings(max_examples=2 * settings.default.max_examples, stateful_step_count=20)
TestAnyOrderOfAnswersKeepsWhatIsKnown = AnyStory.TestCase
