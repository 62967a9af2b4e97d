"""Where the time of an attempt went: every second once, whatever is known of it."""

from __future__ import annotations

import random
from collections.abc import Iterable
from itertools import pairwise
from typing import Any, Self

import pytest
from helpers.journal_events import event, read_run
from helpers.simulated_run import SimulatedRun
from hypothesis import given
from hypothesis import strategies as st

from slurmtrain.model.run import accounting
from slurmtrain.model.run.accounting import KINDS, goodput, mean_nodes, summed
from slurmtrain.model.run.attempt_facts import AttemptFacts, is_summarised
from slurmtrain.model.run.events.base import AnyEvent
from slurmtrain.model.run.fold import RunBuilder
from slurmtrain.model.run.journal_lines import Progress
from slurmtrain.model.run.run import Attempt, Run

NODE, RANK, COMMAND = "attempts/7.0/node-0.jsonl", "attempts/7.0/rank-0.jsonl", "journal/observe.jsonl"


def account(
    events: Iterable[AnyEvent], progress: Progress, *, begin: float, ended_at: float | None, resumed_at: int | None
) -> dict[str, float]:
    """Seconds by kind of one attempt that was submitted at ``begin``."""
    account = account_of(events, progress, begin=begin, ended_at=ended_at, resumed_at=resumed_at)
    return accounting._spent(account.intervals())


def account_of(
    events: Iterable[AnyEvent], progress: Progress, *, begin: float, ended_at: float | None, resumed_at: int | None
) -> accounting._Account:
    facts = AttemptFacts()
    for each in sorted(events, key=lambda each: each.order):
        if is_summarised(each):
            facts.saves.add(each)
        else:
            facts.events.append(each)
    resumption = None if resumed_at is None else accounting._Resumption(resumed_at)
    return accounting._Account(accounting._summary(facts, progress, ended_at), begin, resumption)


class TimedAttempt(SimulatedRun):
    """The attempt of a job that was submitted at 100 s, with the time of each event."""

    def __init__(self) -> None:
        super().__init__(now=100.0)
        self.progress = Progress()

    def at(self, time: float, source: str, kind: str, **fields: Any) -> Self:
        return self.write(source, kind, at=float(time), **fields)

    def started(self) -> Self:
        """In the queue for 20 s, 5 s of start, 3 s of preflight, 2 s more until ranks start."""
        self.at(120, NODE, "agent", node=0, nodes=1, host="n0", attempt=1, executor="slurm")
        self.at(128, NODE, "preflight", seconds=3.0, findings=[])
        self.at(129, NODE, "rendezvous", node=0)
        return self.at(130, NODE, "workers", processes={})

    def trains(self, time: float, step: int = 0, round_: int = 0) -> Self:
        """Ranks have begun 10 s before, and restored a step for 4 s until a second ago."""
        rank = f"attempts/7.0/rank-0.{round_}.jsonl" if round_ else RANK
        self.at(time - 10, rank, "session", step=0, world_size=1)
        if step:
            saved = {"path": f"checkpoints/step-{step}", "seconds": 0.0, "saved_at": 0.0, "stall_s": 0.0}
            self.at(time - 1, rank, "restored", step=step, took_s=4.0, **saved)
        return self.at(time, rank, "total", total_steps=100)

    def saves(self, captured: float, step: int, why: str = "interval", stall_s: float = 1.0, took: float = 6.0) -> Self:
        """A save of the state at ``captured``, which took so many seconds."""
        saved_at = captured + took
        fields = {"step": step, "path": f"checkpoints/step-{step}", "bytes": 1, "seconds": took, "saved_at": saved_at}
        return self.at(saved_at + 0.5, RANK, "saved", **fields, stall_s=stall_s, why=why)

    def trained_to(self, step: int, time: float) -> Self:
        """Training had finished so many steps at this time."""
        self.progress = Progress(step, float(time), {})
        return self

    def spent(self, ended_at: float | None, resumed_at: int | None = None) -> dict[str, float]:
        """Seconds by kind, those of which there are any."""
        spent = account(
            self.events, self.progress, begin=100.0, ended_at=ended_at, resumed_at=resumed_at
        )  # fmt: skip
        assert sum(spent.values()) == pytest.approx((ended_at or 0.0) - 100.0) or ended_at is None
        return {kind: seconds for kind, seconds in spent.items() if seconds}


