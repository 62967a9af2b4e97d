"""The verdict on what a fault did to a run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from helpers.journal_events import event as journal_event
from hypothesis import given
from hypothesis import strategies as st

from slurmtrain.model.run.events.base import AnyEvent
from slurmtrain.model.run.run import CAUSES, RUN_STATES, Attempt, Checkpoint, Run
from slurmtrain.plugins.drill.facts import (
    FAULTS,
    Baseline,
    CheckpointComparison,
    DrillFacts,
    FaultVerdict,
    InjectedFault,
    TensorDifference,
)
from slurmtrain.plugins.drill.judge import (
    AGENTS_IN_PLACE,
    AGENTS_REQUEUE,
    NOTICED_S,
    SLURM,
    judge_fault,
    not_hit_verdict,
    not_submitted_verdict,
)

HIT = 100.0
SAME = CheckpointComparison(identical=True, method="hashes")
OTHER = CheckpointComparison(identical=False, method="values", difference=0.25, max_abs=2.0, where="model.weight")


def attempt(number: int, job: str, restart: int = 0, **more: Any) -> Attempt:
    return Attempt(number=number, job_id=job, restart=restart, **{"state": "failed", **more})


def event(kind: str, at: float, source: str, **data: Any) -> AnyEvent:
    return journal_event(at, kind, data, source, 0)


def run_of(*attempts: Attempt, **more: Any) -> Run:
    fields: dict[str, Any] = {"state": "completed", "reason": "", "step": 50, **more}
    return Run(id="RUN", name="n-drill-x", executor="slurm", attempts=attempts, **fields)


BASELINE = Baseline(run=run_of(), seconds=20.0)


def preempted(**struck: Any) -> DrillFacts:
    """A run that was preempted at step 20, saved, and was put back by its agents."""
    first = attempt(1, "7", ended_at=HIT + 3, **{"cause": "preempted", "lost_steps": 0, **struck})
    second = attempt(2, "7", 1, state="completed", cause="completed", started_at=HIT + 10)
    return DrillFacts(
        run=run_of(first, second, checkpoints=[Checkpoint(20, "checkpoints/step-20", 1, HIT + 2, 1.0)]),
        injected=InjectedFault(fault="preempt", at=HIT, attempt="7.0", step=20, target="the agent"),
        events=[
            event("requeue", HIT + 2, "attempts/7.0/node-0.jsonl", cause="preempted"),
            event("session", HIT + 12, "attempts/7.1/rank-0.jsonl", step=0, world_size=2),
            event("restored", HIT + 13, "attempts/7.1/rank-0.jsonl", path="checkpoints/step-20", step=20, world_size=2),
        ],
        steps={"7.0": [(HIT - 1, 19), (HIT + 1, 20)], "7.1": [(HIT + 14, 21), (HIT + 15, 22)]},
        comparison=SAME,
        baseline=BASELINE,
        world_sizes={2},
    )


def problems(verdict: FaultVerdict) -> str:
    return "; ".join(problem.problem for problem in verdict.problems)


def test_a_preemption_that_cost_nothing_passes_with_its_times() -> None:
    verdict = judge_fault(preempted())
    assert verdict.passed
    assert (verdict.cause, verdict.restarted_by) == ("preempted", AGENTS_REQUEUE)
    assert (verdict.lost_steps, verdict.resumed_at) == (0, 20)
    assert (verdict.stopped_s, verdict.restarted_s, verdict.step_s) == (3, 10, 14)
    assert (verdict.attempts, verdict.restarts, verdict.state, verdict.notes) == (2, 0, "completed", ())


def test_a_new_job_was_started_by_whoever_submitted_it_and_one_that_no_agent_requeued_by_slurm() -> None:
    facts = preempted()
    assert judge_fault(replace(facts, events=facts.events[1:])).restarted_by == SLURM
    first, second = facts.run.attempts
    other = replace(second, job_id="8", restart=0, asked_by="sync", submitted_at=HIT + 5)
    verdict = judge_fault(replace(facts, run=run_of(first, other), events=[]))
    assert (verdict.restarted_by, verdict.restarted_s) == ("sync", 5)


@pytest.mark.parametrize(
    ("facts", "problem", "advice"),
    [
        (preempted(lost_steps=4), "4 steps were lost, though the stop was announced", "slurmtrain.session()"),
        (replace(preempted(), grace_s=2.0), "its ranks ended after 3 s instead of within 2 s", "GraceTime"),
        (preempted(cause="crash"), "the run reports the cause crash, not preempted", ""),
    ],
)
def test_what_an_announced_stop_has_cost_is_a_problem_with_advice(facts: DrillFacts, problem: str, advice: str) -> None:
    verdict = judge_fault(facts)
    assert problems(verdict) == problem
    assert advice in verdict.problems[0].advice


def test_resuming_from_an_older_checkpoint_than_the_newest_is_a_problem() -> None:
    facts = preempted()
    saved = [Checkpoint(step, f"checkpoints/step-{step}", 1, HIT - 60 + step, 1.0) for step in (10, 30)]
    verdict = judge_fault(replace(facts, run=replace(facts.run, checkpoints=saved)))
    assert problems(verdict) == "it resumed from step 20, though step 30 was saved"


def killed_rank() -> DrillFacts:
    """A rank was killed in the second round of the only attempt, and started again where it was."""
    restarts = [
        {"at": HIT - 50, "round": 1, "cause": "hang"},
        {"at": HIT + 0.5, "round": 2, "cause": "crash"},
    ]
    only = attempt(1, "7", state="completed", cause="completed", lost_steps=5, restarts=restarts, ended_at=HIT + 90)
    return DrillFacts(
        run=run_of(only, checkpoints=[Checkpoint(10, "checkpoints/step-10", 1, HIT - 5, 1.0)]),
        injected=InjectedFault(fault="rank", at=HIT, attempt="7.0", restarts=1, step=15),
        events=[
            event("session", HIT - 90, "attempts/7.0/rank-0.jsonl", step=0, world_size=2),
            event("session", HIT + 3, "attempts/7.0/rank-0.2.jsonl", step=0, world_size=2),
            event(
                "restored", HIT + 4, "attempts/7.0/rank-0.2.jsonl", path="checkpoints/step-10", step=10, world_size=2
            ),
        ],
        steps={"7.0": [(HIT - 1, 14), (HIT + 0.1, 15), (HIT + 5, 11)]},
        comparison=SAME,
        baseline=BASELINE,
    )


def test_a_restart_in_place_is_not_confused_with_earlier_restarts() -> None:
    verdict = judge_fault(killed_rank())
    assert verdict.passed
    assert (verdict.cause, verdict.restarted_by) == ("crash", AGENTS_IN_PLACE)
    assert (verdict.resumed_at, verdict.lost_steps) == (10, 5)
    assert (verdict.stopped_s, verdict.allowed_s, verdict.restarted_s, verdict.step_s) == (0.5, NOTICED_S, 0.5, 5)
    assert verdict.notes == ("it was interrupted once more: times and lost steps may not be due to the fault alone",)


def test_a_note_says_that_the_run_had_saved_nothing() -> None:
    facts = killed_rank()
    first = replace(facts.run.attempts[0], restarts=facts.run.attempts[0].restarts[1:])
    injected = replace(facts.injected, restarts=0)
    [note] = judge_fault(replace(facts, run=run_of(first), injected=injected)).notes
    assert note.startswith("it had saved nothing before the fault")


def test_a_run_that_nobody_restarted_is_a_problem_with_its_reason() -> None:
    facts = preempted()
    run = run_of(facts.run.attempts[0], state="failed", reason="requeue.enabled is false")
    verdict = judge_fault(replace(facts, run=run))
    assert problems(verdict) == "it was not restarted: requeue.enabled is false"
    assert (verdict.restarted_s, verdict.step_s) == (None, None)


@pytest.mark.parametrize(("noise", "advice"), [(None, "--twice"), (SAME, "its checkpoints lack some state")])
def test_a_difference_is_a_problem_unless_the_script_is_known_to_vary(
    noise: CheckpointComparison | None, advice: str
) -> None:
    verdict = judge_fault(replace(preempted(), comparison=OTHER, noise=noise))
    assert problems(verdict) == "its last checkpoint differs in model.weight by at most 0.25 (relative), 2 (absolute)"
    assert advice in verdict.problems[0].advice or advice in problems(verdict)


UNLIKE = CheckpointComparison(identical=False, method="files")


@pytest.mark.parametrize(
    ("comparison", "more", "words"),
    [
        (OTHER, {"noise": replace(OTHER, max_abs=2.0)}, "no more than that"),
        (OTHER, {"noise": replace(OTHER, max_abs=1.0)}, "more than that, which may still"),
        (UNLIKE, {"noise": UNLIKE}, "so only steps and completeness are compared"),
        (OTHER, {"world_sizes": {4}}, "the number of ranks was different"),
        (CheckpointComparison(identical=None, why="none is there"), {},
         "its last checkpoint cannot be compared: none is there"),
    ],
)  # fmt: skip
def test_a_difference_that_the_fault_need_not_have_made_is_a_note(
    comparison: CheckpointComparison, more: dict[str, Any], words: str
) -> None:
    verdict = judge_fault(replace(preempted(), comparison=comparison, **more))
    assert verdict.passed
    [note] = verdict.notes
    assert words in note
    varies = "the script is not deterministic: two undisturbed runs differ as well"
    assert (varies in note) == (comparison is OTHER and "noise" in more) or comparison is UNLIKE


def test_a_run_that_completed_at_an_earlier_step_is_a_problem() -> None:
    other = CheckpointComparison(identical=None, why="they are ckpt-100.pt and ckpt-28.pt", steps=(100, 28))
    verdict = judge_fault(replace(preempted(), comparison=other))
    assert problems(verdict) == "it completed at step 28, and the undisturbed run at step 100"
    facts = preempted()
    verdict = judge_fault(replace(facts, run=replace(facts.run, step=49)))
    assert problems(verdict) == "it completed at step 49, and the undisturbed run at step 50"


def test_a_hang_may_last_for_hang_after_and_the_time_to_end_the_ranks() -> None:
    facts = killed_rank()
    hang = replace(facts, injected=replace(facts.injected, fault="hang"))
    assert judge_fault(hang).allowed_s is None
    assert judge_fault(replace(hang, hang_after=20.0)).allowed_s == 50.0


def test_a_fault_that_a_run_was_too_short_for_was_not_tried() -> None:
    verdict = not_hit_verdict("rank", run_of())
    assert (verdict.result, verdict.passed, verdict.acceptable) == ("not tried", False, False)
    assert verdict.not_tried.startswith("it finished first")
    crashed = run_of(state="failed", reason="rank 0 exited with code 1")
    verdict = not_hit_verdict("rank", crashed)
    assert verdict.result == "failed"
    assert problems(verdict) == "it ended as failed before the fault: rank 0 exited with code 1"
    assert not_hit_verdict("rank", run_of(state="cancelled"), "srun: no").not_tried == "srun: no"
    verdict = not_submitted_verdict("rank", "sbatch did not answer")
    assert (verdict.result, verdict.not_tried) == ("not tried", "sbatch did not answer")
    assert (verdict.passed, verdict.to_dict()["run_id"]) == (False, None)


def test_a_run_that_completed_in_spite_of_the_fault_shows_nothing() -> None:
    only = attempt(1, "7", state="completed", cause="completed", ended_at=HIT + 1)
    verdict = judge_fault(replace(preempted(), run=run_of(only)))
    assert (verdict.result, verdict.not_tried) == ("not tried", "it finished before the fault had any effect")


def test_a_save_that_could_not_be_hit_does_not_fail_a_drill() -> None:
    for verdict in (
        not_hit_verdict("save", run_of()),
        judge_fault(replace(killed_rank(), injected=replace(killed_rank().injected, fault="save"))),
    ):
        assert (verdict.result, verdict.passed, verdict.acceptable) == ("not tried", False, True)


def test_a_hang_that_nothing_notices_is_a_problem_with_its_cure() -> None:
    facts = replace(
        killed_rank(),
        run=run_of(killed_rank().run.attempts[0], state="cancelled", step=None),
        baseline=Baseline(run=run_of(step=None)),
        injected=replace(killed_rank().injected, fault="hang"),
        ended_by_drill="nothing had ended its ranks 10 s after the fault",
    )
    verdict = judge_fault(facts)
    assert problems(verdict) == "a hang of this script would not be noticed: it reports no progress"
    assert "slurmtrain.progress(step)" in verdict.problems[0].advice
    stuck = judge_fault(replace(facts, baseline=BASELINE))
    assert problems(stuck) == "the drill has ended it: nothing had ended its ranks 10 s after the fault"


def test_a_fault_whose_moment_only_output_told_has_a_note() -> None:
    facts = killed_rank()
    verdict = judge_fault(replace(facts, injected=replace(facts.injected, moment="after line 3 of its output")))
    assert any("whether it trained by then is unknown" in note for note in verdict.notes)


def test_a_comparison_describes_itself() -> None:
    assert SAME.describe() == "is bit-identical"
    assert CheckpointComparison(identical=False, method="files").describe() == "differs"
    two = replace(
        OTHER, differing=[TensorDifference("model.weight", 2.0), TensorDifference("model.bias", 1.0)], count=2
    )
    assert two.describe() == "differs in model.weight and 1 more by at most 0.25 (relative), 2 (absolute)"


TIMES = st.floats(min_value=0, max_value=1e4)


@given(
    fault=st.sampled_from(sorted(FAULTS)),
    state=st.sampled_from(RUN_STATES),
    causes=st.lists(st.sampled_from((*CAUSES, None)), max_size=3),
    ends=st.lists(st.none() | TIMES, min_size=3, max_size=3),
    lost=st.none() | st.integers(0, 9),
    identical=st.sampled_from([True, False, None]),
    steps=st.lists(st.tuples(TIMES, st.integers(0, 99)), max_size=5),
)
def test_a_run_that_has_not_completed_or_lost_announced_steps_never_passes(
    fault: str, state: str, causes: list[str | None], ends: list[float | None], lost: int | None,
    identical: bool | None, steps: list[tuple[float, int]],
) -> None:  # fmt: skip
    attempts = [
        attempt(index + 1, "7", index, cause=cause, ended_at=ends[index], started_at=ends[index], lost_steps=lost)
        for index, cause in enumerate(causes)
    ]
    injected = InjectedFault(fault=fault, at=HIT, attempt="7.0")
    verdict = judge_fault(
        DrillFacts(
            run=run_of(*attempts, state=state),
            injected=injected,
            events=[],
            steps={"7.1": steps},
            comparison=CheckpointComparison(identical=identical),
            baseline=BASELINE,
        )
    )
    if state != "completed" or len(attempts) < 2 or (lost and FAULTS[fault].announced):
        assert not verdict.passed
    assert all(value is None or value >= 0 for value in (verdict.stopped_s, verdict.restarted_s, verdict.step_s))
    assert verdict.to_dict()["passed"] == verdict.passed
