"""Why an attempt of a job of Slurm's ended: what its nodes said and what Slurm says, merged."""

from __future__ import annotations

from dataclasses import replace

import pytest
from helpers.simulated_run import LIMIT_S, SimulatedRun

from slurmtrain.model.run.job_state import ABSENT, CAUSE_OF_STATE, GONE, HELD, is_final

# --- states of Slurm's ------------------------------------------------------------------------------------------


def test_a_job_in_a_state_that_is_not_known_to_be_final_is_a_live_one() -> None:
    live = ["", "SOMETHING_NEW", "COMPLETING", "RUNNING", "PENDING", "SUSPENDED", ABSENT, *HELD]
    assert not any(map(is_final, live))
    assert all(map(is_final, [*CAUSE_OF_STATE, "CANCELLED by 1001", GONE]))


# --- what nobody but Slurm says ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("state", "cause", "reason"),
    [
        ("BOOT_FAIL", "node_fail", "a node could not be started"),
        ("CANCELLED by 1001", "cancelled", "cancelled in Slurm"),
        ("DEADLINE", "timeout", "it missed its deadline"),
        ("LAUNCH_FAILED", "node_fail", "Slurm could not launch it"),
        ("NODE_FAIL", "node_fail", "a node failed (n0)"),
        ("OUT_OF_MEMORY", "oom", "it used more memory than it had requested"),
        ("PREEMPTED", "preempted", "preempted by a job of higher priority"),
        ("RECONFIG_FAIL", "node_fail", "the nodes could not be reconfigured"),
        ("REQUEUED", "preempted", "requeued"),
        ("REVOKED", "cancelled", "revoked by its cluster"),
        ("COMPLETED", "lost", "Slurm says that the job completed, but the job did not record that"),
        ("FAILED with signal 9", "crash", "Slurm says FAILED with signal 9"),
        ("FAILED with exit code 3", "crash", "Slurm says FAILED with exit code 3"),
    ],
)
@pytest.mark.parametrize("spoke", [True, False])
def test_an_attempt_that_said_nothing_of_its_end_ended_for_what_slurm_says(
    state: str, cause: str, reason: str, spoke: bool
) -> None:
    sim = SimulatedRun().submitted()
    if spoke:
        sim.started()
        sim.steps["7.0"] = 12
    state, _, code = state.partition(" with ")
    fields = {code.rpartition(" ")[0].replace(" ", "_"): int(code.rpartition(" ")[2])} if code else {}
    sim.later(200).observed(sim.slurm(state, **fields))
    attempt = sim.newest
    at_step = " after step 12" if spoke else ""
    assert (attempt.cause, attempt.reason, attempt.confirmed) == (cause, reason + at_step, True)
    assert attempt.ended_at == sim.now - 1


def test_slurms_word_goes_before_nothing_being_left_in_whatever_order_they_come() -> None:
    gone = {"job_id": "7", "restart": 0, "state": GONE, "reason": "nobody knows"}
    for first in (True, False):
        sim = SimulatedRun().submitted().started()
        if first:
            sim.command("observed", **gone)
        sim.observed(sim.slurm("OUT_OF_MEMORY"))
        if not first:
            sim.command("observed", **gone)
        assert sim.causes == ["oom"]


# --- time-outs --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lasted", "cause", "reason"),
    [
        (LIMIT_S, "timeout", "the time limit was reached"),
        (LIMIT_S - 30, "timeout", "the time limit was reached"),
        # The job had left in its grace.
        (600.0, "preempted", "preempted by a job of higher priority"),
    ],
)
def test_a_time_out_near_the_limit_is_one_and_long_before_it_was_a_preemption(
    lasted: float, cause: str, reason: str
) -> None:
    sim = SimulatedRun().submitted().started().later(LIMIT_S).stopped()
    sim.observed(sim.slurm("TIMEOUT", lasted=lasted))
    assert (sim.newest.cause, sim.newest.reason) == (cause, reason)


# --- what a node says -------------------------------------------------------------------------------------------


def test_a_node_that_was_asked_to_stop_does_not_know_why_until_slurm_says_so() -> None:
    sim = SimulatedRun().submitted().started().stopped()
    assert (sim.run.state, sim.newest.cause) == ("running", None)
    assert sim.run.reason == "stopped by SIGTERM; Slurm has not said why yet"
    sim.observed(sim.slurm("PREEMPTED"))
    attempt = sim.newest
    assert (attempt.cause, attempt.reason, attempt.confirmed) == (
        "preempted", "preempted by a job of higher priority", True,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("state", "cause"),
    [
        ("CANCELLED by 0", "cancelled"),
        ("NODE_FAIL", "node_fail"),
        ("OUT_OF_MEMORY", "oom"),
        ("REQUEUED", "preempted"),
        ("DEADLINE", "timeout"),
        ("FAILED", "preempted"),
        ("COMPLETED", "preempted"),
        (GONE, "preempted"),
    ],
)
def test_slurm_says_why_a_node_was_asked_to_stop(state: str, cause: str) -> None:
    sim = SimulatedRun().submitted().started().stopped()
    sim.observed(sim.slurm(state))
    assert (sim.newest.cause, sim.newest.confirmed) == (cause, True)


