"""The facts of a drill, and when its faults strike: faults, what was observed, the verdict. Pure.

A fault that strikes while the script still imports its libraries proves nothing. So it waits for evidence that the run
trains: steps, a checkpoint, or at least output. The undisturbed run has shown which of these to expect. The length of
time is no evidence: the next run may take longer to start.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from slurmtrain.model.diagnosis.hang import LEAST_S, SAVE_S, TIMES
from slurmtrain.model.interruption.interval import DEFAULT_GRACE_S
from slurmtrain.model.run.events.base import AnyEvent
from slurmtrain.model.run.run import Run

if TYPE_CHECKING:
    from slurmtrain.runtime.checkpoint.external import ExternalCheckpoint

# The steps of each attempt as (seconds since 1970, finished steps), by the name of the attempt's directory.
Steps = Mapping[str, Sequence[tuple[float, int]]]

# The results of a fault. "Not tried" is never a pass: nothing is known about what the fault would do.
PASSED = "passed"
FAILED = "failed"
NOT_TRIED = "not tried"


@dataclass(frozen=True, slots=True)
class Fault:
    """A kind of fault.

    ``action``: what is done, as a phrase. ``causes``: causes that the run may report for it. ``announced``: the run is
    asked to stop, so it can save first. ``optional``: it is injected only on request. ``may_miss``: a drill can pass
    although it could not be injected.
    """

    name: str
    action: str
    causes: frozenset[str]
    announced: bool = False
    optional: bool = False
    may_miss: bool = False


FAULTS: Mapping[str, Fault] = {
    fault.name: fault
    for fault in (
        Fault("preempt", "SIGTERM to the job, as at a preemption", frozenset({"preempted"}), announced=True),
        Fault("timeout", "SIGUSR2 to the job, as ahead of the time limit", frozenset({"timeout"}), announced=True),
        Fault("rank", "SIGKILL to one rank", frozenset({"crash"})),
        # Whether a save can be hit depends on how long saves take, which is no fault of the script.
        Fault("save", "SIGKILL to all ranks in the middle of a save", frozenset({"crash"}), may_miss=True),
        # Without the agent nothing is left to journal a cause: Slurm's state, or what other agents noticed, decides.
        Fault("agent", "SIGKILL to the agent of one node", frozenset({"node_fail", "lost", "crash"})),
        Fault("all", "SIGKILL to everything of the job", frozenset({"node_fail", "lost", "crash"})),
        # Without requeue.hang_after it takes at least a minute to be noticed.
        Fault("hang", "SIGSTOP to one rank", frozenset({"hang"}), optional=True),
    )
}


@dataclass(frozen=True, slots=True, kw_only=True)
class InjectedFault:
    """A fault as it was injected.

    ``at``: seconds since 1970. ``moment``: how far the run had come, as a phrase. ``attempt``: the key of the attempt
    that it hit, after ``restarts`` in-place restarts and at ``step``. ``target``: the processes that it hit, as a
    phrase. ``half_written``: the checkpoints that a save was writing then, for a fault that waits for one.
    """

    fault: str
    at: float
    attempt: str
    restarts: int = 0
    step: int | None = None
    target: str = ""
    moment: str = ""
    half_written: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class TensorDifference:
    """A tensor that differs between two checkpoints. ``max_abs``: the largest absolute difference of its elements."""

    name: str
    max_abs: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointComparison:
    """How the last checkpoints of two runs differ. ``identical``: None if they cannot be compared; ``why`` says why.

    ``method``: ``hashes``; ``values`` for slurmtrain's checkpoints; ``tensors`` for a script's own, or ``files`` if
    their format is unknown; empty if nothing was compared. ``difference``: the largest relative difference of any
    tensor, and ``where`` it is. ``max_abs``: the largest absolute difference of any tensor. ``differing``: tensors
    that differ, the largest difference first, perhaps not all of the ``count`` that do. ``others``: the names of other
    values that differ, which does not matter in a script's own checkpoints. ``steps``: of both checkpoints, if they
    differ.
    """

    identical: bool | None
    method: str = ""
    why: str = ""
    difference: float | None = None
    where: str = ""
    max_abs: float | None = None
    differing: Sequence[TensorDifference] = ()
    count: int = 0
    others: Sequence[str] = ()
    steps: tuple[int, int] | None = None

    def describe(self) -> str:
        """A predicate whose subject is the last checkpoint of the second run: "is bit-identical"."""
        if self.identical:
            others = f", except for {', '.join(self.others)}, which are not tensors" if self.others else ""
            return f"is bit-identical{others}"
        if self.identical is None:
            return f"cannot be compared: {self.why}"
        where = f" in {self.where}" if self.where else ""
        others = f" and {self.count - 1} more" if where and self.count > 1 else ""
        amounts = {"relative": self.difference, "absolute": self.max_abs}
        most = ", ".join(f"{amount:.2g} ({kind})" for kind, amount in amounts.items() if amount is not None)
        return f"differs{where}{others}{f' by at most {most}' if most else ''}"

    def to_dict(self) -> dict[str, Any]:
        """The form that ``--json`` prints."""
        return {
            "identical": self.identical,
            "how": self.method or None,
            "why": self.why or None,
            "difference": _finite(self.difference),
            "where": self.where or None,
            "max_abs": _finite(self.max_abs),
            "differing": [{"name": each.name, "max_abs": _finite(each.max_abs)} for each in self.differing],
            "differing_count": self.count,
            "other_values": list(self.others),
            "steps": list(self.steps) if self.steps else None,
        }


@dataclass(frozen=True, slots=True)
class DrillProblem:
    """Something that is wrong, and what to do about it; both without a full stop."""

    problem: str
    advice: str

    def to_dict(self) -> dict[str, str]:
        """The form that ``--json`` prints."""
        return {"what": self.problem, "advice": self.advice}


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """What the undisturbed run has shown; it decides when faults strike and what is expected after them.

    ``run``: its final state. ``saves``: the checkpoints that its script saved itself, oldest first. ``lines``: how many
    lines its ranks printed. ``seconds``: from the start of its first attempt to its end. ``step_source``: where the
    step of its last own checkpoint comes from, as a phrase.
    """

    run: Run
    saves: Sequence[ExternalCheckpoint] = ()
    lines: int = 0
    seconds: float = 0.0
    step_source: str = ""

    @property
    def counts_steps(self) -> bool:
        """Whether its script reports steps: by a session, or by slurmtrain.progress() or log()."""
        return self.run.step is not None

    @property
    def saves_early(self) -> bool:
        """Whether it had saved something before its last save, which may be at its end."""
        published = [checkpoint for checkpoint in self.run.checkpoints if checkpoint.why not in ("end", "found")]
        return bool(published) or len(self.saves) > 1

    @property
    def save_interval(self) -> int | None:
        """The largest number of steps between two of its script's saves; None if unknown."""
        steps = sorted({save.step for save in self.saves if save.step is not None})
        return max((b - a for a, b in itertools.pairwise(steps)), default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Aftermath:
    """What was seen of a script after a fault, apart from the journals.

    ``exit_codes``: exit code of each rank that was asked to stop, by rank or node; negative for a signal.
    ``survivors``: processes of the struck ranks that were still alive after the stop, as phrases. ``leftovers``:
    processes that outlived their ranks and were killed. ``dead_workers``: messages of ranks about DataLoader workers
    that died. ``saves``: the checkpoints that the script saved itself, in order of time. ``resume_from``: the
    checkpoint that the next ranks were told to resume from; ``resumed_at``: when they started, in seconds since 1970,
    None if none did.
    """

    exit_codes: Mapping[str, int] = field(default_factory=dict)
    survivors: Sequence[str] = ()
    leftovers: Sequence[str] = ()
    dead_workers: Sequence[str] = ()
    saves: Sequence[ExternalCheckpoint] = ()
    resume_from: str | None = None
    resumed_at: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DrillFacts:
    """The facts that a verdict is based on.

    ``run``: its final state; ``events``: from its journals, at least the kinds session, restored and requeue.
    ``aftermath``: everything else that was seen; ``baseline``: the undisturbed run. ``grace_s``: time that an announced
    stop may take, in seconds. ``hang_after``: the spec's ``hang_after``, in seconds. ``noise``: how two undisturbed
    runs differ; None if that was not tried. ``world_sizes``: world sizes of the undisturbed run. ``ended_by_drill``:
    why the drill has ended the run itself; empty if it has not. ``stop_signal``: the name of the signal that asks the
    script to stop. ``hands_over``: whether the script is told which checkpoint to resume from, instead of finding it
    itself.
    """

    run: Run
    injected: InjectedFault
    events: Sequence[AnyEvent]
    steps: Steps
    comparison: CheckpointComparison
    baseline: Baseline
    aftermath: Aftermath = field(default_factory=Aftermath)
    grace_s: float = DEFAULT_GRACE_S
    hang_after: float | None = None
    noise: CheckpointComparison | None = None
    world_sizes: Collection[int] = ()
    ended_by_drill: str = ""
    stop_signal: str = "SIGTERM"
    hands_over: bool = True

    @property
    def deterministic(self) -> bool | None:
        """Whether two undisturbed runs end alike; None if unknown."""
        return self.noise.identical if self.noise is not None else None


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultVerdict:
    """How a run survived a fault. Seconds count from the fault; None: does not apply, or unknown.

    ``stopped_s``: until the last rank had ended. ``allowed_s``: how long that may take. ``restarted_s``: until
    ``restarted_by`` started the run again. ``step_s``: until it had finished the next step. ``notes``: what the user
    should know although it is not a problem. ``not_tried``: why nothing can be said about the fault; empty if it struck
    a run that trained.
    """

    fault: str
    run_id: str
    injected: InjectedFault | None = None
    cause: str | None = None
    stopped_s: float | None = None
    allowed_s: float | None = None
    lost_steps: int | None = None
    resumed_at: int | None = None
    restarted_by: str | None = None
    restarted_s: float | None = None
    step_s: float | None = None
    attempts: int = 0
    restarts: int = 0
    state: str = ""
    comparison: CheckpointComparison = field(default_factory=lambda: CheckpointComparison(identical=None))
    aftermath: Aftermath = field(default_factory=Aftermath)
    problems: Sequence[DrillProblem] = ()
    notes: Sequence[str] = ()
    not_tried: str = ""

    @property
    def passed(self) -> bool:
        """Whether the fault struck, and nothing is wrong."""
        return self.result == PASSED

    @property
    def acceptable(self) -> bool:
        """Whether a drill passes with this verdict."""
        return self.passed or (self.result == NOT_TRIED and FAULTS[self.fault].may_miss)

    @property
    def result(self) -> str:
        """``passed``, ``failed`` or ``not tried``. A run that fails without the fault has failed."""
        if self.problems:
            return FAILED
        return NOT_TRIED if self.not_tried else PASSED

    def to_dict(self) -> dict[str, Any]:
        """The form that ``--json`` prints."""
        # The keys are a contract, and older than the field names.
        injected, after = self.injected, self.aftermath
        facts = (
            "fault", "passed", "result", "cause", "lost_steps", "resumed_at", "attempts", "restarts", "state", "notes",
        )  # fmt: skip
        return {
            **{name: getattr(self, name) for name in facts},
            **{name: _milliseconds(getattr(self, name)) for name in ("stopped_s", "allowed_s", "step_s")},
            **{name: getattr(after, name) for name in ("exit_codes", "survivors", "leftovers", "resume_from")},
            "run_id": self.run_id or None,
            "not_tried": self.not_tried or None,
            "on": injected.target if injected else None,
            "at_step": injected.step if injected else None,
            "moment": (injected.moment or None) if injected else None,
            "started_by": self.restarted_by,
            "started_s": _milliseconds(self.restarted_s),
            "half_written": list(injected.half_written) if injected else [],
            "comparison": self.comparison.to_dict(),
            "problems": [problem.to_dict() for problem in self.problems],
        }


def _finite(number: float | None) -> float | None:
    """The number, or None for what JSON does not have: a difference to NaN."""
    return number if number is not None and math.isfinite(number) else None


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 3)


