"""The verdict on a run that a fault was injected into, and on its script: what happened, and what is wrong. Pure.

A session stops, saves and resumes as it should. For other scripts, the findings say what the script does, why it
matters, and what to change.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from slurmtrain.model.interruption.exit_report import STOPPED
from slurmtrain.model.run.events.agent_events import JobRequeue
from slurmtrain.model.run.events.base import select
from slurmtrain.model.run.events.checkpoint_events import CheckpointRestored
from slurmtrain.model.run.events.rank_events import SessionStarted
from slurmtrain.model.run.layout import attempt_of
from slurmtrain.model.run.run import Attempt, Run
from slurmtrain.plugins.drill.facts import FAULTS, Baseline, DrillFacts, DrillProblem, FaultVerdict

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

    def add(self, problem: str, advice: str) -> None:
        """Add a ``problem`` with the ``advice`` on what to do about it."""
        self.problems.append(DrillProblem(problem, advice))


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
    run, injected, fault = facts.run, facts.injected, FAULTS[facts.injected.fault]
    struck = next((attempt for attempt in run.attempts if attempt.key == injected.attempt), None)
    restart = _restart_after(facts, struck) if struck is not None else None
    in_place = struck is not None and len(struck.restarts) > injected.restarts
    cause = stopped_s = step_s = None
    if struck is not None:
        cause = str(struck.restarts[injected.restarts].get("cause")) if in_place else struck.cause
        stopped_at = restart.at if restart and in_place else struck.ended_at
        # With the fault "all" they were all killed at once: there was nothing left to stop.
        if fault.name != "all" and stopped_at is not None:
            stopped_s = max(0.0, stopped_at - injected.at)
    if restart is not None:
        since = max(injected.at, restart.trains_since)
        step_s = min((at - injected.at for at, _ in facts.steps.get(restart.key, ()) if at >= since), default=None)
    allowed_s: float | None = NOTICED_S
    if fault.announced:
        allowed_s = facts.grace_s
    elif fault.name == "hang":
        allowed_s = None if facts.hang_after is None else facts.hang_after + HANG_ENDED_S
    elif fault.name == "all":
        allowed_s = None
    verdict = FaultVerdict(
        fault=injected.fault,
        run_id=run.id,
        injected=injected,
        cause=cause,
        stopped_s=stopped_s,
        allowed_s=allowed_s,
        lost_steps=struck.lost_steps if struck is not None else None,
        resumed_at=restart.first_step if restart else None,
        restarted_by=restart.by if restart else None,
        restarted_s=None if restart is None else max(0.0, restart.at - injected.at),
        step_s=step_s,
        attempts=len(run.attempts),
        restarts=sum(len(attempt.restarts) for attempt in run.attempts),
        state=run.state,
        comparison=facts.comparison,
        aftermath=facts.aftermath,
    )
    not_tried = ""
    if struck is not None and struck.cause == "completed" and not in_place:
        not_tried = "it finished before the fault had any effect"
    if fault.name == "save" and not injected.half_written:
        not_tried = "the save had ended before the signal arrived"
    return _with_findings(replace(verdict, not_tried=not_tried), facts)


def _with_findings(verdict: FaultVerdict, facts: DrillFacts) -> FaultVerdict:
    findings = Findings()
    if facts.ended_by_drill:
        if verdict.fault == "hang" and not facts.baseline.counts_steps:
            findings.add(
                "nobody would notice a hang of this script: it reports no progress",
                "call slurmtrain.progress(step) after each step, or use slurmtrain.session() (docs/scripts.md)",
            )
        else:
            findings.add(
                f"the drill has ended it: {facts.ended_by_drill}",
                f"'slurmtrain logs {verdict.run_id}' shows where it was; a hang is noticed only in a script that "
                "reports steps (docs/scripts.md)",
            )
        return replace(verdict, problems=findings.problems, not_tried="")
    _judge_stop(verdict, facts, findings)
    _judge_end(verdict, facts, findings)
    script = judge_script(facts)
    return replace(
        verdict,
        problems=(*findings.problems, *script.problems),
        notes=(*script.notes, *_notes_on_run(verdict, facts)),
    )


def not_hit_verdict(fault: str, run: Run, why: str = "") -> FaultVerdict:
    """The verdict on a ``run`` without its ``fault``: it ended before, or could not be hit because of ``why``."""
    verdict = FaultVerdict(fault=fault, run_id=run.id, attempts=len(run.attempts), state=run.state)
    if not why and run.state != "completed":
        reason = f": {run.reason}" if run.reason else ""
        problem = f"it ended as {run.state} before the fault{reason}"
        return replace(verdict, problems=[DrillProblem(problem, f"'slurmtrain why {run.id}' says more")])
    if not why and fault == "save":
        why = "it finished before one of its saves could be caught half-written"
    advice = "make it longer, or have it save sooner, for example with the override checkpoint.every.steps=5"
    return replace(verdict, not_tried=why or f"it finished first; {advice}")


def not_submitted_verdict(fault: str, why: str) -> FaultVerdict:
    """The verdict if there is no run, because of ``why``."""
    return FaultVerdict(fault=fault, run_id="", state="-", not_tried=why)


# --- what happened ----------------------------------------------------------------------------------------------------


def _restart_after(facts: DrillFacts, struck: Attempt) -> _Restart | None:
    """How the run went on after the fault; None if it did not."""
    injected = facts.injected
    if len(struck.restarts) > injected.restarts:
        at = float(struck.restarts[injected.restarts]["at"])
        return _Restart(AGENTS_IN_PLACE, at, at, struck.key, _resumed_step(facts, struck, at))
    following = next((attempt for attempt in facts.run.attempts if attempt.number > struck.number), None)
    if following is None:
        return None
    began = following.started_at or following.submitted_at or injected.at
    first_step = _resumed_step(facts, following, began - _SKEW_S)
    if following.job_id != struck.job_id:
        # A new job has a submission, which says who requested it.
        return _Restart(following.asked_by, following.submitted_at or began, began, following.key, first_step)
    # The job kept its id, so it was requeued: by its agents, if they have journaled that, else by Slurm itself.
    by_agents = any(attempt_of(event.source) == struck.key for event in select(facts.events, JobRequeue))
    return _Restart(AGENTS_REQUEUE if by_agents else SLURM, began, began, following.key, first_step)


def _resumed_step(facts: DrillFacts, attempt: Attempt, since: float) -> int | None:
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


def _saved_steps(facts: DrillFacts) -> list[int]:
    """The steps that were saved when the fault struck."""
    return [
        checkpoint.step
        for checkpoint in facts.run.checkpoints
        if checkpoint.complete and checkpoint.saved_at < facts.injected.at and checkpoint.step is not None
    ]


def _may_differ(facts: DrillFacts) -> bool:
    """Whether a difference proves nothing: the script is not deterministic, or the number of ranks changed."""
    return facts.deterministic is False or _resized(facts)


def _resized(facts: DrillFacts) -> bool:
    sizes = {event.payload.world_size for event in select(facts.events, SessionStarted)}
    return len(sizes | set(facts.world_sizes)) > 1


# --- what is wrong with the run ---------------------------------------------------------------------------------------


def _judge_stop(verdict: FaultVerdict, facts: DrillFacts, findings: Findings) -> None:
    """How long the stop took, the run's account of it, and its cost."""
    fault, lost, saved = FAULTS[verdict.fault], verdict.lost_steps, _saved_steps(facts)
    if verdict.stopped_s is not None and verdict.allowed_s is not None and verdict.stopped_s > verdict.allowed_s:
        findings.add(
            f"its ranks ended after {verdict.stopped_s:.0f} s instead of within {verdict.allowed_s:.0f} s",
            "make saves faster (docs/checkpoint-interval.md), or ask the site for a longer GraceTime"
            if fault.announced
            else "see 'slurmtrain show' for the reason why it waited",
        )
    if verdict.cause not in (None, "completed", *fault.causes):
        findings.add(
            f"the run reports the cause {verdict.cause}, not {' or '.join(sorted(fault.causes))}",
            "something else may have ended it: repeat the drill, and look at 'slurmtrain show' if it happens again",
        )
    if fault.announced and lost:
        findings.add(
            f"{_count_steps(lost)} {'was' if lost == 1 else 'were'} lost, although the stop was announced",
            "it did not save within its grace: save with slurmtrain.session(), and make saves, or steps, faster "
            "(docs/runs.md)",
        )
    elif verdict.resumed_at is not None and saved and verdict.resumed_at < max(saved):
        findings.add(
            f"it resumed from step {verdict.resumed_at}, although step {max(saved)} was saved",
            f"'slurmtrain verify {verdict.run_id}' shows whether that checkpoint is damaged",
        )