def test_a_pack_that_ran_out_of_memory_says_nothing_about_each_of_its_runs() -> None:
    pack = {"runs": 2, "share_gpu": False}
    for sim, cause in (
        (SimulatedRun().submitted(pack=pack).started(), "lost"),
        (SimulatedRun().submitted(pack=pack).started().stopped(), "preempted"),
        (SimulatedRun().submitted(pack=pack).started().ended("oom", reason="rank 0 was killed for memory"), "oom"),
        (SimulatedRun().submitted(pack=pack).started().ended("completed"), "completed"),
    ):
        assert sim.observed(sim.slurm("OUT_OF_MEMORY")).causes == [cause]


@pytest.mark.parametrize("state", [*CAUSE_OF_STATE, GONE])
def test_a_genuine_crash_stays_one_whatever_slurm_says(state: str) -> None:
    sim = (
        SimulatedRun()
        .submitted()
        .started()
        .ended("crash", reason="rank 0: boom", failed_at=1005.0, failures=[{"rank": 0}])
    )
    assert sim.newest.confirmed
    sim.observed(sim.slurm(state))
    assert (sim.newest.cause, sim.newest.reason) == ("crash", "rank 0: boom")
    assert sim.newest.failures == ({"rank": 0},)


def test_a_rank_that_was_killed_ran_out_of_memory_if_slurm_says_so() -> None:
    killed = {"rank": 0, "signal": "SIGKILL", "exit_code": None}
    for failure, cause in (
        (killed, "oom"),
        ({**killed, "signal": None, "exit_code": 137}, "oom"),
        ({"rank": 0}, "crash"),
    ):
        sim = SimulatedRun().submitted().started().ended("crash", reason="SIGKILL", failed_at=1.0, failures=[failure])
        assert sim.newest.confirmed == (cause == "crash")
        assert sim.observed(sim.slurm("OUT_OF_MEMORY")).causes == [cause]
    killed_by_a_person = SimulatedRun().submitted().started().ended("crash", reason="SIGKILL", failures=[killed])
    assert killed_by_a_person.observed(killed_by_a_person.slurm("FAILED")).causes == ["crash"]


def test_a_crash_that_only_followed_from_a_node_failure_is_that_failure() -> None:
    sim = SimulatedRun().submitted().started(nodes=2)
    sim.ended("crash", 0, reason="connection closed by peer", cascade=True, failed_at=1005.0, failures=[{"rank": 0}])
    assert not sim.run.ended
    sim.observed(sim.slurm("NODE_FAIL", nodes="n1"))
    assert (sim.newest.cause, sim.newest.reason) == ("node_fail", "a node failed (n1)")
    assert sim.newest.failures == ({"rank": 0},)


def test_a_crash_that_only_followed_is_still_a_crash_where_slurm_knows_of_nothing_else() -> None:
    sim = SimulatedRun().submitted().started()
    sim.ended("crash", reason="connection closed by peer", cascade=True, failed_at=1005.0)
    assert (sim.newest.cause, sim.newest.confirmed) == ("crash", False)
    sim.observed(sim.slurm("FAILED", exit_code=1))
    assert (sim.newest.cause, sim.newest.reason, sim.newest.confirmed) == (
        "crash", "connection closed by peer", True,
    )  # fmt: skip


def test_the_node_that_failed_by_itself_is_to_blame_before_one_that_followed_earlier() -> None:
    sim = SimulatedRun().submitted().started(nodes=2)
    sim.ended("crash", 0, reason="follows", cascade=True, failed_at=1004.0)
    sim.ended("crash", 1, reason="is the root", failed_at=1006.0)
    assert sim.newest.reason == "is the root"


@pytest.mark.parametrize("state", ["TIMEOUT", "PREEMPTED", "CANCELLED by 0", "FAILED", "NODE_FAIL"])
def test_a_job_that_completed_in_its_grace_has_completed_whatever_slurm_says(state: str) -> None:
    sim = SimulatedRun().submitted().started(nodes=2).ended("completed", 0).ended("completed", 1)
    before = sim.newest
    assert (before.cause, before.confirmed) == ("completed", True)
    sim.observed(sim.slurm(state))
    # When it left the queue, Slurm knows better.
    assert replace(sim.newest, spent=before.spent) == before


