"""What a drill finds about a script that does not use slurmtrain."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from slurmtrain.model.run.run import Run
from slurmtrain.plugins.drill.facts import (
    Aftermath,
    Baseline,
    CheckpointComparison,
    DrillFacts,
    InjectedFault,
    OwnCheckpoint,
)
from slurmtrain.plugins.drill.judge import Findings, judge_baseline, judge_script

HIT = 100.0
PATTERN = "{checkpoint_dir}/ckpt-*.pt"


def save(step: int | None, at: float) -> OwnCheckpoint:
    return OwnCheckpoint(f"/c/ckpt-{step}.pt", step, at, "torch")


def run(**more: Any) -> Run:
    return Run(**{"id": "RUN", "name": "n", "state": "completed", "reason": "", "executor": "local", **more})


BASELINE = Baseline(run=run(), saves=[save(step, step) for step in (5, 10, 15)], step_source="which is in its name")
BEFORE = [save(5, HIT - 2), save(10, HIT - 1)]


def facts(fault: str = "preempt", baseline: Baseline = BASELINE, injected: Any = None, **after: Any) -> DrillFacts:
    defaults = {"saves": [*BEFORE, save(15, HIT + 20)], "resume_from": "/c/ckpt-10.pt", "resumed_at": HIT + 10}
    return DrillFacts(
        run=run(),
        injected=InjectedFault(fault=fault, at=HIT, attempt="7.0", **(injected or {})),
        events=[],
        steps={},
        comparison=CheckpointComparison(identical=True, method="tensors"),
        baseline=baseline,
        aftermath=Aftermath(**{**defaults, **after}),
    )


def problems(findings: Findings) -> str:
    return "; ".join(problem.problem for problem in findings.problems)


def test_a_script_that_saves_on_the_signal_and_resumes_has_no_problem() -> None:
    after = [*BEFORE, save(12, HIT + 1), save(15, HIT + 20)]
    findings = judge_script(facts(exit_codes={"0": 75, "1": 75}, saves=after, resume_from="/c/ckpt-12.pt"))
    assert findings.problems == []
    assert findings.notes == ["it saved ckpt-12.pt after it was asked to stop", "it resumed from ckpt-12.pt"]


def test_exit_code_0_after_the_signal_is_explained_with_the_cures() -> None:
    [note, _, _] = judge_script(facts(exit_codes={"0": 0})).notes
    assert note.startswith("its ranks exited with 0 after SIGTERM; that is taken as not finished")
    assert "Exit with 75" in note
    assert "requeue.exit_zero" in note


@pytest.mark.parametrize(
    ("code", "note"),
    [
        (-15, "its ranks died from SIGTERM: it does not handle the signal, or was exiting when it came again"),
        (3, "its ranks exited with code 3 after SIGTERM, which counts as stopped"),
    ],
)
def test_other_exit_codes_are_explained(code: int, note: str) -> None:
    assert note in judge_script(facts(exit_codes={"0": code})).notes


def test_a_rank_that_ignores_the_signal_is_a_problem() -> None:
    findings = judge_script(facts(exit_codes={"0": -9, "1": 75}))
    assert problems(findings) == "rank 0 did not end after SIGTERM and had to be killed"
    assert "stop_requested" in findings.problems[0].advice
    assert "the command on node 1 did not end" in problems(judge_script(facts(exit_codes={"node 1": -9})))


def test_what_a_stop_without_a_save_costs_is_said() -> None:
    notes = judge_script(facts(exit_codes={"0": -15})).notes
    assert any("it saved nothing when it was asked to stop, which costs up to 5 steps" in note for note in notes)
    # A fault that announces nothing leaves no time to save.
    assert judge_script(facts("rank")).notes == ["it resumed from ckpt-10.pt"]


def test_processes_that_outlive_the_stop_are_a_problem() -> None:
    findings = judge_script(facts("rank", survivors=["sleep 600 (pid 12)"]))
    assert problems(findings) == "1 of its processes outlived the stop: sleep 600 (pid 12)"


def test_processes_that_had_to_be_killed_after_a_stop_are_named() -> None:
    notes = judge_script(facts(leftovers=["sleep (pid 12)"])).notes
    assert any("outlived its ranks and were killed: sleep (pid 12)" in note for note in notes)
    # Of a rank that was killed itself nothing else can be expected.
    assert not any("outlived" in note for note in judge_script(facts("rank", leftovers=["sleep (pid 12)"])).notes)


def test_data_loader_workers_that_die_are_a_problem() -> None:
    findings = judge_script(facts(dead_workers=["DataLoader worker (pid(s) 7) exited unexpectedly"]))
    assert "its DataLoader workers died before it had ended" in problems(findings)


def test_a_script_that_starts_from_the_beginning_is_found_out_by_its_checkpoints() -> None:
    findings = judge_script(facts("rank", saves=[*BEFORE, save(5, HIT + 15), save(10, HIT + 20)]))
    assert problems(findings) == "it was handed ckpt-10.pt and did not resume from it: it then reached step 5"
    assert "{resume_from}" in findings.problems[0].advice


def test_or_by_the_steps_that_it_reports() -> None:
    reporting = replace(facts("rank"), steps={"7.1": [(HIT + 11, 1), (HIT + 12, 2)]})
    assert "it then reached step 1" in problems(judge_script(reporting))


def test_a_script_that_finds_its_checkpoints_itself_is_not_expected_to_be_handed_any() -> None:
    own = replace(facts("rank", resume_from=None), hands_over=False)
    assert judge_script(own) == Findings()


def test_without_steps_it_is_unknown_whether_it_resumed() -> None:
    nameless = [OwnCheckpoint("/c/last.pt", None, HIT + at) for at in (-2, 20)]
    baseline = Baseline(run=run(), saves=nameless)
    [note] = judge_script(facts("rank", baseline=baseline, saves=nameless, resume_from="/c/last.pt")).notes
    assert note.startswith("it was handed last.pt; whether it resumed from it is unknown")


def test_a_half_written_checkpoint_that_is_handed_over_is_a_problem() -> None:
    findings = judge_script(facts("save", injected={"half_written": ["/c/ckpt-10.pt"]}))
    assert problems(findings) == "it was handed ckpt-10.pt, which was only half written"
    assert "os.replace" in findings.problems[0].advice


def test_a_save_that_destroys_the_only_checkpoint_is_a_problem() -> None:
    findings = judge_script(facts("save", injected={"half_written": ["/c/last.pt"]}, resume_from=None))
    assert problems(findings) == "the interrupted save destroyed ckpt-10.pt, and it had no other"


def test_a_script_that_is_handed_nothing_although_it_had_saved_is_a_problem() -> None:
    assert "handed no checkpoint, although it had saved ckpt-10.pt" in problems(
        judge_script(facts("rank", resume_from=None))
    )
    assert judge_script(facts("rank", resume_from=None, saves=[save(5, HIT + 9)])).problems == []


def test_the_undisturbed_run_shows_how_its_checkpoints_are_read() -> None:
    findings = judge_baseline(BASELINE, PATTERN, [])
    assert findings.notes == [
        "its last checkpoint is ckpt-15.pt, in the format torch, of step 15, which is in its name"
    ]
    nameless = Baseline(run=run(), saves=[save(None, 1.0)])
    assert "nothing shows whether it resumes" in judge_baseline(nameless, PATTERN, []).notes[1]


def test_a_pattern_that_matches_nothing_complete_is_a_problem() -> None:
    nothing = Baseline(run=run())
    assert "it left no complete checkpoint that checkpoint.glob" in problems(judge_baseline(nothing, PATTERN, []))
    assert "ckpt-5.pt" in problems(judge_baseline(nothing, PATTERN, ["/c/ckpt-5.pt"]))


def test_a_script_that_saves_nothing_is_told_what_that_costs() -> None:
    [note] = judge_baseline(Baseline(run=run()), None, []).notes
    assert "each interruption costs all of its work" in note