BEFORE = {"queue": 20.0, "start": 13.0, "preflight": 3.0, "restore": 4.0}
"""Of an attempt that begins to train at 140 s."""


def test_every_second_of_an_attempt_that_completes_has_its_kind() -> None:
    attempt = TimedAttempt().started().trains(140, 10).saves(200, 20).saves(290, 30, "end", stall_s=0.5)
    attempt.trained_to(30, 290).at(297, NODE, "end", cause="completed")
    # A save in the background costs the second for which training stood still; the last one all of its six.
    assert attempt.spent(300.0) == {**BEFORE, "train": 150.0, "stall": 7.0, "stop": 3.0}


def test_a_job_in_the_queue_has_waited_for_as_long_as_something_is_known_of_it() -> None:
    attempt = TimedAttempt().at(100, COMMAND, "submitting")
    attempt.at(115, COMMAND, "observed", state="PENDING", started_at=None)
    assert attempt.spent(None) == {"queue": 15.0}
    assert attempt.spent(130.0) == {"queue": 30.0}


@pytest.mark.parametrize(("began", "queue"), [(117.0, 17.0), (121.0, 20.0)])
def test_slurm_knows_better_than_the_agent_when_the_queue_ended_unless_it_is_later(began: float, queue: float) -> None:
    attempt = TimedAttempt().started().at(400, COMMAND, "observed", state="FAILED", started_at=began)
    assert attempt.spent(130.0) == {"queue": queue, "start": 27.0 - queue, "preflight": 3.0}


def test_a_script_without_a_session_trains_from_its_ranks_start_to_its_end() -> None:
    attempt = TimedAttempt().started().at(180, NODE, "end", cause="crash", failed_at=175.0)
    assert attempt.spent(180.0, resumed_at=0) == {
        "queue": 20.0, "start": 7.0, "preflight": 3.0, "train": 45.0, "stop": 5.0,
    }  # fmt: skip


def test_what_was_trained_after_the_step_that_is_gone_on_from_is_lost() -> None:
    attempt = TimedAttempt().started().trains(140).saves(160, 10).saves(180, 20).trained_to(28, 196)
    attempt.at(201, NODE, "end", cause="crash", failed_at=199.0)
    alone = {"queue": 20.0, "start": 17.0, "preflight": 3.0, "stall": 2.0, "stop": 2.0}
    # From the 181st second on, when the stall was over: the crash came before step 29 was finished.
    for resumed_at, train, lost in ((20, 39.0, 18.0), (10, 20.0, 37.0), (0, 0.0, 57.0), (None, 57.0, 0.0)):
        spent = {kind: seconds for kind, seconds in (("train", train), ("lost", lost)) if seconds}
        assert attempt.spent(201.0, resumed_at) == alone | spent
    # A step whose save nobody told of is estimated between its neighbours.
    untold = TimedAttempt().started().trains(140).saves(160, 10, stall_s=0.0).trained_to(20, 180)
    assert untold.spent(180.0, 15)["lost"] == 10.0


def test_an_attempt_that_is_asked_to_stop_loses_nothing_that_it_saves() -> None:
    attempt = TimedAttempt().started().trains(140).trained_to(20, 181).at(180, NODE, "stopping", cause="preempted")
    attempt.saves(182, 20, "stop", stall_s=2.0).at(189, RANK, "stopped", step=20)
    attempt.at(190, NODE, "end", cause="preempted", failed_at=190.0)
    assert attempt.spent(190.0, 20) == {"queue": 20.0, "start": 17.0, "preflight": 3.0, "train": 40.0, "stop": 10.0}
    # Ranks that stop by themselves do so from their last save.
    alone = TimedAttempt().started().trains(140).trained_to(20, 180).saves(182, 20, "stop")
    assert alone.at(189, RANK, "stopped", step=20).spent(190.0, 20)["stop"] == 8.0