# Where its checkpoints are late, a run that counts steps is struck after this share of them, before it might end.
_SHARE_OF_STEPS = 1 / 2
# With no other evidence, a run is struck once it has printed this share of what the undisturbed run did.
_SHARE_OF_LINES = 1 / 2
# How much longer than the undisturbed run a disturbed one may train: other runs may share its machine.
_LONGER = 3.0
_LONGER_S = 120.0
# How long to watch a hang that nothing can notice.
UNNOTICED_HANG_S = 10.0
# How long agents may take to notice the death of a rank or of another agent, and to end the others: generous.
_DEATH_S = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sighting:
    """How far a running attempt has come.

    ``first_step`` and ``last_step``: finished steps when its ranks started, and now; None if it reports none.
    ``saved``: the path or step of its newest checkpoint, as a phrase, empty without one. ``saves``: the checkpoints
    that the script itself has saved in this attempt. ``lines``: how many lines its ranks have printed.
    """

    first_step: int | None = None
    last_step: int | None = None
    total_steps: int | None = None
    saved: str = ""
    saves: Sequence[ExternalCheckpoint] = ()
    lines: int = 0


def strike_moment(baseline: Baseline, sighting: Sighting) -> str | None:
    """How far the run has come, as a phrase, if a fault may strike now; None if it is too early."""
    if baseline.counts_steps:
        first, last = sighting.first_step, sighting.last_step
        # A rank that has not finished a step of this attempt may still be in its setup.
        if last is None or last <= (first or 0):
            return None
        if sighting.saved:
            return f"after step {last}, with {sighting.saved}"
        half = sighting.total_steps is not None and last >= _SHARE_OF_STEPS * sighting.total_steps
        return f"after step {last}, before its first checkpoint" if half or not baseline.saves_early else None
    if sighting.saves:
        # Not after the very first one, if there will be more: a run that starts from the beginning again instead of
        # resuming gives itself away by saving an earlier step than the one that it was handed.
        steps = sorted({save.step for save in baseline.saves if save.step is not None})
        newest = max((save.step for save in sighting.saves if save.step is not None), default=None)
        if len(steps) > 2 and newest is not None and newest <= steps[0]:
            return None
        return f"after its checkpoint {sighting.saves[-1].path.name}"
    if len(baseline.saves) <= 1 and sighting.lines and sighting.lines >= baseline.lines * _SHARE_OF_LINES:
        return f"after line {sighting.lines} of its output"
    return None


