"""The verdict on a run that a fault was injected into, and on its script: what happened, and what is wrong. Pure.

A session stops, saves and resumes as it should. For other scripts, the findings say what the script does, why it
matters, and what to change.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from slurmtrain.model.interruption.exit_report import STOPPED
from slurmtrain.model.run.events.agent_events import JobRequeue
from slurmtrain.model.run.events.base import AnyEvent, select
from slurmtrain.model.run.events.checkpoint_events import CheckpointRestored
from slurmtrain.model.run.events.rank_events import SessionStarted
from slurmtrain.model.run.layout import attempt_of
from slurmtrain.model.run.run import Attempt, Run
from slurmtrain.plugins.drill.facts import (
    FAULTS,
    Baseline,
    CheckpointComparison,
    DrillFacts,
    DrillProblem,
    FaultVerdict,
    InjectedFault,
)

# How long agents may take to notice that a rank or another node is gone, and to end the remaining ranks.
NOTICED_S = 60.0
# How long they may take to end the ranks once a hang is noticed: they inspect every rank first.
HANG_ENDED_S = 30.0
# Slurm's times are whole seconds from another node's clock: an attempt may seem to start after its first events.
_SKEW_S = 1.0

# What restarted a run.
AGENTS_IN_PLACE = "agents, in place"
AGENTS_REQUEUE = "agents, by requeue"
SLURM = "Slurm"


@dataclass(frozen=True, slots=True)
class _Restart:
    """How the run was started again: by whom, and when (seconds since 1970).

    ``key``: key of the continuing attempt; its ranks train from ``trains_since`` on, starting with ``first_step``.
    """

    by: str
    at: float
    trains_since: float
    key: str
    first_step: int | None


def judge_fault(facts: DrillFacts) -> FaultVerdict:
    """The verdict on a run that a fault was injected into."""
    run, injected = facts.run, facts.injected
    struck = next((attempt for attempt in run.attempts if attempt.key == injected.attempt), None)
    restart = _restart_after(facts, struck, injected)
    verdict = FaultVerdict(
        fault=injected.fault,
        run_id=run.id,
        injected=injected,
        cause=_cause(struck, injected),
        stopped_s=_stopped_s(struck, injected, restart),
        allowed_s=_allowed_s(facts, injected),
        lost_steps=struck.lost_steps if struck is not None else None,
        resumed_at=restart.first_step if restart else None,
        restarted_by=restart.by if restart else None,
        restarted_s=None if restart is None else max(0.0, restart.at - injected.at),
        step_s=_step_s(facts, injected, restart),
        attempts=len(run.attempts),
        restarts=sum(len(attempt.restarts) for attempt in run.attempts),
        state=run.state,
        comparison=facts.comparison,
        aftermath=facts.aftermath,
    )
    if facts.ended_by_drill:
        return replace(verdict, problems=[_unending(verdict, facts)])
    script = judge_script(facts)
    problems = [
        *_stop_problems(verdict),
        *_step_problems(verdict, facts),
        *_restart_problems(verdict, run),
        *_end_problems(verdict, facts),
        *script.problems,
    ]
    notes = (*script.notes, *_notes(verdict, facts))
    return replace(verdict, problems=tuple(problems), notes=notes, not_tried=_why_not_tried(facts, struck))


def _why_not_tried(facts: DrillFacts, struck: Attempt | None) -> str:
    """Why a fault that was injected shows nothing; empty if it shows something."""
    if facts.injected.fault == "save" and not facts.injected.half_written:
        return "the save had ended before the signal arrived"
    if struck is not None and struck.cause == "completed" and len(struck.restarts) <= facts.injected.restarts:
        return "it finished before the fault had any effect"
    return ""


def not_hit_verdict(fault: str, run: Run, why: str = "") -> FaultVerdict:
    """The verdict on a ``run`` without its ``fault``: it ended before, or could not be hit because of ``why``."""
    verdict = FaultVerdict(fault=fault, run_id=run.id, attempts=len(run.attempts), state=run.state)
    if why:
        return replace(verdict, not_tried=why)
    if run.state != "completed":
        reason = f": {run.reason}" if run.reason else ""
        problem = f"it ended as {run.state} before the fault{reason}"
        return replace(verdict, problems=[DrillProblem(problem, f"'slurmtrain doctor {run.id}' says more")])
    if fault == "save":
        return replace(verdict, not_tried="it finished first, and none of its saves was seen half-written")
    why = (
        "it finished first; make it longer, or have it save sooner, for example with the override "
        "checkpoint.every.steps=5"
    )
    return replace(verdict, not_tried=why)


def not_submitted_verdict(fault: str, why: str) -> FaultVerdict:
    """The verdict if there is no run, because of ``why``."""
    return FaultVerdict(fault=fault, run_id="", state="-", not_tried=why)


# --- what happened ----------------------------------------------------------------------------------------------------


def _cause(struck: Attempt | None, injected: InjectedFault) -> str | None:
    """The cause that the run reported for the fault."""
    if struck is None:
        return None
    if len(struck.restarts) > injected.restarts:
        return str(struck.restarts[injected.restarts].get("cause"))
    return struck.cause


def _restart_after(facts: DrillFacts, struck: Attempt | None, injected: InjectedFault) -> _Restart | None:
    """How the run went on after the fault; None if it did not."""
    if struck is None:
        return None
    if len(struck.restarts) > injected.restarts:
        at = float(struck.restarts[injected.restarts]["at"])
        return _Restart(AGENTS_IN_PLACE, at, at, struck.key, _first_step(facts, struck, at))
    later = [attempt for attempt in facts.run.attempts if attempt.number > struck.number]
    if not later:
        return None
    following = later[0]
    began = following.started_at or following.submitted_at or injected.at
    first_step = _first_step(facts, following, began - _SKEW_S)
    if following.job_id != struck.job_id:
        # A new job has a submission, which says who requested it.
        at = following.submitted_at or began
        return _Restart(following.asked_by, at, began, following.key, first_step)
    # The job kept its id, so it was requeued: by its agents, if they have journaled that, else by Slurm itself.
    by = AGENTS_REQUEUE if _was_requeued(facts.events, struck) else SLURM
    return _Restart(by, began, began, following.key, first_step)


def _first_step(facts: DrillFacts, attempt: Attempt, since: float) -> int | None:
    """The step that an attempt's ranks first continued from after ``since``; None without a session."""
    events = [event for event in facts.events if attempt_of(event.source) == attempt.key and event.time >= since]
    begins = [
        *((event.order, event.payload.step) for event in select(events, SessionStarted)),
        *((event.order, event.payload.step or 0) for event in select(events, CheckpointRestored)),
    ]
    if not begins:
        return None
    (_, journal, _), _ = min(begins)
    # A restore follows the start of its session in the same journal, and has the greater step.
    return max(step for (_, source, _), step in begins if source == journal)


