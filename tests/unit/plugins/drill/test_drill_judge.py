"""The verdict on what a fault did to a run, and what it shows about its script."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers.journal_events import event as journal_event
from hypothesis import given
from hypothesis import strategies as st

from slurmtrain.model.run.events.base import AnyEvent
from slurmtrain.model.run.run import CAUSES, RUN_STATES, Attempt, Checkpoint, Run
from slurmtrain.plugins.drill.facts import (
    FAULTS,
    Aftermath,
    Baseline,
    CheckpointComparison,
    DrillFacts,
    FaultVerdict,
    InjectedFault,
)
from slurmtrain.plugins.drill.judge import (
    AGENTS_IN_PLACE,
    AGENTS_REQUEUE,
    NOTICED_S,
    Findings,
    judge_baseline,
    judge_fault,
    judge_script,
    not_hit_verdict,
    not_submitted_verdict,
)
from slurmtrain.runtime.checkpoint.external import ExternalCheckpoint

HIT = 100.0
SAME = CheckpointComparison(identical=True, method="hashes")
OTHER = CheckpointComparison(identical=False, method="values", difference=0.25, max_abs=2.0, where="model.weight")
UNLIKE = CheckpointComparison(identical=False, method="files")


def attempt(number: int, restart: int = 0, job: str = "7", **more: Any) -> Attempt:
    return Attempt(number=number, job_id=job, restart=restart, **{"state": "failed", **more})


def event(kind: str, at: float, source: str, **data: Any) -> AnyEvent:
    return journal_event(at, kind, data, f"attempts/{source}.jsonl", 0)


def run_of(*attempts: Attempt, **more: Any) -> Run:
    fields: dict[str, Any] = {"state": "completed", "reason": "", "step": 50, **more}
    return Run(id="RUN", name="n-drill-x", executor="slurm", attempts=attempts, **fields)


def saved(step: int, at: float) -> Checkpoint:
    return Checkpoint(step, f"checkpoints/step-{step}", 1, at, 1.0)


BASELINE = Baseline(run=run_of(), seconds=20.0)


def preempted(**struck: Any) -> DrillFacts:
    """A run that was preempted at step 20, saved, and was put back by its agents."""
    first = attempt(1, ended_at=HIT + 3, **{"cause": "preempted", "lost_steps": 0, **struck})
    second = attempt(2, 1, state="completed", cause="completed", started_at=HIT + 10)
    return DrillFacts(
        run=run_of(first, second, checkpoints=[saved(20, HIT + 2)]),
        injected=InjectedFault(fault="preempt", at=HIT, attempt="7.0", step=20, target="the agent"),
        events=[
            event("requeue", HIT + 2, "7.0/node-0", cause="preempted"),
            event("session", HIT + 12, "7.1/rank-0", step=0, world_size=2),
            event("restored", HIT + 13, "7.1/rank-0", path="checkpoints/step-20", step=20, world_size=2),
        ],
        steps={"7.0": [(HIT - 1, 19), (HIT + 1, 20)], "7.1": [(HIT + 14, 21), (HIT + 15, 22)]},
        comparison=SAME,
        baseline=BASELINE,
        world_sizes={2},
    )


def killed_rank(**injected: Any) -> DrillFacts:
    """A rank was killed in the second round of the only attempt, and started again where it was."""
    restarts = [{"at": HIT - 50, "round": 1, "cause": "hang"}, {"at": HIT + 0.5, "round": 2, "cause": "crash"}]
    only = attempt(1, state="completed", cause="completed", lost_steps=5, restarts=restarts, ended_at=HIT + 90)
    fault = {"fault": "rank", "at": HIT, "attempt": "7.0", "restarts": 1, "step": 15, **injected}
    return DrillFacts(
        run=run_of(only, checkpoints=[saved(10, HIT - 5)]),
        injected=InjectedFault(**fault),
        events=[
            event("session", HIT - 90, "7.0/rank-0", step=0, world_size=2),
            event("session", HIT + 3, "7.0/rank-0.2", step=0, world_size=2),
            event("restored", HIT + 4, "7.0/rank-0.2", path="checkpoints/step-10", step=10, world_size=2),
        ],
        steps={"7.0": [(HIT - 1, 14), (HIT + 0.1, 15), (HIT + 5, 11)]},
        comparison=SAME,
        baseline=BASELINE,
    )


def problems(judged: FaultVerdict | Findings) -> str:
    return "; ".join(problem.problem for problem in judged.problems)


def test_a_preemption_that_cost_nothing_passes_with_its_times() -> None:
    verdict = judge_fault(preempted())
    assert verdict.passed
    assert (verdict.cause, verdict.restarted_by) == ("preempted", AGENTS_REQUEUE)
    assert (verdict.lost_steps, verdict.resumed_at) == (0, 20)
    assert (verdict.stopped_s, verdict.restarted_s, verdict.step_s) == (3, 10, 14)
    assert (verdict.attempts, verdict.restarts, verdict.state, verdict.notes) == (2, 0, "completed", ())


def test_a_restart_in_place_is_not_confused_with_earlier_restarts() -> None:
    verdict = judge_fault(killed_rank())
    assert verdict.passed
    assert (verdict.cause, verdict.restarted_by) == ("crash", AGENTS_IN_PLACE)
    assert (verdict.resumed_at, verdict.lost_steps) == (10, 5)
    assert (verdict.stopped_s, verdict.allowed_s, verdict.restarted_s, verdict.step_s) == (0.5, NOTICED_S, 0.5, 5)
    assert verdict.notes == ("it was interrupted once more: times and lost steps may not be due to the fault alone",)


def with_run(facts: DrillFacts, *attempts: Attempt, **more: Any) -> DrillFacts:
    return replace(facts, run=replace(facts.run, **({"attempts": attempts} if attempts else {}), **more))


@pytest.mark.parametrize(
    ("facts", "problem", "advice"),
    [
        (preempted(lost_steps=4), "4 steps were lost, although the stop was announced", "slurmtrain.session()"),
        (replace(preempted(), grace_s=2.0), "its ranks ended after 3 s instead of within 2 s", "GraceTime"),
        (preempted(cause="crash"), "the run reports the cause crash, not preempted", "repeat the drill"),
        (with_run(preempted(), checkpoints=[saved(step, HIT - 60 + step) for step in (10, 30)]),
         "it resumed from step 20, although step 30 was saved", "'slurmtrain verify RUN'"),
        (with_run(preempted(), preempted().run.attempts[0], state="failed", reason="requeue.enabled is false"),
         "it was not restarted: requeue.enabled is false", "docs/requeue.md"),
        (with_run(preempted(), state="failed", reason="rank 0 died"), "it ended as failed: rank 0 died", "why"),
        (replace(preempted(), comparison=CheckpointComparison(identical=None, why="other steps", steps=(100, 28))),
         "it completed at step 28, but the undisturbed run at step 100", "exit with 75"),
        (with_run(preempted(), step=49), "it completed at step 49, but the undisturbed run at step 50", "exit with 75"),
        (replace(preempted(), comparison=OTHER),
         "its last checkpoint differs in model.weight by at most 0.25 (relative), 2 (absolute)", "--twice"),
        (replace(preempted(), comparison=OTHER, noise=SAME),
         "its last checkpoint differs in model.weight by at most 0.25 (relative), 2 (absolute)",
         "its checkpoints lack some state"),
        # The drill has ended it.
        (replace(killed_rank(fault="hang"), baseline=Baseline(run=run_of(step=None)), ended_by_drill="nothing moved"),
         "nobody would notice a hang of this script: it reports no progress", "slurmtrain.progress(step)"),
        (replace(killed_rank(fault="hang"), ended_by_drill="nothing moved"),
         "the drill has ended it: nothing moved", "'slurmtrain logs RUN'"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_run_is_a_problem_with_advice(facts: DrillFacts, problem: str, advice: str) -> None:
    verdict = judge_fault(facts)
    assert (problems(verdict), verdict.result) == (problem, "failed")
    assert advice in verdict.problems[0].advice


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
    assert ("the script is not deterministic: two undisturbed runs differ as well" in note) == ("noise" in more)


def test_notes_say_what_makes_a_verdict_doubtful() -> None:
    facts = killed_rank(restarts=0)
    first = replace(facts.run.attempts[0], restarts=facts.run.attempts[0].restarts[1:])
    [note] = judge_fault(replace(facts, run=run_of(first))).notes
    assert note.startswith("it had saved nothing before the fault")
    notes = judge_fault(killed_rank(moment="after line 3 of its output")).notes
    assert any("unknown whether it was training by then" in note for note in notes)


def test_a_fault_that_a_run_was_too_short_for_was_not_tried() -> None:
    verdict = not_hit_verdict("rank", run_of())
    assert (verdict.result, verdict.passed, verdict.acceptable) == ("not tried", False, False)
    assert verdict.not_tried.startswith("it finished first")
    verdict = not_hit_verdict("rank", run_of(state="failed", reason="rank 0 exited with code 1"))
    assert verdict.result == "failed"
    assert problems(verdict) == "it ended as failed before the fault: rank 0 exited with code 1"
    assert not_hit_verdict("rank", run_of(state="cancelled"), "srun: no").not_tried == "srun: no"
    verdict = not_submitted_verdict("rank", "sbatch did not answer")
    assert (verdict.result, verdict.not_tried) == ("not tried", "sbatch did not answer")
    assert (verdict.passed, verdict.to_dict()["run_id"]) == (False, None)
    only = attempt(1, state="completed", cause="completed", ended_at=HIT + 1)
    verdict = judge_fault(with_run(preempted(), only))
    assert (verdict.result, verdict.not_tried) == ("not tried", "it finished before the fault had any effect")


@pytest.mark.parametrize("verdict", [not_hit_verdict("save", run_of()), judge_fault(killed_rank(fault="save"))])
def test_a_save_that_could_not_be_hit_does_not_fail_a_drill(verdict: FaultVerdict) -> None:
    assert (verdict.result, verdict.passed, verdict.acceptable) == ("not tried", False, True)


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
        attempt(index + 1, index, cause=cause, ended_at=ends[index], started_at=ends[index], lost_steps=lost)
        for index, cause in enumerate(causes)
    ]
    facts = DrillFacts(
        run=run_of(*attempts, state=state),
        injected=InjectedFault(fault=fault, at=HIT, attempt="7.0"),
        events=[],
        steps={"7.1": steps},
        comparison=CheckpointComparison(identical=identical),
        baseline=BASELINE,
    )
    verdict = judge_fault(facts)
    if state != "completed" or len(attempts) < 2 or (lost and FAULTS[fault].announced):
        assert not verdict.passed
    assert all(value is None or value >= 0 for value in (verdict.stopped_s, verdict.restarted_s, verdict.step_s))
    assert verdict.to_dict()["passed"] == verdict.passed


# --- scripts that do not use slurmtrain -------------------------------------------------------------------------------

PATTERN = "{checkpoint_dir}/ckpt-*.pt"


def save(step: int | None, at: float, name: str = "") -> ExternalCheckpoint:
    path = Path("/c") / (name or f"ckpt-{step}.pt")
    return ExternalCheckpoint(path=path, format="torch", step=step, bytes=1, saved_at=at)


def plain(saves: list[ExternalCheckpoint]) -> Baseline:
    return Baseline(run=run_of(step=None), saves=saves, step_source="which is in its name")


BEFORE = [save(5, HIT - 2), save(10, HIT - 1)]
NAMELESS = [save(None, HIT + at, "last.pt") for at in (-2, 20)]


def script(fault: str = "preempt", half_written: tuple[str, ...] = (), **after: Any) -> DrillFacts:
    """A script that had saved twice when it was struck, and saves again after it was started again."""
    defaults = {"saves": [*BEFORE, save(15, HIT + 20)], "resume_from": "/c/ckpt-10.pt", "resumed_at": HIT + 10}
    return DrillFacts(
        run=run_of(step=None),
        injected=InjectedFault(fault=fault, at=HIT, attempt="7.0", half_written=half_written),
        events=[],
        steps={},
        comparison=SAME,
        baseline=plain([save(step, step) for step in (5, 10, 15)]),
        aftermath=Aftermath(**{**defaults, **after}),
    )


def test_a_script_that_saves_on_the_signal_and_resumes_has_no_problem() -> None:
    after = [*BEFORE, save(12, HIT + 1), save(15, HIT + 20)]
    findings = judge_script(script(exit_codes={"0": 75, "1": 75}, saves=after, resume_from="/c/ckpt-12.pt"))
    assert findings.problems == []
    assert findings.notes == ["it saved ckpt-12.pt after it was asked to stop", "it resumed from ckpt-12.pt"]


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        (script(exit_codes={"0": 0}), ["its ranks exited with 0 after SIGTERM; that is taken as not finished",
                                       "Exit with 75", "requeue.exit_zero"]),
        (script(exit_codes={"0": -15}), ["its ranks died from SIGTERM: it does not handle the signal"]),
        (script(exit_codes={"0": 3}), ["its ranks exited with code 3 after SIGTERM, which counts as stopped"]),
        (script(exit_codes={"0": -15}), ["it saved nothing when it was asked to stop, which costs up to 5 steps"]),
        (script(leftovers=["sleep (pid 12)"]), ["outlived its ranks and were killed: sleep (pid 12)"]),
        # Without steps it is unknown whether it resumed.
        (replace(script("rank", saves=NAMELESS, resume_from="/c/last.pt"), baseline=plain(NAMELESS)),
         ["it was given last.pt, but whether it resumed from it is unknown"]),
    ],
)  # fmt: skip
def test_what_a_script_does_is_noted_with_what_it_means(facts: DrillFacts, words: list[str]) -> None:
    notes = judge_script(facts).notes
    assert any(all(each in note for each in words) for note in notes), notes


def test_a_fault_that_announces_nothing_leaves_no_time_to_save_or_to_end_processes() -> None:
    assert judge_script(script("rank", leftovers=["sleep (pid 12)"])).notes == ["it resumed from ckpt-10.pt"]


@pytest.mark.parametrize(
    ("facts", "problem", "advice"),
    [
        (script(exit_codes={"0": -9, "1": 75}), "rank 0 did not end after SIGTERM and had to be killed",
         "stop_requested"),
        (script(exit_codes={"node 1": -9}), "the command on node 1 did not end after SIGTERM and had to be killed", ""),
        (script("rank", survivors=["sleep 600 (pid 12)"]),
         "1 of its processes outlived the stop: sleep 600 (pid 12)", "without a session of their own"),
        (script(dead_workers=["DataLoader worker (pid(s) 7) exited"]),
         "its DataLoader workers died before it had ended: DataLoader worker (pid(s) 7) exited", "may be lost"),
        # It starts from the beginning, as its checkpoints show, or the steps that it reports.
        (script("rank", saves=[*BEFORE, save(5, HIT + 15), save(10, HIT + 20)]),
         "it was given ckpt-10.pt and did not resume from it: it then reached step 5", "{resume_from}"),
        (replace(script("rank"), steps={"7.1": [(HIT + 11, 1), (HIT + 12, 2)]}),
         "it was given ckpt-10.pt and did not resume from it: it then reached step 1", "SLURMTRAIN_RESUME_FROM"),
        (script("save", ("/c/ckpt-10.pt",)), "it was given ckpt-10.pt, which was only half written", "os.replace"),
        (script("save", ("/c/last.pt",), resume_from=None),
         "the interrupted save destroyed ckpt-10.pt, its only checkpoint", "os.replace"),
        (script("rank", resume_from=None), "it was given no checkpoint, although it had saved ckpt-10.pt",
         "checkpoint.glob"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_script_is_a_problem_with_advice(facts: DrillFacts, problem: str, advice: str) -> None:
    findings = judge_script(facts)
    assert problems(findings) == problem
    assert advice in findings.problems[0].advice


def test_a_script_without_a_checkpoint_or_that_finds_it_itself_is_not_expected_to_be_handed_any() -> None:
    assert judge_script(script("rank", resume_from=None, saves=[save(5, HIT + 9)])).problems == []
    assert judge_script(replace(script("rank", resume_from=None), hands_over=False)) == Findings()


def test_the_undisturbed_run_shows_how_its_checkpoints_are_read() -> None:
    assert judge_baseline(script().baseline, PATTERN, []).notes == [
        "its last checkpoint is ckpt-15.pt, in the format torch, of step 15, which is in its name"
    ]
    assert "no way to see whether it resumes" in judge_baseline(plain([save(None, 1.0)]), PATTERN, []).notes[1]
    assert "it left no complete checkpoint that checkpoint.glob" in problems(judge_baseline(plain([]), PATTERN, []))
    assert "ckpt-5.pt" in problems(judge_baseline(plain([]), PATTERN, ["/c/ckpt-5.pt"]))
    [note] = judge_baseline(plain([]), None, []).notes
    assert "each interruption costs all of its work" in note
