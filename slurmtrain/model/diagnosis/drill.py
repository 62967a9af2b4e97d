"""The data types of a fire drill: faults, how one was injected, what was observed, and the verdict. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from slurmtrain.model.interruption.interval import DEFAULT_GRACE_S
from slurmtrain.model.run.events.base import AnyEvent
from slurmtrain.model.run.run import Run

# The steps of each attempt as (seconds since 1970, finished steps), by the name of the attempt's directory.
Steps = Mapping[str, Sequence[tuple[float, int]]]


@dataclass(frozen=True, slots=True)
class Fault:
    """A kind of fault.

    ``action``: what is done, as a phrase. ``causes``: causes that the run may report for it. ``announced``: the run is
    asked to stop, so it can save first. ``optional``: it is injected only on request.
    """

    name: str
    action: str
    causes: frozenset[str]
    announced: bool = False
    optional: bool = False


FAULTS: Mapping[str, Fault] = {
    fault.name: fault
    for fault in (
        Fault("preempt", "SIGTERM to the job, as at a preemption", frozenset({"preempted"}), announced=True),
        Fault("timeout", "SIGUSR2 to the job, as ahead of the time limit", frozenset({"timeout"}), announced=True),
        Fault("rank", "SIGKILL to one rank", frozenset({"crash"})),
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

    ``at``: seconds since 1970. ``attempt``: the key of the attempt that it hit, after ``restarts`` in-place restarts
    and at ``step``. ``target``: the processes that it hit, as a phrase.
    """

    fault: str
    at: float
    attempt: str
    restarts: int = 0
    step: int | None = None
    target: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointComparison:
    """How the last checkpoints of two runs differ. ``identical``: None if they cannot be compared; ``why`` says why.

    ``method``: ``hashes``, ``values``, or ``files`` for a script's own checkpoints; empty if nothing was compared.
    ``difference``: the largest relative difference of any tensor, and ``where`` it is.
    """

    identical: bool | None
    method: str = ""
    why: str = ""
    difference: float | None = None
    where: str = ""

    def describe(self) -> str:
        """A predicate whose subject is the last checkpoint of the second run: "is bit-identical"."""
        if self.identical:
            return "is bit-identical"
        if self.identical is None:
            return f"cannot be compared: {self.why}"
        where = f" in {self.where}" if self.where else ""
        return f"differs{where}" + (f" by {self.difference:.2g} (relative)" if self.difference is not None else "")

    def to_dict(self) -> dict[str, Any]:
        """The form that ``--json`` prints."""
        return {
            "identical": self.identical,
            "how": self.method or None,
            "why": self.why or None,
            "difference": self.difference,
            "where": self.where or None,
        }


@dataclass(frozen=True, slots=True)
class DrillProblem:
    """Something that is wrong, and what to do about it; both without a full stop."""

    problem: str
    advice: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DrillFacts:
    """What a verdict is based on.

    ``run``: its final state; ``events``: from its journals, at least the kinds session, restored and requeue.
    ``grace_s``: seconds that an announced stop may take. ``hang_after``: the spec's, in seconds. ``deterministic``:
    whether two undisturbed runs end alike; None if that was not tried. ``world_sizes``: those of the undisturbed run.
    """

    run: Run
    injected: InjectedFault
    events: Sequence[AnyEvent]
    steps: Steps
    comparison: CheckpointComparison
    grace_s: float = DEFAULT_GRACE_S
    hang_after: float | None = None
    deterministic: bool | None = None
    world_sizes: Collection[int] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultVerdict:
    """How a run survived a fault. Seconds count from the fault; None: does not apply, or unknown.

    ``stopped_s``: until the last rank had ended. ``allowed_s``: how long that may take. ``restarted_s``: until
    ``restarted_by`` started the run again. ``step_s``: until it had finished the next step. ``notes``: what the user
    should know although it is not a problem.
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
    problems: Sequence[DrillProblem] = ()
    notes: Sequence[str] = ()

    @property
    def passed(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems

    def to_dict(self) -> dict[str, Any]:
        """The form that ``--json`` prints."""
        # The keys are a contract, and older than the field names.
        injected = self.injected
        return {
            "fault": self.fault,
            "run_id": self.run_id or None,
            "passed": self.passed,
            "on": injected.target if injected else None,
            "at_step": injected.step if injected else None,
            "cause": self.cause,
            "stopped_s": _rounded(self.stopped_s),
            "allowed_s": _rounded(self.allowed_s),
            "lost_steps": self.lost_steps,
            "resumed_at": self.resumed_at,
            "started_by": self.restarted_by,
            "started_s": _rounded(self.restarted_s),
            "step_s": _rounded(self.step_s),
            "attempts": self.attempts,
            "restarts": self.restarts,
            "state": self.state,
            "comparison": self.comparison.to_dict(),
            "problems": [{"what": problem.problem, "advice": problem.advice} for problem in self.problems],
            "notes": list(self.notes),
        }


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 3)