def _was_requeued(events: Sequence[AnyEvent], attempt: Attempt) -> bool:
    return any(attempt_of(event.source) == attempt.key for event in select(events, JobRequeue))


def _stopped_s(struck: Attempt | None, injected: InjectedFault, restart: _Restart | None) -> float | None:
    # They were all killed at once: there was nothing left to stop.
    if struck is None or injected.fault == "all":
        return None
    if restart is not None and restart.by == AGENTS_IN_PLACE:
        return max(0.0, restart.at - injected.at)
    return None if struck.ended_at is None else max(0.0, struck.ended_at - injected.at)


def _allowed_s(facts: DrillFacts, injected: InjectedFault) -> float | None:
    """How long the ranks may take to end; None if there is no bound."""
    if FAULTS[injected.fault].announced:
        return facts.grace_s
    if injected.fault == "hang":
        return None if facts.hang_after is None else facts.hang_after + HANG_ENDED_S
    return None if injected.fault == "all" else NOTICED_S


def _step_s(facts: DrillFacts, injected: InjectedFault, restart: _Restart | None) -> float | None:
    if restart is None:
        return None
    since = max(injected.at, restart.trains_since)
    times = [at for at, _ in facts.steps.get(restart.key, ()) if at >= since]
    return min(times) - injected.at if times else None


