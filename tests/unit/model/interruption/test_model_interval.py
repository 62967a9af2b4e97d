"""When to save, and when ranks talk to each other."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurmtrain.model.experiment.checkpoint import Every
from slurmtrain.model.interruption.interval import (
    ANNOUNCED,
    CHEAP,
    FIRST_SAVE_S,
    GRACE_MARGIN,
    LONGEST_S,
    MOST_OVERHEAD,
    PRIOR_MTBF_S,
    SHORTEST_S,
    UNNOTICED,
    AttemptSpan,
    Cost,
    InterruptionStats,
    IntervalChoice,
    Publication,
    SaveReason,
    Vote,
    add_attempts,
    choose_interval,
    interruption_kind,
    optimum,
    steps_to_agreement,
    too_slow,
)
from slurmtrain.model.run.run import CAUSES

HOUR = 3600.0
AUTO = Every()
# So much was seen that the prior does not matter.
LONG = 1e12

histories = st.builds(
    InterruptionStats,
    uptime_s=st.floats(0, 1e12),
    interruptions=st.integers(0, 10_000),
    announced=st.integers(0, 10_000),
    grace_s=st.none() | st.floats(0, 1e4),
    stall_s=st.none() | st.floats(0, 1e5),
    save_s=st.none() | st.floats(0, 1e5),
)
costs = st.floats(0, 1e5)


def chosen(history: InterruptionStats | None = None, **more: Any) -> IntervalChoice:
    arguments = {"nodes": 1, "uptime_s": 0.0, "stall_s": 2.0, "save_s": 5.0, **more}
    return choose_interval(history or InterruptionStats(), **arguments)


def seen_every(hours: float) -> InterruptionStats:
    """A history in which one node runs so long between interruptions."""
    return InterruptionStats(uptime_s=LONG, interruptions=round(LONG / (hours * HOUR)))


# --- the formula --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("mtbf_h", "minutes"), [(24, 117), (6, 57), (0.25, 9.1)])
def test_a_stall_of_five_minutes_gives_the_published_intervals(mtbf_h: float, minutes: float) -> None:
    assert optimum(300, mtbf_h * HOUR) / 60 == pytest.approx(minutes, rel=0.01)


# --- how often to save ----------------------------------------------------------------------------------------------


def test_before_anything_was_saved_the_interval_is_short() -> None:
    choice = chosen(stall_s=None, save_s=None)
    assert (choice.seconds, choice.optimum_s, choice.bounded_by) == (FIRST_SAVE_S, None, "first")
    assert "the first save comes early" in choice.why
    # What a namesake needed says nothing of the stall.
    assert chosen(InterruptionStats(save_s=400.0), stall_s=None, save_s=None).bounded_by == "first"


def test_what_was_seen_outweighs_that_a_node_is_taken_for_one_that_lasts_six_hours() -> None:
    assert [chosen(nodes=nodes).mtbf_s for nodes in (1, 4)] == [PRIOR_MTBF_S, PRIOR_MTBF_S / 4]
    history = InterruptionStats(uptime_s=50 * 24 * HOUR, interruptions=49)
    assert chosen(history).mtbf_s == pytest.approx(24 * HOUR, rel=0.02)
    early, late = (chosen(nodes=100, uptime_s=hours * HOUR) for hours in (0.1, 10))
    assert late.mtbf_s == (10 * 100 * HOUR + PRIOR_MTBF_S) / 100
    assert early.seconds < late.seconds
    assert chosen(uptime_s=-5.0) == chosen(uptime_s=0.0)


@given(histories, st.integers(1, 10_000), st.floats(0, 1e7), st.none() | costs, st.none() | costs)
def test_an_interval_stays_within_its_bounds(
    history: InterruptionStats, nodes: int, uptime: float, stall: float | None, save: float | None
) -> None:
    choice = chosen(history, nodes=nodes, uptime_s=uptime, stall_s=stall, save_s=save)
    if choice.stall_s is None:
        assert choice.seconds == FIRST_SAVE_S
        return
    assert choice.optimum_s is not None
    longest = max(LONGEST_S, choice.stall_s / CHEAP, choice.save_s or 0.0)
    assert max(SHORTEST_S, choice.save_s or 0.0) <= choice.seconds <= longest
    if choice.interruptions == 0:
        assert choice.stall_s / choice.seconds <= MOST_OVERHEAD * (1 + 1e-9)
    if choice.bounded_by is None:
        assert choice.seconds == choice.optimum_s
    assert choice.why


@given(histories, st.integers(1, 1000), costs, costs, st.floats(0, 1e9), st.integers(0, 100))
def test_dearer_saves_and_fewer_interruptions_never_make_it_shorter(
    history: InterruptionStats, nodes: int, stall: float, more: float, longer: float, fewer: int
) -> None:
    now = chosen(history, nodes=nodes, stall_s=stall)
    slack = 1 + 1e-9
    assert now.seconds <= chosen(history, nodes=nodes, stall_s=stall + more).seconds * slack
    assert (
        now.seconds
        <= chosen(replace(history, uptime_s=history.uptime_s + longer), nodes=nodes, stall_s=stall).seconds * slack
    )
    assert now.seconds <= chosen(history, nodes=nodes, stall_s=stall, uptime_s=longer).seconds * slack
    assert (
        chosen(replace(history, interruptions=history.interruptions + fewer), nodes=nodes, stall_s=stall).seconds
        <= now.seconds * slack
    )
    assert chosen(history, nodes=nodes + 1, stall_s=stall).seconds <= now.seconds * slack


@pytest.mark.parametrize(
    ("history", "more", "seconds", "bound"),
    [
        (seen_every(1), {"stall_s": 1e-6}, SHORTEST_S, "shortest"),
        (seen_every(1), {"save_s": 700.0}, 700.0, "save"),
        (seen_every(1), {"save_s": 7000.0}, 7000.0, "save"),
        (seen_every(1e6), {}, LONGEST_S, "longest"),
        (seen_every(1e6), {"stall_s": 60.0}, 60 / CHEAP, "longest"),
        (InterruptionStats(), {"stall_s": 60.0, "nodes": 400}, 60 / MOST_OVERHEAD, "overhead"),
    ],
)
def test_the_bound_that_holds_is_told(
    history: InterruptionStats, more: dict[str, Any], seconds: float, bound: str
) -> None:
    choice = chosen(history, **more)
    assert choice.seconds == pytest.approx(seconds)
    assert choice.bounded_by == bound
    assert "would be best, but " in choice.why


def test_the_reason_has_figures_and_the_journal_gets_all_of_it() -> None:
    choice = chosen(InterruptionStats(uptime_s=51 * HOUR, interruptions=2), nodes=4, stall_s=2.1, save_s=20.0)
    assert choice.why == (
        "a save stalls training for 2.1 s, and 4 nodes may be interrupted without notice every 4.75 h "
        "(2 seen in 51 node-hours)"
    )
    plain = choice.to_dict()
    assert set(plain) == {
        "seconds", "optimum_s", "stall_s", "save_s", "mtbf_s", "interruptions", "bounded_by", "why",
    }  # fmt: skip
    assert json.loads(json.dumps(plain, allow_nan=False)) == plain


# --- preemptions, and the grace -------------------------------------------------------------------------------------

PREEMPTED = InterruptionStats(uptime_s=100 * HOUR, announced=19, grace_s=60.0)


def test_announced_interruptions_do_not_count_where_a_save_fits_the_grace() -> None:
    choice = chosen(PREEMPTED, save_s=60 / GRACE_MARGIN)
    assert choice.interruptions == 0
    assert choice.mtbf_s == 106 * HOUR


@pytest.mark.parametrize(
    ("history", "save_s"),
    [
        (PREEMPTED, 60 / GRACE_MARGIN + 0.1),
        (replace(PREEMPTED, grace_s=0.0), 1.0),
        (replace(PREEMPTED, save_s=95.0), None),
    ],
)
def test_they_count_where_it_does_not_so_that_checkpoints_are_taken_ahead(
    history: InterruptionStats, save_s: float | None
) -> None:
    choice = chosen(history, save_s=save_s, stall_s=None if save_s is None else 2.0)
    assert choice.interruptions == 19
    assert choice.mtbf_s == pytest.approx(106 * HOUR / 20)
    assert "preemptions included, whose grace is too short for a save" in choice.why


@pytest.mark.parametrize("history", [replace(PREEMPTED, grace_s=None), PREEMPTED])
def test_they_do_not_count_where_grace_or_duration_is_unknown(history: InterruptionStats) -> None:
    save_s = 1e6 if history.grace_s is None else None
    assert chosen(history, save_s=save_s).interruptions == 0


def test_a_save_that_does_not_fit_the_grace_is_told_with_figures_and_advice() -> None:
    assert too_slow(95.04, 60.0, AUTO, "partition spot") == (
        "a job that is preempted in partition spot has 60 s to save, but the last save took 95.0 s: the work since the "
        "previous checkpoint may be lost; checkpoint.every: auto therefore saves as if preemptions came without "
        "notice; a GraceTime of 143 s would suffice, and with more ranks a save takes less time"
    )
    other = too_slow(95.04, 60.0, Every(minutes=30), "partition spot")
    assert other is not None
    assert "checkpoint.every: auto would save as if preemptions came without notice" in other
    for save, grace in ((40.0, 60.0), (None, 60.0), (95.0, None)):
        assert too_slow(save, grace, AUTO, "partition spot") is None


# --- what saves cost ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("saves", "stall_s", "save_s"),
    [
        ([], None, None),
        # The first counts as long as there is no other, and what was long ago is forgotten.
        ([(0.3, 9.0)], 0.3, 9.0),
        ([(0.3, 9.0), (0.1, 2.0), (0.2, 4.0)], 0.15, 4.0),
        ([(100.0, 100.0)] * 20 + [(1.0, 1.0)] * 8, 1.0, 1.0),
    ],
)
def test_a_save_stalls_as_the_last_ones_did_and_may_take_as_long_as_the_longest_of_them(
    saves: list[tuple[float, float]], stall_s: float | None, save_s: float | None
) -> None:
    cost = Cost()
    for stall, save in saves:
        cost.add(stall_s=stall, save_s=save)
    assert (cost.stall_s, cost.save_s) == (pytest.approx(stall_s), save_s)


# --- the history ----------------------------------------------------------------------------------------------------


@given(histories)
def test_a_history_survives_being_handed_over_also_to_another_version(history: InterruptionStats) -> None:
    data = json.loads(json.dumps(history.to_dict()))
    assert InterruptionStats.from_dict(data) == InterruptionStats.from_dict({**data, "colour": "red"}) == history
    assert InterruptionStats.from_dict({"interruptions": 3}) == InterruptionStats(interruptions=3)


# --- is it due ------------------------------------------------------------------------------------------------------


def test_when_a_save_is_due() -> None:
    optimum_s = chosen().seconds
    for every, seconds in ((Every(minutes=0.5), 30.0), (AUTO, optimum_s)):
        assert not every.is_due(1, since_save_s=seconds - 0.1, optimum_s=optimum_s)
        assert every.is_due(1, since_save_s=seconds, optimum_s=optimum_s)
    by_steps = Every(steps=5)
    assert [step for step in range(11) if by_steps.is_due(step, since_save_s=0.0, optimum_s=optimum_s)] == [5, 10]
    assert not by_steps.is_due(4, since_save_s=1e9, optimum_s=optimum_s)


def test_a_vote_is_the_same_after_its_way_through_numbers() -> None:
    vote = Vote(stop=True, gap=8, save=SaveReason.REQUESTED, writing=True, publication=Publication.FAILED, balance=True)
    assert Vote.from_numbers(*vote.numbers()) == vote
    assert Vote.from_numbers(0, 0, 0, 0, 0, 0) == Vote()


@pytest.mark.parametrize(
    ("step_s", "previous", "steps"),
    [(1.0, 1, 1), (0.01, 100, 25), (0.01, 4, 8), (0.0, 8, 16), (10.0, 64, 1), (1e-9, 3, 6)],
)
def test_ranks_agree_about_four_times_a_second_and_approach_that_by_doubling(
    step_s: float, previous: int, steps: int
) -> None:
    assert steps_to_agreement(step_s, previous) == steps


@given(st.just(0.0) | st.floats(1e-9, 1e3), st.integers(1, 10**6))
def test_ranks_agree_more_often_while_a_checkpoint_is_being_written(step_s: float, previous: int) -> None:
    assert [steps_to_agreement(0.001, 1000, saving=saving) for saving in (False, True)] == [250, 50]
    assert steps_to_agreement(10.0, 1, saving=True) == 1
    assert 1 <= steps_to_agreement(step_s, previous) <= 2 * previous


# --- which ends of attempts count as interruptions ----------------------------------------------------------------


def failed(**fields: Any) -> dict[str, Any]:
    """One rank's failure, as a node agent journals it."""
    usual = {"rank": 0, "pid": 1, "exit_code": 1, "signal": None, "at": 1.0, "error": None, "last_lines": []}
    return {**usual, **fields}


