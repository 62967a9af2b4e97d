"""Runs that were interrupted: who starts them again, when, and when nobody does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from helpers.simulated_run import BEGIN, SimulatedRun

from slurmtrain.model.experiment.sections import RequeueSpec, write_requeue
from slurmtrain.model.run.job_state import GONE

SYNC = "'slurmtrain sync' or 'watch' starts it again"
FAILED = {"rank": 0, "exit_code": 1, "signal": None, "error": "ValueError: 1", "last_lines": []}


def policy(**keys: Any) -> dict[str, Any]:
    return write_requeue(RequeueSpec(**keys))


def begun(steps: int = 5, nodes: int = 1, **keys: Any) -> SimulatedRun:
    """A run that has trained a while under a policy."""
    sim = SimulatedRun().submitted(requeue=policy(**keys)).started(nodes=nodes)
    return sim.reached(steps)


def crashed(sim: SimulatedRun, node: int = 0, restart: int = 0, **more: Any) -> SimulatedRun:
    fields = {"reason": "rank 0 exited with code 1", "failed_at": sim.now + 1, "failures": [FAILED], **more}
    return sim.ended("crash", node, restart, **fields)


def wanted_back(sim: SimulatedRun, cause: str = "crash", why: str = "it broke", **fields: Any) -> SimulatedRun:
    """An agent asks for its job to be put back into the queue."""
    return sim.node("requeue", **{"cause": cause, "why": why, "exclude": [], "delay_s": 0.0, **fields})


def preempted(sim: SimulatedRun, *, asks: bool = True) -> SimulatedRun:
    """Its agent saves, asks for the job back, and ends."""
    sim.saved(5)
    if asks:
        wanted_back(sim, "preempted", "preempted")
    return sim.ended("preempted", reason="preempted", signal="SIGTERM", sure=True, failed_at=1.0)


def given_up(sim: SimulatedRun) -> SimulatedRun:
    why = "it cannot start again: no nodes"
    return sim.write("journal/sync.jsonl", "requeue_failed", job_id="7", restart=0, reason=why)


def state_of(sim: SimulatedRun) -> tuple[str, str | None, str]:
    """State of the run, who starts it again, and why in words."""
    return sim.run.state, sim.newest.restarted_by, sim.run.reason


# --- who starts it again --------------------------------------------------------------------------------------------


def test_a_crash_is_slurms_to_start_again_as_long_as_its_job_may_be_in_the_queue_and_then_for_sync() -> None:
    sim = crashed(begun())
    state, by, reason = state_of(sim)
    assert (state, by) == ("requeued", "slurm")
    assert reason == "rank 0 exited with code 1; starts again, 30 s after it ended"
    assert not sim.run.ended
    sim.observed(sim.slurm("FAILED"))
    assert state_of(sim) == ("requeued", "sync", f"rank 0 exited with code 1; {SYNC}, 30 s after it ended")


@pytest.mark.parametrize("state", ["NODE_FAIL", "BOOT_FAIL", "PREEMPTED", GONE])
def test_what_the_cluster_ended_without_a_word_of_the_job_is_for_sync(state: str) -> None:
    sim = begun()
    sim.observed(sim.slurm(state))
    assert state_of(sim)[:2] == ("requeued", "sync")
    assert sim.newest.again_at is None
    assert sim.newest.settled


OFF = {"enabled": False}


@pytest.mark.parametrize(
    ("cause", "rules", "state", "why"),
    [
        ("oom", {}, "failed", "why; it ran out of memory and would do so again"),
        ("crash", {}, "failed", "why; it failed before it finished a step and would do so again"),
        *((cause, OFF, "failed", "why; requeue.enabled is false") for cause in ("crash", "hang", "node_fail", "oom")),
        ("lost", OFF, "lost", "why; requeue.enabled is false"),
        # Runs of a version without policies stay as they ended.
        *((cause, None, "failed", "why") for cause in ("crash", "hang", "node_fail")),
        ("completed", {}, "completed", ""),
    ],
)
def test_what_is_not_to_be_started_again_is_not_and_says_why(
    cause: str, rules: dict[str, Any] | None, state: str, why: str
) -> None:
    sim = SimulatedRun().submitted().started() if rules is None else begun(steps=0, **rules)
    sim.ended(cause, reason="why", failed_at=BEGIN)
    assert state_of(sim) == (state, None, why)
    assert sim.run.ended
    assert sim.newest.settled


@pytest.mark.parametrize("ends", ["crash", GONE])
def test_a_run_on_this_machine_is_started_again_by_sync(ends: str) -> None:
    sim = SimulatedRun(job="local-abc", executor="local").submitted(requeue=policy()).started().reached(5)
    assert state_of(sim)[:2] == ("running", None)
    if ends == GONE:
        sim.command("observed", job_id="local-abc", restart=0, source="host", state=GONE, reason="gone")
        assert state_of(sim) == ("requeued", "sync", f"gone after step 5; {SYNC}")
    else:
        assert state_of(crashed(sim))[:2] == ("requeued", "sync")


# --- what agents say ------------------------------------------------------------------------------------------------


def test_an_agent_that_puts_its_job_back_after_a_preemption_leaves_it_to_slurm() -> None:
    # Its last word is not needed.
    first = wanted_back(begun(), "node_fail", "n1 is gone")
    assert state_of(first) == ("requeued", "slurm", "n1 is gone; starts again")
    sim = preempted(begun())
    assert state_of(sim) == ("requeued", "slurm", "preempted after step 5; starts again")
    sim.look(sim.queue(sim.slurm("PENDING", restart=1)))
    assert (sim.run.state, sim.causes) == ("requeued", ["preempted", None])
    sim.started(1)
    assert (sim.run.state, sim.causes) == ("running", ["preempted", None])


@pytest.mark.parametrize("state", ["FAILED", "COMPLETED", "PREEMPTED", "TIMEOUT", "NODE_FAIL"])
def test_a_job_that_is_over_though_its_agent_wanted_it_back_is_for_sync(state: str) -> None:
    sim = wanted_back(begun(), delay_s=30.0)
    crashed(sim).observed(sim.slurm(state))
    assert state_of(sim)[:2] == ("requeued", "sync")
    assert sim.newest.cause == "crash"
    assert sim.newest.again_at is not None


@pytest.mark.parametrize(("end", "state"), [(crashed, "FAILED"), (preempted, "PREEMPTED")])
def test_a_run_that_a_command_gave_up_has_failed_and_says_why(
    end: Callable[[SimulatedRun], SimulatedRun], state: str
) -> None:
    sim = end(begun())
    given_up(sim.observed(sim.slurm(state)))
    assert state_of(sim)[:2] == ("failed", None)
    assert sim.run.reason.endswith("; it cannot start again: no nodes")
    assert sim.run.ended


# --- cancelled ------------------------------------------------------------------------------------------------------


def test_a_job_that_somebody_cancelled_while_it_ran_or_in_its_preemption_never_starts_again() -> None:
    # Also if the agent said no more than its end.
    for sim in (preempted(begun()), preempted(begun(), asks=False), begun().cancel().stopped()):
        sim.observed(sim.slurm("CANCELLED by 1000"))
        assert state_of(sim)[:2] == ("cancelled", None)


# --- what Slurm does by itself --------------------------------------------------------------------------------------


def test_failures_are_those_of_the_node_with_the_reason_whoever_spoke_first() -> None:
    cascade = {**FAILED, "rank": 1, "error": "RuntimeError: Connection reset by peer"}
    for sim in (begun(nodes=2), wanted_back(begun(nodes=2))):
        crashed(sim, 1, cascade=True, failures=[cascade])
        crashed(sim, 0)
        assert [failure["error"] for failure in sim.newest.failures] == ["ValueError: 1"]


# --- starts that never were one -------------------------------------------------------------------------------------


def test_a_job_that_a_command_ended_to_submit_another_is_for_sync() -> None:
    sim = crashed(wanted_back(begun()))
    sim.look(sim.queue(sim.slurm("PENDING", restart=1)))
    assert [attempt.key for attempt in sim.run.attempts] == ["7.0", "7.1"]
    sim.write("journal/sync.jsonl", "replaced", job_id="7", restart=1, why="Slurm holds its job")
    # What Slurm says of it afterwards changes nothing.
    for each in (sim, sim.observed(sim.slurm("CANCELLED"), restart=1)):
        assert [attempt.key for attempt in each.run.attempts] == ["7.0"]
        assert state_of(each)[:2] == ("requeued", "sync")


def test_a_job_whose_later_start_was_surplus_never_trains_the_run_again() -> None:
    sim = crashed(wanted_back(begun(), exclude=["n1"]))
    sim.look(sim.queue(sim.slurm("RUNNING", restart=1)))
    sim.node("surplus", 0, 1, why="the run continues with another job")
    assert [attempt.key for attempt in sim.run.attempts] == ["7.0"]
    assert state_of(sim)[:2] == ("requeued", "sync")
    over = begun().ended("completed").node("surplus", 0, 1, why="the run is completed already")
    over.look(over.queue(), over.accounting(over.slurm("REQUEUED"), over.slurm("COMPLETED")))
    assert ([attempt.key for attempt in over.run.attempts], over.run.state) == (["7.0"], "completed")


# --- rounds ---------------------------------------------------------------------------------------------------------


def restarted(
    sim: SimulatedRun, number: int = 1, cause: str = "crash", lost: tuple[int, ...] = (), **past: Any
) -> SimulatedRun:
    was = {"cause": cause, "began_at_step": 0, "committed": 0, "reached": 5, "where": f"w{number}", **past}
    return sim.node("restart", 0, 0, round=number, members=[0], cause=cause, why="w", lost=list(lost), past=was)


def test_what_a_lost_node_says_of_its_end_is_of_no_account() -> None:
    sim = restarted(begun(nodes=3), cause="node_fail", lost=(2,))
    sim.ended("node_fail", 2, 0, reason="node 0 no longer answers", failed_at=sim.now)
    assert sim.run.state == "running"
    sim.ended("completed", 0).ended("completed", 1)
    assert state_of(sim) == ("completed", None, "")
    assert restarted(begun(), cause="node_fail", lost=(0,)).run.state == "running"


def test_restarts_in_place_count_as_failures() -> None:
    sim = begun(max_failures=2)
    for number in (1, 2):
        restarted(sim.saved(number), number, committed=number)
        assert sim.run.state == "running"
    crashed(sim.saved(3))
    assert state_of(sim)[:2] == ("failed", None)
    assert "requeue.max_failures is 2" in sim.run.reason
    assert len(sim.newest.restarts) == 2


# --- budgets --------------------------------------------------------------------------------------------------------


def failing(times: int, by: str, **keys: Any) -> SimulatedRun:
    """So many submissions, each of which fails in a way of its own."""
    sim = SimulatedRun()
    for number in range(1, times + 1):
        sim.job = str(6 + number)
        sim.submitted(number, by="submit" if number == 1 else by, requeue=policy(**keys)).started(submission=number)
        sim.reached(10 * number).saved(10 * number)
        crashed(sim, failures=[{**FAILED, "error": "E" + "x" * number}])
        sim.observed(sim.slurm("FAILED"))
    return sim


def test_a_run_is_given_up_after_so_many_failures_since_a_person_has_started_it() -> None:
    assert state_of(failing(2, "sync", max_failures=2))[:2] == ("requeued", "sync")
    sim = failing(3, "sync", max_failures=2)
    assert state_of(sim)[:2] == ("failed", None)
    assert sim.run.reason.endswith("it failed three times, and requeue.max_failures is 2")
    assert state_of(failing(3, "resume", max_failures=2))[:2] == ("requeued", "sync")