# --- what is wrong ----------------------------------------------------------------------------------------------------


def _unending(verdict: FaultVerdict, facts: DrillFacts) -> DrillProblem:
    """The problem of a run that the drill had to end itself."""
    if verdict.fault == "hang" and not facts.baseline.counts_steps:
        return DrillProblem(
            "a hang of this script would not be noticed: it reports no progress",
            "call slurmtrain.progress(step) after each step, or use slurmtrain.session() (docs/scripts.md)",
        )
    advice = f"'slurmtrain logs {verdict.run_id}' shows where it was; a hang is noticed only in a script that reports "
    return DrillProblem(f"the drill has ended it: {facts.ended_by_drill}", advice + "steps (docs/scripts.md)")


def _stop_problems(verdict: FaultVerdict) -> list[DrillProblem]:
    problems = []
    fault = FAULTS[verdict.fault]
    if verdict.stopped_s is not None and verdict.allowed_s is not None and verdict.stopped_s > verdict.allowed_s:
        problem = f"its ranks ended after {verdict.stopped_s:.0f} s instead of within {verdict.allowed_s:.0f} s"
        advice = "see 'slurmtrain show' for what it waited for"
        if fault.announced:
            advice = "make saves faster (docs/checkpoint-interval.md), or ask the site for a longer GraceTime"
        problems.append(DrillProblem(problem, advice))
    if verdict.cause not in (None, "completed", *fault.causes):
        expected = " or ".join(sorted(fault.causes))
        advice = "something else may have ended it: repeat the drill, and look at 'slurmtrain show' if it happens again"
        problems.append(DrillProblem(f"the run reports the cause {verdict.cause}, not {expected}", advice))
    return problems


def _step_problems(verdict: FaultVerdict, facts: DrillFacts) -> list[DrillProblem]:
    lost = verdict.lost_steps
    if FAULTS[verdict.fault].announced and lost:
        return [
            DrillProblem(
                f"{_steps(lost)} {'was' if lost == 1 else 'were'} lost, though the stop was announced",
                "it did not save within its grace: save with slurmtrain.session(), and make saves, or steps, faster "
                "(docs/runs.md)",
            )
        ]
    saved = _saved_steps(facts)
    if verdict.resumed_at is not None and saved and verdict.resumed_at < max(saved):
        return [
            DrillProblem(
                f"it resumed from step {verdict.resumed_at}, though step {max(saved)} was saved",
                f"'slurmtrain verify {verdict.run_id}' shows whether that checkpoint is damaged",
            )
        ]
    return []


def _saved_steps(facts: DrillFacts) -> list[int]:
    """The steps that were saved when the fault struck."""
    return [
        checkpoint.step
        for checkpoint in facts.run.checkpoints
        if checkpoint.complete and checkpoint.saved_at < facts.injected.at and checkpoint.step is not None
    ]


def _restart_problems(verdict: FaultVerdict, run: Run) -> list[DrillProblem]:
    # What has completed need not be restarted.
    if verdict.restarted_by is not None or verdict.cause == "completed":
        return []
    return [
        DrillProblem(
            f"it was not restarted: {run.reason or run.state}",
            "see section 'requeue' of docs/spec.md for what is started again, and docs/watch.md for who does it",
        )
    ]


