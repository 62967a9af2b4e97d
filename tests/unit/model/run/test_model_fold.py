"""The state of a run from its events: whatever their order, whatever is missing."""

from __future__ import annotations

from helpers.journal_events import read_run
from helpers.local_runs import PROCESS, LocalRun
from helpers.simulated_run import SimulatedRun
from hypothesis import given
from hypothesis import strategies as st

from slurmtrain.model.run.events.base import AnyEvent
from slurmtrain.model.run.journal_lines import Progress
from slurmtrain.model.run.run import ENDED, RUN_STATES


def test_a_run_goes_from_created_over_pending_and_running_to_completed() -> None:
    empty = read_run("RUN", [], {})
    assert (empty.id, empty.name, empty.state, empty.attempts) == ("RUN", "RUN", "created", [])
    sim = LocalRun().created()
    assert sim.fold().state == "created"
    assert sim.submitted().fold().state == "pending"
    assert sim.started(nodes=2).fold().state == "running"
    assert sim.ended("completed", node=0).fold().state == "running"
    assert sim.ended("completed", node=1).fold().state == "completed"


def test_a_run_that_waits_on_its_machine_says_for_what() -> None:
    sim = LocalRun().created().submitted()
    sim.node("agent", node=0, nodes=1, host="n0", process=PROCESS, attempt=1).node("waiting", run="OTHER")
    assert (sim.fold().state, sim.fold().reason) == ("pending", "waits until run OTHER has ended")
    sim = LocalRun().created().submitted().started()
    sim.node("waiting_for_slot", count=2, gpus=1)
    assert sim.fold().state == "pending"
    assert sim.fold().reason == (
        "waits for its turn: up to 2 runs of its sweep run at once on this machine with 1 free GPU(s) each"
    )
    sim.node("waiting_for_slot", count=0, gpus=2)
    assert sim.fold().reason == "waits for its turn: it needs 2 free GPU(s) of this machine"


def test_the_facts_of_a_completed_run_are_all_there() -> None:
    sim = LocalRun().created().submitted().started().rank("total", total_steps=20).saved(20)
    run = sim.ended("completed").command("mlflow", mlflow_run_id="m", uri="u").fold(j1=20)
    assert (run.name, run.plan_hash, run.executor, run.git) == ("digits", "h", "local", {"commit": "c"})
    assert (run.step, run.total_steps, run.metrics, run.lost_steps) == (20, 20, {"loss": 2.0}, 0)
    assert run.mlflow_run_id == "m"
    assert run.checkpoint is not None
    assert run.checkpoint.step == 20
    [attempt] = run.attempts
    assert (attempt.number, attempt.job_id, attempt.restart, attempt.cause) == (1, "j1", 0, "completed")
    assert (attempt.master_addr, attempt.master_port, attempt.interfaces) == ("10.0.0.1", 2000, {"n0": "eth0"})
    assert run.submitted_at < run.started_at < run.ended_at  # type: ignore[operator]


def test_a_cancelled_run_is_cancelled_with_the_step_it_reached_unless_it_had_ended_otherwise() -> None:
    def cancelled() -> LocalRun:
        return LocalRun().created().submitted().started().command("cancel", by="me")

    run = cancelled().ended("cancelled").fold(j1=7)
    assert (run.state, run.reason, run.cancelled) == ("cancelled", "cancelled after step 7", True)
    assert cancelled().ended("completed").fold().state == "completed"
    sim = cancelled()
    assert sim.ended("crash", reason="boom", failed_at=sim.now - 1).fold().attempts[0].cause == "crash"
    unstarted = LocalRun().created().command("cancel", by="me").fold()
    assert (unstarted.state, unstarted.reason) == ("cancelled", "cancelled before it started")
    assert unstarted.ended_at is not None


def test_an_attempt_that_was_never_handed_over_is_none_unless_it_runs() -> None:
    sim = LocalRun().created().submitted().command("unstarted", job_id="j1", restart=0, reason="sbatch said no")
    run = sim.fold()
    assert (run.state, run.reason, run.attempts) == ("created", "sbatch said no", [])
    assert sim.started().fold().state == "running"


def test_a_job_that_found_its_run_cancelled_is_no_attempt_but_one_that_had_begun_is() -> None:
    late = LocalRun().created().submitted().command("cancel").node("surplus", why="the run is cancelled already")
    assert (late.fold().state, late.fold().attempts) == ("cancelled", [])
    both = LocalRun().created().submitted().started(nodes=2).command("cancel")
    both.node("surplus", 1, why="the run is cancelled already")
    assert (both.fold().state, len(both.fold().attempts)) == ("running", 1)


