"""Runs whose nodes fail the preflight: why they ended, and who starts them again."""

from __future__ import annotations

import pytest
from helpers.simulated_run import SimulatedRun

WHY = "n1: clock: 5.003 s ahead of n0 (limit 1 s)"
AGAIN = f"{WHY}; starts again without n1"


def refused(
    sim: SimulatedRun, restart: int = 0, *, requeue: bool = True, others: bool = True, why: str = WHY
) -> SimulatedRun:
    """Two nodes, of which the second one failed the preflight; node 0 is about to put the job back."""
    sim.started(restart, 2)
    if requeue:
        sim.node("requeue", 0, restart, exclude=["n1"], why=why)
    sim.ended("preflight", 0, restart, reason=why, failed_at=sim.now, cascade=False)
    return sim.ended("preflight", 1, restart, reason=why, failed_at=sim.now, cascade=True) if others else sim


def state_of(sim: SimulatedRun) -> tuple[str, str]:
    return sim.run.state, sim.run.reason


# --- what the attempt says ------------------------------------------------------------------------------------------


def test_a_run_whose_preflight_failed_for_good_has_failed_with_node_and_check() -> None:
    sim = refused(SimulatedRun().submitted(), requeue=False)
    assert state_of(sim) == ("failed", WHY)
    assert (sim.newest.cause, sim.newest.restarted_by, sim.newest.settled) == ("preflight", None, True)
    assert sim.run.ended_at is not None


def test_a_job_that_was_killed_right_after_it_said_what_it_was_about_to_do_was_refused() -> None:
    sim = SimulatedRun().submitted().started(0, 2)
    sim.node("requeue", 0, 0, exclude=["n1"], why=WHY)
    assert state_of(sim) == ("requeued", AGAIN)
    sim.observed(sim.slurm("FAILED"))
    assert state_of(sim) == ("requeued", f"{WHY}; 'slurmtrain sync' or 'watch' starts it again without n1")
    assert sim.newest.cause == "preflight"


def test_a_job_that_could_not_be_put_back_says_why_until_slurm_says_that_it_is_over() -> None:
    sim = refused(SimulatedRun().submitted()).node("requeue_failed", 0, 0, reason="scontrol: no")
    state, reason = state_of(sim)
    assert state == "requeued"
    assert reason.startswith(f"{WHY}; its job could not be requeued (scontrol: no)")
    assert sim.newest.restarted_by == "slurm"
    sim.observed(sim.slurm("FAILED"))
    assert sim.newest.restarted_by == "sync"
    assert not sim.run.ended


def test_a_job_that_its_agent_could_not_put_back_and_slurm_did_simply_starts_again() -> None:
    sim = SimulatedRun().submitted().started(0)
    sim.node("requeue", 0, 0, cause="preempted", why="preempted by another").ended("preempted", signal="SIGTERM")
    sim.node("requeue_failed", 0, 0, reason="scontrol: Job is completing")
    assert "could not be requeued" in sim.run.reason
    sim.look(sim.queue(sim.slurm("PENDING", restart=1)))
    assert state_of(sim) == ("requeued", "preempted by another; starts again")


# --- what becomes of the job --------------------------------------------------------------------------------------


def test_the_next_start_goes_without_the_node_and_runs() -> None:
    sim = refused(SimulatedRun().submitted())
    sim.look(sim.queue(sim.slurm("PENDING", restart=1)))
    assert state_of(sim) == ("requeued", AGAIN)
    assert [(a.cause, a.restarted_by, a.without) for a in sim.run.attempts] == [
        ("preflight", None, ()),
        (None, None, ("n1",)),
    ]
    sim.started(1, 2)
    assert state_of(sim) == ("running", "")


def test_a_command_that_put_it_right_has_the_last_word_however_wrong_the_clock_of_the_node_is() -> None:
    sim = refused(SimulatedRun().submitted())
    sim.later(9000).node("requeue_failed", 0, 0, reason="scontrol: no")
    sim.later(-8000).write("journal/sync.jsonl", "requeue", job_id="7", restart=0, exclude=["n1"], why=WHY)
    assert sim.newest.requeue_problem == ""
    assert state_of(sim) == ("requeued", AGAIN)


# --- a person's cancel --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["before", "after"])
def test_a_cancel_wins_once_the_job_is_over(order: str) -> None:
    sim = SimulatedRun().submitted()
    sim = refused(sim.cancel()) if order == "before" else refused(sim).cancel()
    # Its job may be in the queue.
    assert (sim.run.state, sim.run.cancelled) == ("requeued", True)
    sim.observed(sim.slurm("COMPLETED"))
    assert state_of(sim) == ("cancelled", f"cancelled; before that, {WHY}")


# --- asking Slurm -------------------------------------------------------------------------------------------------


def test_a_run_that_starts_again_is_asked_about_until_it_does_and_no_more_once_it_is_over() -> None:
    from slurmtrain.slurm.scheduler import may_change

    sim = refused(SimulatedRun().submitted())
    assert may_change(sim.run)
    assert sim.look(sim.queue(sim.slurm("COMPLETING", restart=0))) == []
    observations = sim.look(sim.queue(sim.slurm("PENDING", restart=1)))
    assert [(observation.state, observation.restart) for observation in observations] == [("PENDING", 1)]
    over = refused(SimulatedRun().submitted())
    [observation] = over.look(over.queue(over.slurm("COMPLETED", restart=0)))
    assert (observation.state, observation.restart) == ("COMPLETED", 0)
    assert not may_change(over.run)