def _end_problems(verdict: FaultVerdict, facts: DrillFacts) -> list[DrillProblem]:
    if facts.run.state != "completed" and verdict.restarted_by is None:
        return []  # that it was not restarted explains this state
    if facts.run.state != "completed":
        reason = f": {facts.run.reason}" if facts.run.reason else ""
        return [
            DrillProblem(f"it ended as {facts.run.state}{reason}", f"'slurmtrain doctor {verdict.run_id}' says more")
        ]
    if steps := _unfinished(facts):
        problem = f"it completed at step {steps[1]}, and the undisturbed run at step {steps[0]}"
        advice = (
            "a rank that stops early must not exit with 0 after it has said that its work is done, nor with 0 at all "
            "if requeue.exit_zero is completed: exit with 75"
        )
        return [DrillProblem(problem, advice)]
    if facts.comparison.identical is not False or _may_differ(facts):
        return []
    advice = (
        "two undisturbed runs end alike, so its checkpoints lack some state: save and restore all of it (models, "
        "optimizers, schedulers, random number generators), and derive the order of the data from the step "
        "(docs/scripts.md)"
        if facts.deterministic
        else "whether two undisturbed runs end alike is unknown: try again with --twice"
    )
    return [DrillProblem(f"its last checkpoint {facts.comparison.describe()}", advice)]


def _unfinished(facts: DrillFacts) -> tuple[int, int] | None:
    """The last steps of the undisturbed run and of this one, if this one ended before."""
    pairs = [facts.comparison.steps, (facts.baseline.run.step, facts.run.step)]
    for pair in pairs:
        if pair is not None and pair[0] is not None and pair[1] is not None and pair[1] < pair[0]:
            return (pair[0], pair[1])
    return None


def _may_differ(facts: DrillFacts) -> bool:
    """Whether a difference proves nothing: the script is not deterministic, or the number of ranks changed."""
    return facts.deterministic is False or _resized(facts)


def _resized(facts: DrillFacts) -> bool:
    sizes = {event.payload.world_size for event in select(facts.events, SessionStarted)}
    return len(sizes | set(facts.world_sizes)) > 1


# --- notes ------------------------------------------------------------------------------------------------------------


def _notes(verdict: FaultVerdict, facts: DrillFacts) -> list[str]:
    notes = []
    # Of all starts, one is the first, and at most one is due to the fault.
    others = len(facts.run.attempts) + verdict.restarts - 1 - int(verdict.restarted_by is not None)
    if others > 0:
        notes.append(
            f"it was interrupted {_times(others)} more: times and lost steps may not be due to the fault alone"
        )
    if facts.injected.moment.endswith("of its output"):
        notes.append(
            f"it was struck {facts.injected.moment}: it reports no step and had saved nothing, so whether it trained "
            "by then is unknown"
        )
    elif not FAULTS[verdict.fault].announced and not _saved_steps(facts) and not facts.aftermath.saves:
        notes.append("it had saved nothing before the fault: checkpoint.every.steps makes a session save sooner")
    if facts.run.state == "completed" and (facts.comparison.identical is None or facts.comparison.others):
        notes.append(f"its last checkpoint {facts.comparison.describe()}")
    if facts.comparison.identical is False and _may_differ(facts):
        notes.append(f"its last checkpoint {facts.comparison.describe()}; {_why_it_may_differ(facts)}")
    return notes


def _why_it_may_differ(facts: DrillFacts) -> str:
    if _resized(facts):
        return "the number of ranks was different"
    varies = "the script is not deterministic: two undisturbed runs differ as well"
    within = _within_noise(facts.comparison, facts.noise)
    if within is None or facts.noise is None:
        return f"{varies}, so only steps and completeness are compared"
    more_or_less = "no more than that" if within else "more than that, which may still be chance"
    return f"{varies}, by {facts.noise.max_abs:.2g} (absolute); this is {more_or_less}"


def _within_noise(comparison: CheckpointComparison, noise: CheckpointComparison | None) -> bool | None:
    """Whether two runs differ by no more than two undisturbed ones; None if that is unknown."""
    if noise is None or noise.max_abs is None or comparison.max_abs is None:
        return None
    return comparison.max_abs <= noise.max_abs


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


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