def test_a_run_whose_processes_are_gone_waits_for_sync_unless_none_of_them_ever_spoke() -> None:
    begun = LocalRun().created().submitted(requeue={}).started()
    assert not begun.fold().idle
    begun.command("observed", job_id="j1", restart=0, state="gone", last_seen=150.0, reason="killed")
    assert (begun.fold().state, begun.fold().idle) == ("requeued", True)
    setup = LocalRun().created().submitted(requeue={})
    setup.command("observed", job_id="j1", restart=0, state="gone", last_seen=150.0, reason="module: not found")
    assert (setup.fold().state, setup.fold().idle) == ("lost", True)
    assert setup.fold().reason == "module: not found; it failed before it finished a step and would do so again"


def test_lost_steps_are_those_since_the_last_checkpoint_which_the_next_attempt_does_again() -> None:
    without = LocalRun().created().submitted().started().ended("crash", failed_at=150.0)
    assert without.fold(j1=8).lost_steps == 8
    sim = LocalRun().created().submitted().started().saved(10)
    sim.command("observed", job_id="j1", restart=0, state="gone", last_seen=150.0, reason="gone")
    assert sim.fold(j1=13).lost_steps == 3
    sim.submitted(2).started(step=10).ended("completed")
    run = sim.fold(j1=13, j2=20)
    assert [attempt.lost_steps for attempt in run.attempts] == [3, 0]
    assert (run.lost_steps, run.step, run.attempts[1].first_step) == (3, 20, 10)


# --- any order, any subset --------------------------------------------------------------------------------------


def rich_history() -> list[AnyEvent]:
    sim = LocalRun().created().submitted().started(nodes=2).rank("total", total_steps=30).saved(5).saved(10)
    sim.rank("pruned", path="checkpoints/step-5").rank("interval", steps=3, seconds=1.0, why="auto")
    sim.rank("save_failed", step=11, reason="full", why="steps")
    sim.node("stopping", cause="preempted", why="SIGUSR2").rank("stopped", step=12).rank(
        "raised", type="E", message="m"
    )
    sim.ended("crash", node=1, reason="boom", failed_at=115.0, failures=[{"rank": 1}]).ended("crash", node=0)
    sim.command("observed", job_id="j1", restart=0, state="gone", last_seen=130.0, reason="gone", checkpoints=[
        {"step": 12, "path": "checkpoints/step-12", "bytes": 3, "saved_at": 140.0}])  # fmt: skip
    sim.submitted(2).command("unstarted", job_id="j2", restart=0, reason="refused")
    sim.submitted(3).node("waiting", run="OTHER").started(step=10)
    sim.rank("restored", step=10, path="checkpoints/step-10", bytes=10, seconds=0.5, saved_at=110.0)
    sim.rank("rejected", step=12, path="checkpoints/step-12", reason="hash", aside="checkpoints/damaged-12")
    sim.command("asked", request="r", by="me").rank("interval", seconds=2.0, why="auto").saved(5)
    sim.command("verified", path="checkpoints/step-10", step=10, reason=None)
    sim.command("verified", path="checkpoints/step-5", step=5, reason="truncated")
    sim.command("pruned", path="checkpoints/damaged-12", step=12, why="asked")
    sim.rank("save_failed", step=14, reason="full").node("found", path="/o/1", step=None, bytes=1, saved_at=1.0)
    sim.command("cancel", by="me").ended("cancelled").command("mlflow", mlflow_run_id="m", uri="u")
    sim.command("something_newer", surprise=[1])
    # Clocks of nodes differ: some facts carry the time of another one, or an earlier one.
    sim.write("attempts/j3.0/node-0.jsonl", "end", at=101.0, cause="completed", reason="")
    sim.write("attempts/j3.0/rank-1.jsonl", "session", at=102.0, step=11, world_size=2, device="cpu")
    return sim.events


EVENTS = rich_history()
PROGRESS = {"j1.0": Progress(13, 120.0, {"loss": 1.0}), "j3.0": Progress(15, 140.0, {"loss": 0.5, "lr": 0.1})}
subsets = st.lists(st.sampled_from(EVENTS), unique_by=id)


