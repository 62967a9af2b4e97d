"""What a fault that was inflicted on a run on purpose has shown: whether the run came through it as it should. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from slurmtrain.model.interruption.interval import DEFAULT_GRACE_S
from slurmtrain.model.run.events.base import AnyEvent
from slurmtrain.model.run.layout import attempt_of
from slurmtrain.model.run.run import Attempt, Run

# How long agents may take to notice that a rank or another node is gone, and to end the ranks that are left.
NOTICED_S = 60.0
# The same once ranks count as hanging: to look at all of them, and to end them.
HANG_ENDED_S = 30.0
# Slurm and agents tell times of one moment in another order.
_SKEW_S = 1.0

AGENTS_IN_PLACE = "agents, in place"
AGENTS_REQUEUE = "agents, by requeue"
SLURM = "Slurm"
SYNC = "sync"

# Steps of an attempt as (seconds since 1970, finished steps), by the name of the attempt's directory.
Steps = Mapping[str, Sequence[tuple[float, int]]]


@dataclass(frozen=True, slots=True)
class Fault:
    """A kind of fault. ``words``: what is done. ``announced``: the run is asked to stop, and may save first.

    ``causes``: what the run may take it for.
    """

    name: str
    words: str
    causes: frozenset[str]
    announced: bool = False
    asked_for: bool = False
    """Whether it is inflicted only where somebody asks for it."""


FAULTS: Mapping[str, Fault] = {
    fault.name: fault
    for fault in (
        Fault("preempt", "SIGTERM to the job, as at a preemption", frozenset({"preempted"}), announced=True),
        Fault("timeout", "SIGUSR2 to the job, as ahead of the time limit", frozenset({"timeout"}), announced=True),
        Fault("rank", "SIGKILL to one rank", frozenset({"crash"})),
        Fault("agent", "SIGKILL to the agent of one node", frozenset({"node_fail", "lost", "crash"})),
        Fault("all", "SIGKILL to everything of the job", frozenset({"node_fail", "lost", "crash"})),
        Fault("hang", "SIGSTOP to one rank", frozenset({"hang"}), asked_for=True),
    )
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Injected:
    """A fault as it was inflicted: on which attempt (its key), after how many restarts in place, at which step.

    ``at``: seconds since 1970. ``on``: what it hit, in words.
    """

    fault: str
    at: float
    attempt: str
    restarts: int = 0
    step: int | None = None
    on: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What the last checkpoints of two runs have in common. ``identical``: None where nobody can tell; ``why`` says so.

    ``how``: ``hashes``, ``values``, or ``files`` for a script's own; empty where nothing was compared. ``difference``:
    the largest relative one of any tensor, and ``where`` it is.
    """

    identical: bool | None
    how: str = ""
    why: str = ""
    difference: float | None = None
    where: str = ""

    def to_dict(self) -> dict[str, Any]:
        """As ``--json`` has it."""
        return {
            "identical": self.identical,
            "how": self.how or None,
            "why": self.why or None,
            "difference": self.difference,
            "where": self.where or None,
        }