def _judge_end(verdict: FaultVerdict, facts: DrillFacts, findings: Findings) -> None:
    """Whether the run was started again, and ended as the undisturbed one."""
    run = facts.run
    # What has completed need not be restarted.
    if verdict.restarted_by is None and verdict.cause != "completed":
        findings.add(
            f"it was not restarted: {run.reason or run.state}",
            "see docs/requeue.md for what is started again, and docs/watch.md for who does it",
        )
    if run.state != "completed":
        # That it was not restarted explains its state.
        if verdict.restarted_by is not None:
            reason = f": {run.reason}" if run.reason else ""
            findings.add(f"it ended as {run.state}{reason}", f"'slurmtrain why {verdict.run_id}' says more")
        return
    for expected, reached in (facts.comparison.steps or (None, None), (facts.baseline.run.step, run.step)):
        if expected is not None and reached is not None and reached < expected:
            findings.add(
                f"it completed at step {reached}, but the undisturbed run at step {expected}",
                "a rank that stops early must exit with 75, not 0, if requeue.exit_zero is completed or it has "
                "reported its work as done",
            )
            return
    if facts.comparison.identical is False and not _may_differ(facts):
        findings.add(
            f"its last checkpoint {facts.comparison.describe()}",
            "two undisturbed runs end alike, so its checkpoints lack some state: save and restore all of it (models, "
            "optimizers, schedulers, random number generators), and derive the order of the data from the step "
            "(docs/scripts.md)"
            if facts.deterministic
            else "whether two undisturbed runs end alike is unknown: try again with --twice",
        )