@given(subsets, st.sampled_from([PROGRESS, {}]))
def test_any_subset_of_facts_folds_into_a_run(events: list[AnyEvent], progress: dict[str, Progress]) -> None:
    run = read_run("RUN", events, progress)
    assert run.state in RUN_STATES
    assert [attempt.number for attempt in run.attempts] == list(range(1, len(run.attempts) + 1))
    for attempt in run.attempts:
        assert (attempt.state in ENDED) == (attempt.cause is not None)
        assert attempt.lost_steps is None or attempt.lost_steps >= 0
    assert run.ended == (run.state in ENDED)
    assert [attempt.restarted_by for attempt in run.attempts[:-1]] == [None] * len(run.attempts[:-1])
    assert run.newest is None or run.newest.restarted_by is None or run.state == "requeued"
    assert len({(one.path, one.saved_at) for one in run.checkpoints}) == len(run.checkpoints)
    assert len({one.path for one in run.on_disk}) == len(run.on_disk)
    assert run.checkpoint is None or (run.checkpoint.complete and run.checkpoint.on_disk)


# --- before training ----------------------------------------------------------------------------------------------

_ELECTION = {
    "networks": [{"name": "10.58.0.0/24", "interfaces": {"n0": "hsn0", "n1": "ib0"}, "proved": True, "problems": []}],
    "excluded": [],
    "elected": 0,
    "tests": 2,
}


def test_an_attempt_keeps_its_networks_its_clocks_and_its_checks_by_host() -> None:
    sim = SimulatedRun().submitted().started(0, 2)
    sim.node("election", 0, 0, **_ELECTION)
    for node, offset in ((0, 0.0), (1, 12.5)):
        sim.node("clock", node, 0, offset_ms=offset, bound_ms=0.1, samples=8, disciplined=True, source="chrony")
        finding = {"check": "disk", "status": "pass", "summary": "81 GB free", "evidence": {"free": 1}}
        sim.node("preflight", node, 0, status="pass", seconds=1.0, findings=[finding], blamed=False)
    attempt = sim.newest
    assert attempt.network == _ELECTION
    assert attempt.clock == {
        "n0": {"offset_ms": 0.0, "bound_ms": 0.1, "disciplined": True, "source": "chrony"},
        "n1": {"offset_ms": 12.5, "bound_ms": 0.1, "disciplined": True, "source": "chrony"},
    }
    checks = [{"check": "disk", "status": "pass", "summary": "81 GB free"}]
    assert attempt.checks == {"n0": checks, "n1": checks}


def test_a_run_that_pauses_says_what_for_until_it_goes_on() -> None:
    sim = LocalRun().created().submitted().started().node("paused", ranks=[0], step=4, activity="evaluation")
    assert sim.fold(j1=4).reason == "paused after step 4: evaluation"
    assert sim.node("resumed", seconds=80.0).fold(j1=4).reason == ""
    ended = sim.node("paused", ranks=[0]).ended("completed", node=0)
    assert "paused" not in ended.fold(j1=9).reason


def test_steps_that_were_read_from_a_scripts_output_count_as_those_of_a_session() -> None:
    sim = LocalRun().created().submitted()
    sim.node("agent", node=0, nodes=1, host="n0").node("workers", processes={})
    sim.write("attempts/j1.0/script.jsonl", "script_steps", step=0, total_steps=30)
    sim.write("attempts/j1.0/script.jsonl", "script_steps", last_step=17, total_steps=30)
    sim.node("restart", round=1, members=[0], cause="crash", why="it crashed")
    sim.node("workers", processes={})
    sim.write("attempts/j1.0/script.1.jsonl", "script_steps", step=10, total_steps=30)
    run = sim.fold(j1=12)
    [attempt] = run.attempts
    assert (run.step, run.total_steps, run.lost_steps) == (12, 30, 7)
    assert (attempt.first_step, attempt.round_step, attempt.last_step) == (0, 10, 12)


def test_what_is_guessed_of_the_output_is_shown_and_no_attempt_is_judged_by_it() -> None:
    def trained() -> LocalRun:
        sim = LocalRun().created().submitted()
        # Without a session.
        SimulatedRun.started(sim, submission=1, process=PROCESS)
        return sim

    def guessed(sim: LocalRun, *, counted: bool) -> LocalRun:
        return sim.write("attempts/j1.0/script.jsonl", "script_guess", counted=counted, total_steps=100)

    run = guessed(trained(), counted=False).ended("crash", reason="boom").fold(j1=40)
    assert (run.metrics_from, run.step, run.total_steps, run.metrics) == ("output", 40, 100, {"loss": 4.0})
    assert (run.lost_steps, run.attempts[0].last_step, run.attempts[0].lost_steps) == (None, None, None)
    # A number of lines is no step.
    run = guessed(trained(), counted=True).fold(j1=40)
    assert (run.metrics_from, run.step, run.metrics) == ("output", None, {"loss": 4.0})
    # A script that reports its progress says what counts.
    run = guessed(trained(), counted=False).rank("session", step=0).fold(j1=40)
    assert (run.metrics_from, run.step, run.attempts[0].last_step) == (None, 40, 40)