def restarted() -> TimedAttempt:
    """Round 0 trains from 140 to 200 s, saves step 10 at 160 s and fails after step 18; round 1 goes on at 240 s."""
    attempt = TimedAttempt().started().trains(140).saves(160, 10, stall_s=0.0)
    attempt.at(200, RANK, "raised", type="E", message="")
    attempt.at(210, NODE, "restart", round=1, cause="crash", reached=18)
    attempt.at(212, NODE, "workers", processes={})
    return attempt.trains(240, 10, 1)


def test_a_restart_in_place_loses_what_was_trained_since_the_checkpoint() -> None:
    attempt = restarted().trained_to(30, 300).at(300, NODE, "end", cause="completed")
    assert attempt.spent(300.0) == {
        "queue": 20.0, "start": 43.0, "preflight": 3.0, "restore": 4.0, "train": 80.0, "lost": 40.0, "stop": 10.0,
    }  # fmt: skip
    # Until the ranks train again, the newest checkpoint is what they go on from.
    attempt.events = [event for event in attempt.events if event.time <= 212]
    assert attempt.spent(None)["lost"] == 40.0


def test_the_time_without_a_step_that_made_it_a_hang_is_lost_even_if_no_step_is() -> None:
    attempt = TimedAttempt().started().trains(140).saves(160, 10, stall_s=0.0).trained_to(10, 160)
    attempt.at(230, NODE, "hang", ranks=[{"idle_s": 70.0}, {"idle_s": 60.0}, {"idle_s": 0.0}])
    attempt.at(231, NODE, "restart", round=1, reached=10).trains(250, 10, 1)
    assert (attempt.spent(260.0)["lost"], attempt.spent(260.0)["train"]) == (60.0, 40.0)


def test_other_nodes_whose_clocks_are_off_do_not_move_what_node_0_says() -> None:
    attempt = TimedAttempt().started().trains(140).trained_to(20, 180)
    # A hang that another node tells of is put right by its clock.
    hung = TimedAttempt().started().trains(140).trained_to(20, 180)
    hung.at(128, "attempts/7.0/node-1.jsonl", "clock", node=1, offset_ms=-50_000.0)
    hung.at(190, "attempts/7.0/node-1.jsonl", "hang", ranks=[])
    assert hung.spent(250.0)["stop"] == 10.0
    attempt.at(181, NODE, "end", cause="crash", failed_at=180.0)
    alone = attempt.spent(181.0, 20)
    for kind in ("agent", "workers", "end", "stopping", "preflight"):
        attempt.at(20, "attempts/7.0/node-1.jsonl", kind, node=1, host="n1", seconds=900.0, cause="crash")
    attempt.at(150, "attempts/7.0/rank-1.jsonl", "raised", type="E", message="")
    assert attempt.spent(181.0, 20) == alone


# --- the run ------------------------------------------------------------------------------------------------------


def run_of(*events: AnyEvent, **steps: Progress) -> Run:
    return read_run("RUN", events, {f"7.{name[1:]}": progress for name, progress in steps.items()})


def test_an_attempt_counts_the_steps_that_its_restarts_in_place_did_again() -> None:
    attempt = restarted()
    progress = Progress(30, 300.0, {})
    assert [each.lost_steps for each in run_of(*attempt.events, r0=progress).attempts] == [8]
    attempt.at(300, NODE, "end", cause="crash", failed_at=299.0, reason="", failures=[])
    # A round that finished no step does not lose those of the one before twice.
    assert run_of(*attempt.events, r0=Progress(18, 199.0, {})).lost_steps == 8
    attempt.at(305, COMMAND, "observed", job_id="7", restart=0, state="FAILED")
    run = run_of(*attempt.events, r0=progress)
    assert run.attempts[0].lost_steps == run.lost_steps == 8 + 20
    attempt.events[-2:] = []
    attempt.at(300, NODE, "end", cause="completed", reason="", failures=[])
    assert run_of(*attempt.events, r0=progress).lost_steps == 8