def test_a_job_one_of_whose_nodes_kept_silent_ended_as_slurm_says() -> None:
    for state, cause in (("COMPLETED", "completed"), ("NODE_FAIL", "node_fail"), (GONE, "lost")):
        sim = SimulatedRun().submitted().started(nodes=2).ended("completed", 0)
        sim.observed(sim.slurm(state))
        assert sim.causes == [cause]
    sim = SimulatedRun().submitted().started(nodes=2).stopped(1)
    assert not sim.run.ended
    assert sim.observed(sim.slurm("NODE_FAIL")).causes == ["node_fail"]


def test_slurms_completed_does_not_stand_in_for_a_node_that_was_asked_to_stop() -> None:
    sim = SimulatedRun().submitted().started(nodes=2).node("stopping", cause="preempted", why="stopped by SIGTERM")
    sim.ended("completed", 1).observed(sim.slurm("COMPLETED"))
    assert sim.causes == ["lost"]


def test_a_stop_of_an_earlier_round_does_not_count_against_slurms_completed() -> None:
    sim = SimulatedRun().submitted().started(nodes=2).node("stopping", cause="crash", why="rank 0 exited with code 1")
    sim.node("restart", round=1, members=[0, 1]).ended("completed", 1).observed(sim.slurm("COMPLETED"))
    assert sim.causes == ["completed"]


def test_an_attempt_of_which_nothing_is_left_is_lost() -> None:
    sim = SimulatedRun().submitted().started()
    sim.command("observed", job_id="7", restart=0, state=GONE, reason="nobody knows", last_seen=1003.0)
    assert (sim.newest.cause, sim.newest.reason, sim.newest.ended_at) == ("lost", "nobody knows", 1003.0)


# --- cancels ----------------------------------------------------------------------------------------------------


def test_a_job_that_a_person_cancelled_was_cancelled() -> None:
    sim = SimulatedRun().submitted().started().cancel().stopped()
    assert (sim.newest.cause, sim.newest.reason, sim.newest.confirmed) == ("cancelled", "cancelled", True)
    sim.observed(sim.slurm("CANCELLED by 0"))
    assert (sim.newest.cause, sim.newest.reason) == ("cancelled", "cancelled")


@pytest.mark.parametrize(
    ("state", "cause"), [("NODE_FAIL", "node_fail"), ("FAILED", "crash"), ("PREEMPTED", "preempted")]
)
def test_what_slurm_saw_before_a_person_cancelled_is_why_it_ended(state: str, cause: str) -> None:
    sim = SimulatedRun().submitted().started().later(200)
    earlier = sim.slurm(state)
    sim.later(50).cancel().observed(earlier)
    assert sim.causes == [cause]


def test_a_job_that_ended_in_the_second_in_which_a_person_cancelled_it_was_cancelled() -> None:
    sim = SimulatedRun().submitted().later(0.7).cancel()
    assert sim.now % 1 > 0.5
    sim.observed(sim.slurm("CANCELLED by 0", starts_at=None, ends_at=float(int(sim.now))))
    assert (sim.newest.cause, sim.newest.reason) == ("cancelled", "cancelled")


@pytest.mark.parametrize("state", ["CANCELLED by 0", "COMPLETED", "FAILED", "TIMEOUT", "crash", GONE])
def test_what_happened_after_a_person_cancelled_followed_from_it(state: str) -> None:
    sim = SimulatedRun().submitted().started().cancel().later(50)
    if state == "crash":
        sim.ended("crash", reason="killed", failed_at=sim.now + 3)
    elif state == GONE:
        sim.command("observed", job_id="7", restart=0, state=GONE, reason="nobody knows", last_seen=1003.0)
    else:
        sim.observed(sim.slurm(state))
    assert (sim.causes, sim.run.state) == (["cancelled"], "cancelled")


# --- jobs that Slurm started again ------------------------------------------------------------------------------


def test_an_attempt_whose_job_began_again_was_preempted_if_it_was_asked_to_stop_and_else_as_it_said() -> None:
    sim = SimulatedRun().submitted().started().stopped().later(60).started(1)
    assert sim.causes == ["preempted", None]
    assert (sim.run.state, sim.newest.restart, sim.newest.number) == ("running", 1, 2)
    crashed = SimulatedRun().submitted().started().ended("crash", reason="boom", failed_at=1005.0).started(1)
    assert crashed.causes == ["crash", None]


def test_an_attempt_whose_job_began_again_without_a_word_of_it_is_lost_until_slurm_says_more() -> None:
    sim = SimulatedRun().submitted().started(nodes=2).later(60).started(1, nodes=2)
    assert sim.causes == ["lost", None]
    assert sim.run.attempts[0].reason == "it ended without reporting a cause, and Slurm started it again"
    sim.observed(sim.slurm("NODE_FAIL"))
    assert sim.causes == ["node_fail", None]