@dataclass(frozen=True, slots=True)
class DrillProblem:
    """Something that is not as it should be, and what to do about it; both without their full stops."""

    what: str
    advice: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DrillFacts:
    """What a verdict is made of. ``run``: as it was at its end; ``events``: all of its journals.

    ``grace_s``: seconds that an announced stop may take. ``hang_after``: as the spec has it. ``deterministic``: whether
    two undisturbed runs end alike; None where nobody has tried. ``world_sizes``: of the undisturbed run.
    """

    run: Run
    injected: Injected
    events: Sequence[AnyEvent]
    steps: Steps
    comparison: Comparison
    grace_s: float = DEFAULT_GRACE_S
    hang_after: float | None = None
    deterministic: bool | None = None
    world_sizes: Collection[int] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultVerdict:
    """How a run came through a fault. Seconds count from the fault; None: it does not apply, or nobody knows.

    ``stopped_s``: until the last rank had ended. ``allowed_s``: how long that may have taken. ``again_s``: until the
    run was started again, ``by`` whom. ``step_s``: until it had finished a step again. ``notes``: what a person should
    know that is no problem.
    """

    fault: str
    run_id: str
    injected: Injected | None = None
    cause: str | None = None
    stopped_s: float | None = None
    allowed_s: float | None = None
    lost_steps: int | None = None
    resumed_at: int | None = None
    by: str | None = None
    again_s: float | None = None
    step_s: float | None = None
    attempts: int = 0
    restarts: int = 0
    state: str = ""
    comparison: Comparison = field(default_factory=lambda: Comparison(identical=None))
    problems: Sequence[DrillProblem] = ()
    notes: Sequence[str] = ()

    @property
    def passed(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems

    def to_dict(self) -> dict[str, Any]:
        """As ``--json`` has it."""
        hit = self.injected
        return {
            "fault": self.fault,
            "run_id": self.run_id or None,
            "passed": self.passed,
            "on": hit.on if hit else None,
            "at_step": hit.step if hit else None,
            "cause": self.cause,
            "stopped_s": _rounded(self.stopped_s),
            "allowed_s": _rounded(self.allowed_s),
            "lost_steps": self.lost_steps,
            "resumed_at": self.resumed_at,
            "started_by": self.by,
            "started_s": _rounded(self.again_s),
            "step_s": _rounded(self.step_s),
            "attempts": self.attempts,
            "restarts": self.restarts,
            "state": self.state,
            "comparison": self.comparison.to_dict(),
            "problems": [{"what": one.what, "advice": one.advice} for one in self.problems],
            "notes": list(self.notes),
        }


@dataclass(frozen=True, slots=True)
class _Next:
    """What followed the fault: by whom the run was started again, when, and from which step it went on."""

    by: str
    at: float
    trains_since: float
    key: str
    first_step: int | None


def judge(facts: DrillFacts) -> FaultVerdict:
    """The verdict on one run; raises nothing."""
    run, hit = facts.run, facts.injected
    struck = next((one for one in run.attempts if one.key == hit.attempt), None)
    followed = _next(facts, struck, hit)
    lost = struck.lost_steps if struck is not None else None
    verdict = FaultVerdict(
        fault=hit.fault,
        run_id=run.id,
        injected=hit,
        cause=_cause(struck, hit),
        stopped_s=_stopped(struck, hit, followed),
        allowed_s=_allowed(facts, hit),
        lost_steps=lost,
        resumed_at=followed.first_step if followed else None,
        by=followed.by if followed else None,
        again_s=None if followed is None else max(0.0, followed.at - hit.at),
        step_s=_step(facts, hit, followed),
        attempts=len(run.attempts),
        restarts=sum(len(attempt.restarts) for attempt in run.attempts),
        state=run.state,
        comparison=facts.comparison,
    )
    problems = [*_of_stop(verdict), *_of_steps(verdict, facts), *_of_start(verdict, run), *_of_end(verdict, facts)]
    return replace(verdict, problems=tuple(problems), notes=tuple(_notes(verdict, facts)))


def never_hit(fault: str, run: Run, why: str = "") -> FaultVerdict:
    """The verdict on a run that ended before the fault could be inflicted; or on which it could not be: ``why``."""
    return FaultVerdict(
        fault=fault, run_id=run.id, attempts=len(run.attempts), state=run.state, problems=[_never_hit(run, why)]
    )


def never_submitted(fault: str, why: str) -> FaultVerdict:
    """The verdict where there is no run: it could not be submitted."""
    advice = "try the fault again, alone, with --fault"
    return FaultVerdict(
        fault=fault, run_id="", state="-", problems=[DrillProblem(f"it could not be submitted: {why}", advice)]
    )


# --- what happened ----------------------------------------------------------------------------------------------------


def _cause(struck: Attempt | None, hit: Injected) -> str | None:
    """What the run took the fault for."""
    if struck is None:
        return None
    if len(struck.restarts) > hit.restarts:
        return str(struck.restarts[hit.restarts].get("cause"))
    return struck.cause


def _next(facts: DrillFacts, struck: Attempt | None, hit: Injected) -> _Next | None:
    """How the run went on; None if it did not."""
    if struck is None:
        return None
    if len(struck.restarts) > hit.restarts:
        at = float(struck.restarts[hit.restarts]["at"])
        return _Next(AGENTS_IN_PLACE, at, at, struck.key, _first_step(facts, struck, at))
    after = [one for one in facts.run.attempts if one.number > struck.number]
    if not after:
        return None
    following = after[0]
    began = following.started_at or following.submitted_at or hit.at
    first = _first_step(facts, following, began - _SKEW_S)
    if following.job_id != struck.job_id:
        by = SYNC if following.asked_by == "sync" else following.asked_by
        return _Next(by, following.submitted_at or began, began, following.key, first)
    by = AGENTS_REQUEUE if _said(facts.events, struck, "requeue") else SLURM
    return _Next(by, began, began, following.key, first)


def _first_step(facts: DrillFacts, attempt: Attempt, since: float) -> int | None:
    """The step that the ranks of an attempt went on from, the first time after ``since``; None without a session."""
    told = [e for e in facts.events if e.kind in ("session", "restored") and attempt_of(e.source) == attempt.key]
    later = sorted((event for event in told if event.time >= since), key=lambda event: event.order)
    if not later:
        return None
    # A restore follows the beginning of its session, in the same journal.
    return max(int(event.data.get("step", 0)) for event in later if event.source == later[0].source)


def _said(events: Sequence[AnyEvent], attempt: Attempt, kind: str) -> bool:
    return any(event.kind == kind and attempt_of(event.source) == attempt.key for event in events)


def _stopped(struck: Attempt | None, hit: Injected, followed: _Next | None) -> float | None:
    if struck is None or hit.fault == "all":
        return None
    if followed is not None and followed.by == AGENTS_IN_PLACE:
        return max(0.0, followed.at - hit.at)
    return None if struck.ended_at is None else max(0.0, struck.ended_at - hit.at)


def _allowed(facts: DrillFacts, hit: Injected) -> float | None:
    """How long the ranks may have taken to end; None where nobody can say."""
    if FAULTS[hit.fault].announced:
        return facts.grace_s
    if hit.fault == "hang":
        return None if facts.hang_after is None else facts.hang_after + HANG_ENDED_S
    return None if hit.fault == "all" else NOTICED_S


def _step(facts: DrillFacts, hit: Injected, followed: _Next | None) -> float | None:
    if followed is None:
        return None
    times = [t for t, _ in facts.steps.get(followed.key, ()) if t >= max(hit.at, followed.trains_since)]
    return min(times) - hit.at if times else None


# --- what of it is wrong ----------------------------------------------------------------------------------------------


def _of_stop(verdict: FaultVerdict) -> list[DrillProblem]:
    problems = []
    fault = FAULTS[verdict.fault]
    if verdict.stopped_s is not None and verdict.allowed_s is not None and verdict.stopped_s > verdict.allowed_s:
        what = f"its ranks ended after {verdict.stopped_s:.0f} s, and had {verdict.allowed_s:.0f} s"
        saves = "make saves faster (docs/checkpoint-interval.md), or ask the site for a longer GraceTime"
        problems.append(
            DrillProblem(what, saves if fault.announced else "see 'slurmtrain show' for what it waited for")
        )
    if verdict.cause is not None and verdict.cause not in fault.causes:
        meant = " or ".join(sorted(fault.causes))
        advice = "another end may have come first: repeat the drill, and look at 'slurmtrain show' if it is so again"
        problems.append(DrillProblem(f"the run took it for {verdict.cause}, not {meant}", advice))
    return problems


def _of_steps(verdict: FaultVerdict, facts: DrillFacts) -> list[DrillProblem]:
    lost = verdict.lost_steps
    if FAULTS[verdict.fault].announced and lost:
        return [
            DrillProblem(
                f"{_steps(lost)} lost, though the stop was announced",
                "it did not save within its grace: save with slurmtrain.session(), and make saves, or steps, faster "
                "(docs/runs.md)",
            )
        ]
    saved = _saved(facts)
    if verdict.resumed_at is not None and saved and verdict.resumed_at < max(saved):
        return [
            DrillProblem(
                f"it went on from step {verdict.resumed_at}, though step {max(saved)} was saved",
                f"'slurmtrain verify {verdict.run_id}' tells whether that checkpoint is damaged",
            )
        ]
    return []


def _saved(facts: DrillFacts) -> list[int]:
    """The steps that were saved when the fault struck."""
    before = [one for one in facts.run.checkpoints if one.complete and one.saved_at < facts.injected.at]
    return [one.step for one in before if one.step is not None]


def _of_start(verdict: FaultVerdict, run: Run) -> list[DrillProblem]:
    if verdict.by is not None:
        return []
    return [
        DrillProblem(
            f"nobody started it again: {run.reason or run.state}",
            "see section 'requeue' of docs/spec.md for what starts again, and docs/watch.md for who does it",
        )
    ]


def _of_end(verdict: FaultVerdict, facts: DrillFacts) -> list[DrillProblem]:
    if facts.run.state != "completed" and verdict.by is None:
        return []  # that says it all
    if facts.run.state != "completed":
        said = f": {facts.run.reason}" if facts.run.reason else ""
        return [DrillProblem(f"it ended as {facts.run.state}{said}", f"'slurmtrain doctor {verdict.run_id}' says more")]
    found = facts.comparison
    if found.identical is not False or _may_differ(facts):
        return []
    advice = (
        "two undisturbed runs end alike, so state is missing in its checkpoints: hand all of it to run.checkpoint(), "
        "and let data follow the step (docs/scripts.md)"
        if facts.deterministic
        else "a second undisturbed run would tell whether the script ends alike twice at all: --twice makes one"
    )
    return [DrillProblem(f"its last checkpoint {in_words(found)}", advice)]


def _may_differ(facts: DrillFacts) -> bool:
    """Whether a different end says nothing: the script never ends alike, or other numbers of ranks took part."""
    return facts.deterministic is False or _resized(facts)


def _resized(facts: DrillFacts) -> bool:
    told = {int(event.data.get("world_size", 0)) for event in facts.events if event.kind == "session"}
    return len(told | set(facts.world_sizes)) > 1


def _never_hit(run: Run, why: str) -> DrillProblem:
    if why:
        advice = "it needs srun --overlap inside a job, and scancel --signal: ask the site whether they are allowed"
        return DrillProblem(f"the fault could not be inflicted: {why}", advice)
    if run.state != "completed":
        said = f": {run.reason}" if run.reason else ""
        return DrillProblem(
            f"it ended as {run.state} before the fault{said}", f"'slurmtrain doctor {run.id}' says more"
        )
    return DrillProblem(
        "it was over before the fault: nothing was tried",
        "make it longer, or have it save sooner, as with checkpoint.every.steps=5 behind the spec",
    )


def in_words(found: Comparison) -> str:
    """What a comparison says of a checkpoint: it is ..."""
    if found.identical:
        return "is bit-identical"
    if found.identical is None:
        return f"cannot be compared: {found.why}"
    where = f" in {found.where}" if found.where else ""
    return f"differs{where}" + (f" by {found.difference:.2g}, relatively" if found.difference is not None else "")


# --- what a person should know ----------------------------------------------------------------------------------------


def _notes(verdict: FaultVerdict, facts: DrillFacts) -> list[str]:
    notes = []
    more = len(facts.run.attempts) + verdict.restarts - 1 - int(verdict.by is not None)
    if more > 0:
        notes.append(f"it was interrupted {_times(more)} besides: times and lost steps may not be the fault's alone")
    if verdict.lost_steps is None and facts.run.step is None:
        notes.append("its script has no slurmtrain.session(), so nobody counts its steps")
    elif not FAULTS[verdict.fault].announced and not _saved(facts):
        notes.append("it had saved nothing when it was struck: checkpoint.every.steps makes it save sooner")
    found = facts.comparison
    if facts.run.state == "completed" and found.identical is None:
        notes.append(f"its last checkpoint {in_words(found)}")
    if found.identical is False and _may_differ(facts):
        why = (
            "other numbers of ranks took part"
            if _resized(facts)
            else "two undisturbed runs of this script differ as well"
        )
        notes.append(f"its last checkpoint {in_words(found)}; {why}")
    return notes


def _steps(count: int) -> str:
    return "1 step was" if count == 1 else f"{count} steps were"


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 3)