@pytest.mark.parametrize(("begins_at", "lost"), [(20, 0), (30, 0), (12, 8)])
def test_an_attempt_that_has_completed_loses_steps_only_if_a_later_one_goes_back(begins_at: int, lost: int) -> None:
    sim = SimulatedRun().submitted().started().reached(20).ended("completed")
    assert sim.run.lost_steps == 0
    sim.later(10).job = "8"
    sim.submitted(2).started(submission=2).rank("session", step=begins_at, world_size=1)
    sim.rank("total", total_steps=100)
    assert [attempt.lost_steps for attempt in sim.run.attempts] == [lost, None]


def test_a_run_has_the_goodput_of_its_attempts_by_their_nodes() -> None:
    spent = {"queue": 500.0, "train": 60.0, "lost": 20.0, "stop": 20.0}
    large = Attempt(number=1, job_id="7", restart=0, hosts={"0": "a", "1": "b"}, spent=spent)
    small = Attempt(number=2, job_id="7", restart=1, spent={"queue": 1.0, "train": 100.0})
    assert goodput([large]) == 0.6
    assert goodput([large, small]) == pytest.approx((120 + 100) / (200 + 100))
    assert goodput([]) is None
    assert goodput([Attempt(number=1, job_id="7", restart=0, spent={"queue": 9.0})]) is None
    assert summed([large, small])["train"] == 160.0


def test_nodes_that_join_later_or_leave_count_for_the_time_that_they_were_there() -> None:
    # Of 100 s: node 1 of its own job all the time, also after it was lost; 5 and 6 from 20 s on, 6 until 70 s.
    attempt = Attempt(
        number=1, job_id="7", restart=0, started_at=1000.0,
        hosts={"0": "a", "1": "b", "5": "c", "6": "d"}, spent={"queue": 50.0, "train": 90.0, "start": 10.0},
        restarts=(
            {"at": 1020.0, "joined": [5, 6], "lost": []},
            {"at": 1070.0, "lost": [6]},
            {"at": 1080.0, "lost": [1]},
        ),
    )  # fmt: skip
    assert mean_nodes(attempt) == pytest.approx(2 + 0.8 + 0.5)
    assert mean_nodes(Attempt(number=1, job_id="7", restart=0)) == 1


# --- any facts ----------------------------------------------------------------------------------------------------

TIMES = st.one_of(st.floats(0, 400), st.integers(90, 320).map(float))
EVENTS = st.builds(
    event,
    TIMES,
    st.sampled_from((
        "agent", "waiting", "preflight", "rendezvous", "workers", "session", "restored", "total", "saved",
        "save_failed", "stopping", "stopped", "raised", "hang", "restart", "requeue", "end", "observed", "clock",
    )),
    st.fixed_dictionaries({"host": st.just("n0"), "run": st.just("R"), "path": st.just("p")}, optional={
        "seconds": st.floats(0, 50) | st.none(), "took_s": st.floats(0, 50), "stall_s": st.floats(0, 50) | st.none(),
        "step": st.integers(0, 30) | st.none(), "reached": st.integers(0, 30) | st.none(), "saved_at": TIMES,
        "why": st.sampled_from(("stop", "end", "steps")), "cause": st.sampled_from(("completed", "crash")),
        "failed_at": TIMES | st.none(), "started_at": TIMES | st.none(),
        "ranks": st.lists(st.fixed_dictionaries({"idle_s": st.floats(0, 90)}), max_size=2),
        "offset_ms": st.floats(-1e5, 1e5),
    }),
    st.sampled_from((NODE, RANK, COMMAND, "attempts/7.0/rank-0.1.jsonl", "attempts/7.0/node-1.jsonl")),
    st.integers(0, 10**6),
)  # fmt: skip
PROGRESS = st.builds(Progress, st.integers(0, 30), TIMES) | st.just(Progress())


@given(
    st.lists(EVENTS, max_size=12, unique_by=lambda event: event.order),
    PROGRESS,
    TIMES,
    TIMES | st.none(),
    st.integers(0, 30) | st.none(),
    st.integers(),
)
def test_the_kinds_share_the_time_without_rest_whatever_is_known_in_whatever_order(
    events: list[AnyEvent], progress: Progress, begin: float, end: float | None, step: int | None, seed: int
) -> None:
    spent = account(events, progress, begin=begin, ended_at=end, resumed_at=step)
    assert tuple(spent) == KINDS
    ticks = {kind: round(seconds * 1e6) for kind, seconds in spent.items()}
    assert min(ticks.values()) >= 0
    if end is not None:
        assert sum(ticks.values()) == max(0, round(end * 1e6) - round(begin * 1e6))
    shuffled = random.Random(seed).sample(events, len(events))
    assert account(shuffled, progress, begin=begin, ended_at=end, resumed_at=step) == spent