def why_never(baseline: Baseline) -> str:
    """Why no fault can be injected into a run like the undisturbed one; empty if one can."""
    if baseline.counts_steps or baseline.saves or baseline.lines:
        return ""
    return "it reports no step, leaves no checkpoint and prints nothing, so there is no way to see when it trains"


# --- how long to wait -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long a drill waits for a run before it ends the run itself. All in seconds.

    ``grace_s``: how long an announced stop may take. ``hang_after``: the spec's; None: judged by the step time.
    """

    baseline: Baseline
    grace_s: float
    hang_after: float | None = None

    @property
    def train_s(self) -> float:
        """How long one start of the run may train."""
        return max(_LONGER * self.baseline.seconds, self.baseline.seconds + _LONGER_S)

    def stop_s(self, fault: str) -> float:
        """How long the struck ranks may take to end."""
        if fault != "hang":
            # Longer than the grace: whether a stop was in time is judged later, and here only its end is awaited.
            return 2 * self.grace_s + LEAST_S if FAULTS[fault].announced else _DEATH_S
        if not self.baseline.counts_steps:
            return UNNOTICED_HANG_S
        steps = self.baseline.run.step or 1
        # As the watchdog judges a hang, but by the mean step of the undisturbed run.
        usual = self.hang_after if self.hang_after is not None else max(LEAST_S, TIMES * self.baseline.seconds / steps)
        return 2 * usual + SAVE_S


def overdue(run: Run, injected: InjectedFault | None, patience: Patience, now: float) -> str:
    """Why the drill should end a run itself at ``now`` (seconds since 1970), without a full stop; empty: not yet.

    Time in the queue does not count: Slurm bounds it, not the run.

    Args:
        run: Its state, just read.
        injected: The fault; None if it has not been injected yet.
        patience: How long to wait.
        now: The time.
    """
    newest = run.newest
    if run.ended or newest is None or newest.started_at is None or newest.ended:
        return ""
    if injected is not None and newest.key == injected.attempt and len(newest.restarts) <= injected.restarts:
        waited, limit_s = now - injected.at, patience.stop_s(injected.fault)
        return f"nothing had ended its ranks {waited:.0f} s after the fault" if waited > limit_s else ""
    began = max([newest.started_at, *(float(restart["at"]) for restart in newest.restarts)])
    if now - began <= patience.train_s:
        return ""
    after = "it was still running" if injected else "nothing showed that it trains"
    usual_s = patience.baseline.seconds
    return f"{after} {now - began:.0f} s after it started, and the undisturbed run took {usual_s:.0f} s"