def _notes_on_run(verdict: FaultVerdict, facts: DrillFacts) -> list[str]:
    notes = []
    comparison, noise = facts.comparison, facts.noise
    # Of all starts, one is the first, and at most one is due to the fault.
    others = len(facts.run.attempts) + verdict.restarts - 1 - int(verdict.restarted_by is not None)
    if others > 0:
        times = "once" if others == 1 else f"{others} times"
        notes.append(f"it was interrupted {times} more: times and lost steps may not be due to the fault alone")
    if facts.injected.moment.endswith("of its output"):
        notes.append(
            f"the fault came {facts.injected.moment}: the script reports no step and had saved nothing, so it is "
            "unknown whether it was training by then"
        )
    elif not FAULTS[verdict.fault].announced and not _saved_steps(facts) and not facts.aftermath.saves:
        notes.append("it had saved nothing before the fault: checkpoint.every.steps makes a session save sooner")
    if facts.run.state == "completed" and (comparison.identical is None or comparison.others):
        notes.append(f"its last checkpoint {comparison.describe()}")
    if comparison.identical is False and _may_differ(facts):
        why = "the script is not deterministic: two undisturbed runs differ as well"
        if _resized(facts):
            why = "the number of ranks was different"
        elif noise is None or noise.max_abs is None or comparison.max_abs is None:
            why += ", so only steps and completeness are compared"
        else:
            is_within = comparison.max_abs <= noise.max_abs
            than = "no more than that" if is_within else "more than that, which may still be chance"
            why += f", by {noise.max_abs:.2g} (absolute); this is {than}"
        notes.append(f"its last checkpoint {comparison.describe()}; {why}")
    return notes


# --- what the script does ---------------------------------------------------------------------------------------------


def judge_baseline(baseline: Baseline, pattern: str | None, half_written: Sequence[str]) -> Findings:
    """What the undisturbed run shows about the checkpoints of its script.

    ``baseline``: that run. ``pattern``: the spec's ``checkpoint.glob``. ``half_written``: what that matches but is not
    complete, as phrases.
    """
    findings = Findings()
    if pattern is not None and not baseline.saves:
        why = f"; of what matches, {half_written[0]}" if half_written else ""
        findings.add(
            f"it left no complete checkpoint that checkpoint.glob ({pattern}) matches{why}",
            "have the script save to {checkpoint_dir} and the pattern match its files (docs/scripts.md)",
        )
    elif pattern is not None:
        last = baseline.saves[-1]
        step = "of an unknown step" if last.step is None else f"of step {last.step}, {baseline.step_source}"
        kind = "an unknown format" if last.format == "other" else f"the format {last.format}"
        findings.notes.append(f"its last checkpoint is {last.path.name}, in {kind}, {step}")
        if last.step is None:
            findings.notes.append(
                "without steps there is no way to see whether it resumes: put the step into the name, or set "
                "checkpoint.step"
            )
    elif not baseline.run.checkpoints:
        findings.notes.append(
            "it has neither a slurmtrain.session() nor a checkpoint.glob, so each interruption costs all of its work"
        )
    return findings


