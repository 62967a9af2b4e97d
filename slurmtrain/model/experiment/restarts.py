"""The section `requeue` of a spec: what happens to an interrupted run."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from slurmtrain.model.experiment.kinds import (
    Amount,
    Count,
    Scalar,
    Section,
    choice,
    finite_number,
    keys_of,
    read_all,
    whole_number,
)
from slurmtrain.model.experiment.values import Span, parse_memory, parse_span, write_duration

_FACTOR = re.compile(r"x(\d{1,3}(?:\.\d{1,3})?)")


def _read_factor(value: object) -> float:
    match = _FACTOR.fullmatch(value) if isinstance(value, str) else None
    if match is None or float(match[1]) <= 1:
        raise ValueError(f"expected a factor above 1 such as 'x2', found {value!r}")
    return float(match[1])


def _read_whole_factor(value: object) -> int:
    try:
        factor = _read_factor(value)
    except ValueError:
        factor = 0.5
    # A batch is divided into whole numbers of parts.
    if factor != int(factor):
        raise ValueError(f"expected a whole factor above 1 such as 'x2', found {value!r}")
    return int(factor)


def _write_factor(factor: float) -> str:
    return f"x{factor:g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class OomSpec:
    """What a run gets that ran out of memory: more of it, or smaller parts of its batch."""

    mem: Annotated[float, Scalar("factor such as `x2`", _read_factor, _write_factor)] = 2.0
    """If the memory of a node did not suffice: it is started again with so many times its `resources.mem`, in a new job
    on the cluster."""
    at_most: (
        Annotated[int, Scalar("amount with a unit, such as `64GB`", parse_memory, lambda mib: f"{mib}M")] | None
    ) = None
    """As long as that is not above this. null: it gets no more memory."""
    accumulation: Annotated[int, Scalar("whole factor such as `x2`", _read_whole_factor, _write_factor)] | None = None
    """If the memory of a GPU did not suffice, or that of a node and it gets no more: it is started again with so many
    times its `resources.accumulation`. null: it fails."""
    max_accumulation: Annotated[int, whole_number(2)] = 16
    """As long as that is not above this; then it fails."""

    @staticmethod
    def require(written: Mapping[str, Any]) -> None:
        """Raise ValueError unless one of the two keys is ``written`` that say what a run may get."""
        # With a mistake in one of them, or in its name, that is what the user meant to say.
        if written.keys() <= {"mem", "max_accumulation"}:
            raise ValueError("what may it get? set 'at_most', such as '64GB', or 'accumulation', such as 'x2'")


# sbatch(1), --signal: the seconds are a number of 16 bits.
_LONGEST_LEAD_S = 65535
EXIT_ZERO = ("auto", "completed")


def _read_lead(value: object) -> int:
    """``requeue.lead``, in seconds. Raises ValueError."""
    seconds = parse_span(value)
    if seconds > _LONGEST_LEAD_S:
        raise ValueError(f"Slurm takes at most {_LONGEST_LEAD_S}s, found {value!r}")
    return seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class RequeueSpec:
    """What happens to an interrupted run. Preemptions and, while it makes progress, time limits use up no budget."""

    enabled: bool = True
    """Whether an interrupted run is restarted automatically."""
    max_failures: Count = 3
    """How many crashes and hangs a run survives, including those handled in place; then it fails. `slurmtrain resume`
    resets the count."""
    max_node_failures: Count = 10
    """How many node failures in a row a run survives without a new checkpoint; then it fails."""
    restarts_in_place: Count = 3
    """How often the ranks of an attempt are restarted on the same nodes."""
    backoff_s: Amount = 30
    """Seconds to wait before a restart after a crash; doubled with each further crash."""
    hang_after: Annotated[float, finite_number(1)] | None = None
    """Seconds without a finished step that count as a hang; null: ten times the median step, at least a minute."""
    signal: Annotated[str, choice("SIGTERM", "SIGUSR1", "SIGUSR2", "SIGINT")] = "SIGTERM"
    """The signal that asks a script without `slurmtrain.session()` to save and exit."""
    lead: Annotated[int, Scalar("time such as `300s`", _read_lead, write_duration)] | None = None
    """How long before the time limit ranks are asked to stop; null: 90 s on a cluster and 30 s on this machine, a tenth
    of a short limit, and longer if saving is known to take longer."""
    oom: OomSpec | None = None
    """What a run gets that ran out of memory; null: it fails."""
    keep_nodes: Span | None = None
    """How long a job keeps its nodes after a failure, so that a person can look at them, before the run is started
    again or fails; null: not at all. On a cluster only."""
    exit_zero: Annotated[str, choice(*EXIT_ZERO)] = "auto"
    """What it means that a script exits with code 0 after it was asked to stop. auto: it stopped, and the run
    continues, unless its session or trainer has said that the work is done; completed: the work is done."""

    @property
    def zero_completes(self) -> bool:
        """Whether exit code 0 means that the work is done, also after a stop request."""
        return self.exit_zero == "completed"


def read_requeue(plain: Mapping[str, Any]) -> RequeueSpec:
    """The section ``requeue`` from what :func:`write_requeue` returned, in this version or another one.

    It comes from a journal: invalid values become defaults, since no user could repair them.
    """
    read = {name: read_all(key.kind, plain[name]) for name, key in keys_of(RequeueSpec).items() if name in plain}
    usable = {name: value for name, (value, mistakes) in read.items() if not mistakes}
    return RequeueSpec(**usable)


def write_requeue(requeue: RequeueSpec) -> dict[str, Any]:
    """The section ``requeue`` as plain data."""
    return dict(Section(RequeueSpec).write(requeue))