COUNTED = {
    "node_fail": UNNOTICED, "lost": UNNOTICED, "hang": UNNOTICED, "preempted": ANNOUNCED, "timeout": ANNOUNCED,
    "completed": None, "cancelled": None, "preflight": None, "oom": None, "crash": None, "early": None,
    "upstream": None,
}  # fmt: skip


def test_the_cause_of_an_end_decides_whether_it_counts() -> None:
    assert {cause: interruption_kind(cause) for cause in CAUSES} == COUNTED
    assert interruption_kind(None) is None


@pytest.mark.parametrize(
    ("counted", "fields"),
    [
        (UNNOTICED, {"exit_code": None, "signal": "SIGKILL"}),
        (UNNOTICED, {"exit_code": None, "signal": "SIGBUS"}),
        (UNNOTICED, {"error": "RuntimeError: CUDA error: uncorrectable ECC error encountered"}),
        (UNNOTICED, {"error": "DistBackendError: NCCL error in: x.cpp:1, unhandled system error, NCCL version 2.21"}),
        (UNNOTICED, {"error": "OSError: [Errno 5] Input/output error: '/data/x'"}),
        (UNNOTICED, {"exit_code": None, "signal": "SIGABRT", "last_lines": [
            "[Rank 3] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=9)", "Aborted"]}),
        (UNNOTICED, {"last_lines": ["RuntimeError: [gloo] Connection reset by peer [10.0.0.1]:5"]}),
        # These are of the program itself.
        (None, {"error": "ValueError: loss is nan"}),
        (None, {"error": "torch.OutOfMemoryError: CUDA out of memory"}),
        (None, {"error": "DistBackendError: NCCL error: invalid usage"}),
        (None, {"exit_code": None, "signal": "SIGSEGV"}),
        (None, {"exit_code": 3, "last_lines": ["Traceback", "KeyError: 'lr'"]}),
        (None, {"last_lines": ["connection reset by peer", *["later"] * 8]}),
    ],
)  # fmt: skip
def test_a_crash_that_comes_from_outside_the_program_is_an_interruption(
    counted: str | None, fields: dict[str, Any]
) -> None:
    assert interruption_kind("crash", [failed(**fields)]) == counted


def test_the_rank_that_failed_first_decides() -> None:
    followed = failed(error="RuntimeError: Connection closed by peer")
    assert interruption_kind("crash", [failed(error="ValueError"), followed]) is None
    assert interruption_kind("crash", [followed, failed(error="ValueError")]) == UNNOTICED


def test_attempts_are_added_to_the_statistics() -> None:
    spans = ((100.0, "node_fail"), (50.0, "preempted"), (25.0, None), (-3.0, "completed"))
    before = InterruptionStats(uptime_s=10.0, interruptions=1, grace_s=5.0)
    stats = add_attempts(before, [AttemptSpan(*span) for span in spans])
    assert stats == InterruptionStats(uptime_s=185.0, interruptions=2, announced=1, grace_s=5.0)
