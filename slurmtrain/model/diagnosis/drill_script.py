"""A drill's findings about the script itself: how it stops, its saves, and whether it resumes. Pure.

A session gets all of this right. For other scripts, the findings say what the script does, why it matters, and what to
change.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from slurmtrain.model.diagnosis.drill import (
    FAULTS,
    Baseline,
    DrillFacts,
    DrillProblem,
)
from slurmtrain.model.interruption.exit_report import STOPPED

# SIGKILL, as an exit code: what ends a rank that did not end when it was asked to.
_KILLED = -9
_ADAPTER = (
    "save when slurmtrain.stop_requested() is true and call slurmtrain.leave(), or use the callback for its trainer "
    "(docs/scripts.md)"
)
_RENAME = "write each save under a temporary name in the same directory, then os.replace() it"


@dataclass(frozen=True, slots=True)
class Findings:
    """What a drill has found out: ``problems``, which fail a fault, and ``notes``, which do not."""

    problems: list[DrillProblem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def judge_baseline(baseline: Baseline, pattern: str | None, half_written: Sequence[str]) -> Findings:
    """What the undisturbed run shows about the checkpoints of its script.

    ``baseline``: that run. ``pattern``: the spec's ``checkpoint.glob``. ``half_written``: what that matches but is not
    complete, as phrases.
    """
    findings = Findings()
    if pattern is not None and not baseline.saves:
        why = f"; of what matches, {half_written[0]}" if half_written else ""
        findings.problems.append(
            DrillProblem(
                f"it left no complete checkpoint that checkpoint.glob ({pattern}) matches{why}",
                "have the script save to {checkpoint_dir} and the pattern match what it saves (docs/scripts.md)",
            )
        )
    elif pattern is not None:
        last = baseline.saves[-1]
        step = "of an unknown step" if last.step is None else f"of step {last.step}, {baseline.step_source}"
        kind = "an unknown format" if last.format == "other" else f"the format {last.format}"
        findings.notes.append(f"its last checkpoint is {last.name}, in {kind}, {step}")
        if last.step is None:
            findings.notes.append(
                "without steps nothing shows whether it resumes: put the step into the name, or see checkpoint.step"
            )
    elif not baseline.run.checkpoints:
        findings.notes.append(
            "it has neither a slurmtrain.session() nor a checkpoint.glob, so each interruption costs all of its work"
        )
    return findings


def judge_script(facts: DrillFacts) -> Findings:
    """What the run after a fault shows about its script."""
    findings = Findings()
    if FAULTS[facts.injected.fault].announced:
        _judge_exit(facts, findings)
        # One that was killed went on training, and so may have saved without regard to the signal.
        if facts.baseline.saves and _KILLED not in facts.aftermath.exit_codes.values():
            _judge_save_on_signal(facts, findings)
    _judge_processes(facts, findings)
    if facts.baseline.saves and facts.aftermath.resumed_at is not None and facts.hands_over:
        _judge_resume(facts, findings)
    return findings


# --- how it stops -----------------------------------------------------------------------------------------------------


def _judge_exit(facts: DrillFacts, findings: Findings) -> None:
    codes, name = facts.aftermath.exit_codes, facts.stop_signal
    if not codes:
        return
    killed = [rank for rank, code in codes.items() if code == _KILLED]
    if killed:
        findings.problems.append(
            DrillProblem(f"{_ranks(killed)} did not end after {name} and had to be killed", _ADAPTER)
        )
    elif set(codes.values()) <= {0, STOPPED} and 0 in codes.values() and facts.aftermath.resumed_at is not None:
        findings.notes.append(
            f"its ranks exited with 0 after {name}; that is taken as not finished, so the run was started again. "
            f"Exit with {STOPPED} to say so, or set requeue.exit_zero: completed if 0 means that the work is done"
        )
    others = {code for code in codes.values() if code not in (0, STOPPED, _KILLED)}
    if others and min(others) < 0:
        # On Slurm the signal comes twice, and Python restores the default action before it exits.
        findings.notes.append(
            f"its ranks died from {name}: it does not handle the signal, or was exiting when it came again"
        )
    elif others:
        findings.notes.append(f"its ranks exited with code {min(others)} after {name}, which counts as stopped")


def _judge_save_on_signal(facts: DrillFacts, findings: Findings) -> None:
    """Whether a script that saves its own checkpoints did so when it was asked to stop."""
    until = facts.aftermath.resumed_at
    saved = [
        save
        for save in facts.aftermath.saves
        if save.saved_at >= facts.injected.at and (until is None or save.saved_at < until)
    ]
    if saved:
        findings.notes.append(f"it saved {saved[-1].name} after it was asked to stop")
        return
    interval = facts.baseline.save_interval
    cost = "what it had done since its last save" if interval is None else f"up to {_steps(interval)}"
    findings.notes.append(f"it saved nothing when it was asked to stop, which costs {cost}: {_ADAPTER}")


def _judge_processes(facts: DrillFacts, findings: Findings) -> None:
    after = facts.aftermath
    if after.survivors:
        findings.problems.append(
            DrillProblem(
                f"{len(after.survivors)} of its processes outlived the stop: {', '.join(after.survivors)}",
                "they would write to the same files as the next attempt: start them without a session of their own, "
                "and end them with the script",
            )
        )
    # A killed rank cannot end the processes that it has started.
    if after.leftovers and FAULTS[facts.injected.fault].announced:
        findings.notes.append(
            f"processes that it had started outlived its ranks and were killed: {', '.join(after.leftovers)}; whatever "
            "they had not saved is lost, and elsewhere they would train beside the next attempt: end them in the script"
        )
    if after.dead_workers:
        findings.problems.append(
            DrillProblem(
                f"its DataLoader workers died before it had ended: {after.dead_workers[0]}",
                f"a save in progress may be lost with them: {_ADAPTER}",
            )
        )


# --- where it resumes from --------------------------------------------------------------------------------------------


def _judge_resume(facts: DrillFacts, findings: Findings) -> None:
    after, injected = facts.aftermath, facts.injected
    assert after.resumed_at is not None
    if after.resume_from is None:
        _judge_nothing_to_resume(facts, findings)
        return
    name = after.resume_from.rstrip("/").rpartition("/")[2]
    if after.resume_from in injected.half_written:
        findings.problems.append(DrillProblem(f"it was handed {name}, which was only half written", _RENAME))
        return
    handed = next((save.step for save in after.saves if save.path == after.resume_from), None)
    first = _first_step_after(facts, after.resumed_at)
    if handed is None:
        if not facts.baseline.counts_steps:
            findings.notes.append(
                f"it was handed {name}; whether it resumed from it is unknown, since neither its checkpoints nor its "
                "output have steps: slurmtrain.progress(step) reports them"
            )
    elif first is not None and first < handed:
        findings.problems.append(
            DrillProblem(
                f"it was handed {name} and did not resume from it: it then reached step {first}",
                "load the file that {resume_from} names in the command, or SLURMTRAIN_RESUME_FROM in the environment",
            )
        )
    elif first is not None and first > handed:
        findings.notes.append(f"it resumed from {name}")


def _judge_nothing_to_resume(facts: DrillFacts, findings: Findings) -> None:
    before = [save for save in facts.aftermath.saves if save.saved_at < facts.injected.at]
    if not before:
        return
    problem = f"it was handed no checkpoint, although it had saved {before[-1].name}"
    advice = "see 'slurmtrain show' for the checkpoints of the run, and checkpoint.glob in docs/scripts.md"
    if facts.injected.half_written:
        problem, advice = f"the interrupted save destroyed {before[-1].name}, and it had no other", _RENAME
    findings.problems.append(DrillProblem(problem, advice))


def _first_step_after(facts: DrillFacts, at: float) -> int | None:
    """The first step that the script reported, or saved, after ``at`` (seconds since 1970); None if unknown."""
    reported = [(time, step) for steps in facts.steps.values() for time, step in steps if time >= at]
    if reported:
        return min(reported)[1]
    saved = [(save.saved_at, save.step) for save in facts.aftermath.saves if save.saved_at >= at]
    return next((step for _, step in sorted(saved, key=lambda each: each[0]) if step is not None), None)


def _ranks(names: Sequence[str]) -> str:
    """Ranks, or commands that start them: by number, or as ``node <n>``."""
    if len(names) > 1:
        return f"{len(names)} ranks"
    return f"rank {names[0]}" if names[0].isdecimal() else f"the command on {names[0]}"


def _steps(count: int) -> str:
    return "1 step" if count == 1 else f"{count} steps"