def judge_script(facts: DrillFacts) -> Findings:
    """What the run after a fault shows about its script."""
    findings, after = Findings(), facts.aftermath
    announced = FAULTS[facts.injected.fault].announced
    if announced:
        _judge_exit(facts, findings)
    if after.survivors:
        findings.add(
            f"{len(after.survivors)} of its processes outlived the stop: {', '.join(after.survivors)}",
            "they would write to the same files as the next attempt: start them without a session of their own, and "
            "end them with the script",
        )
    # A killed rank cannot end the processes that it has started.
    if after.leftovers and announced:
        findings.notes.append(
            f"processes that it had started outlived its ranks and were killed: {', '.join(after.leftovers)}; their "
            "unsaved work is lost, and without slurmtrain they would train beside the next attempt: end them in the "
            "script"
        )
    if after.dead_workers:
        findings.add(
            f"its DataLoader workers died before it had ended: {after.dead_workers[0]}",
            f"a save in progress may be lost with them: {_ADAPTER}",
        )
    if facts.baseline.saves and after.resumed_at is not None and facts.hands_over:
        _judge_resume(facts, after.resumed_at, findings)
    return findings


def _judge_exit(facts: DrillFacts, findings: Findings) -> None:
    """How its ranks ended after the signal, and whether a script that saves its own checkpoints did so."""
    after, name, at = facts.aftermath, facts.stop_signal, facts.injected.at
    codes = after.exit_codes
    killed = [rank for rank, code in codes.items() if code == _KILLED]
    others = {code for code in codes.values() if code not in (0, STOPPED, _KILLED)}
    if killed:
        # Ranks, or commands that start them: by number, or as "node <n>".
        first = f"rank {killed[0]}" if killed[0].isdecimal() else f"the command on {killed[0]}"
        ranks = first if len(killed) == 1 else f"{len(killed)} ranks"
        findings.add(f"{ranks} did not end after {name} and had to be killed", _ADAPTER)
    elif not others and 0 in codes.values() and after.resumed_at is not None:
        findings.notes.append(
            f"its ranks exited with 0 after {name}; that is taken as not finished, so the run was started again. "
            f"Exit with {STOPPED} to say so, or set requeue.exit_zero: completed if 0 means that the work is done"
        )
    if others and min(others) < 0:
        # On Slurm the signal comes twice, and Python restores the default action before it exits.
        findings.notes.append(
            f"its ranks died from {name}: it does not handle the signal, or was exiting when it came again"
        )
    elif others:
        findings.notes.append(f"its ranks exited with code {min(others)} after {name}, which counts as stopped")
    # One that was killed went on training, and so may have saved without regard to the signal.
    if killed or not facts.baseline.saves:
        return
    saved = [s for s in after.saves if s.saved_at >= at and (after.resumed_at is None or s.saved_at < after.resumed_at)]
    if saved:
        findings.notes.append(f"it saved {saved[-1].path.name} after it was asked to stop")
    else:
        interval = facts.baseline.save_interval
        cost = "the work since its last save" if interval is None else f"up to {_count_steps(interval)}"
        findings.notes.append(f"it saved nothing when it was asked to stop, which costs {cost}: {_ADAPTER}")


def _judge_resume(facts: DrillFacts, resumed_at: float, findings: Findings) -> None:
    """Whether a script was handed its newest checkpoint, and continued from it."""
    after, injected = facts.aftermath, facts.injected
    if after.resume_from is None:
        before = [save for save in after.saves if save.saved_at < injected.at]
        if before and injected.half_written:
            findings.add(f"the interrupted save destroyed {before[-1].path.name}, its only checkpoint", _RENAME)
        elif before:
            findings.add(
                f"it was given no checkpoint, although it had saved {before[-1].path.name}",
                "see 'slurmtrain show' for the checkpoints of the run, and checkpoint.glob in docs/scripts.md",
            )
        return
    name = after.resume_from.rstrip("/").rpartition("/")[2]
    if after.resume_from in injected.half_written:
        findings.add(f"it was given {name}, which was only half written", _RENAME)
        return
    handed = next((save.step for save in after.saves if str(save.path) == after.resume_from), None)
    # The first step that the script reported after that, or saved.
    reported = [(time, step) for steps in facts.steps.values() for time, step in steps if time >= resumed_at]
    saved = sorted((each.saved_at, each.step) for each in after.saves if each.step is not None)
    first = next((step for time, step in sorted(reported) or saved if time >= resumed_at), None)
    if handed is None and not facts.baseline.counts_steps:
        findings.notes.append(
            f"it was given {name}, but whether it resumed from it is unknown, because neither its checkpoints nor its "
            "output have steps: report them with slurmtrain.progress(step)"
        )
    elif handed is not None and first is not None and first < handed:
        findings.add(
            f"it was given {name} and did not resume from it: it then reached step {first}",
            "load the file that {resume_from} names in the command, or SLURMTRAIN_RESUME_FROM in the environment",
        )
    elif handed is not None and first is not None and first > handed:
        findings.notes.append(f"it resumed from {name}")


def _count_steps(count: int) -> str:
    return "1 step" if count == 1 else f"{count} steps"