@given(
    st.lists(EVENTS, max_size=12, unique_by=lambda event: event.order),
    PROGRESS,
    TIMES,
    TIMES | st.none(),
    st.integers(0, 30) | st.none(),
)
def test_the_intervals_of_a_timeline_follow_each_other_and_add_up_to_the_seconds_by_kind(
    events: list[AnyEvent], progress: Progress, begin: float, end: float | None, step: int | None
) -> None:
    attempt = account_of(events, progress, begin=begin, ended_at=end, resumed_at=step)
    line, spent = attempt.merged(), accounting._spent(attempt.intervals())
    ticks = dict.fromkeys(KINDS, 0)
    for interval in line:
        ticks[interval.kind] += round(interval.end * 1e6) - round(interval.begin * 1e6)
    assert ticks == {kind: round(seconds * 1e6) for kind, seconds in spent.items()}
    assert all(interval.begin < interval.end for interval in line)
    for before, after in pairwise(line):
        assert before.end == after.begin
        assert before.kind != after.kind
    assert not line or round(line[0].begin * 1e6) == round(begin * 1e6)


def test_a_run_has_a_timeline_of_each_attempt_whose_sums_are_what_it_spent() -> None:
    first = TimedAttempt().started().trains(140).saves(160, 20).saves(180, 40)
    first.at(200, NODE, "end", cause="preempted", signal=15, reason="", failures=[])
    first.at(201, COMMAND, "observed", job_id="7", restart=0, state="PREEMPTED")
    builder, progress = RunBuilder("r"), {"7.0": Progress(60, 200.0, {})}
    builder.add(first.events)
    run, lines = builder.build(progress), builder.timelines(progress)
    assert list(lines) == [attempt.key for attempt in run.attempts] == ["7.0"]
    sums = dict.fromkeys(KINDS, 0.0)
    for kind, begin, end in lines["7.0"]:
        sums[kind] += end - begin
    assert sums == pytest.approx(run.attempts[0].spent)
    kinds = [interval.kind for interval in lines["7.0"]]
    assert kinds == ["start", "preflight", "start", "train", "stall", "train", "stall", "lost"]


@pytest.mark.parametrize(("step", "lost_steps", "lost_s"), [(None, None, 10.0), (99, 10, 10.0), (0, 109, 109.0)])
def test_a_checkpoint_of_unknown_step_loses_what_came_after_it_and_an_unknown_number_of_steps(
    step: int | None, lost_steps: int | None, lost_s: float
) -> None:
    attempt = TimedAttempt().started()
    attempt.at(140, "attempts/7.0/script.jsonl", "script_steps", step=0)
    attempt.at(250, NODE, "end", cause="crash", failed_at=249.0, reason="", failures=[])
    attempt.at(251, NODE, "found", path="/out/ckpt.pt", step=step, bytes=1, saved_at=239.0, format="torch")
    attempt.at(255, COMMAND, "observed", job_id="7", restart=0, state="FAILED")
    run = run_of(*attempt.events, r0=Progress(109, 249.0, {}))
    assert (run.lost_steps, run.attempts[0].lost_steps) == (lost_steps, lost_steps)
    assert run.attempts[0].spent["lost"] == pytest.approx(lost_s, abs=1.1)


def test_time_for_which_the_job_was_suspended_is_that_of_nobody() -> None:
    attempt = TimedAttempt().started().trains(140).saves(160, 10, stall_s=0.0).trained_to(20, 260)
    attempt.at(230, NODE, "suspended", since=170.0)
    assert attempt.spent(260.0, 20) == {"queue": 80.0, "start": 17.0, "preflight": 3.0, "train": 60.0}
    # Also before training began.
    attempt.at(139, NODE, "suspended", since=131.0)
    assert attempt.spent(260.0, 20)["queue"] == 88.0
