"""The section `requeue` of a spec: what happens to an interrupted run."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slurmtrain.model.spec import kinds
from slurmtrain.model.spec.kinds import KeyPath, Nullable, NullableSection, Report, Scalar, declare_key
from slurmtrain.model.spec.values import parse_memory

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

    mem: float = declare_key(
        2.0,
        Scalar("factor such as `x2`", _read_factor, _write_factor),
        "If the memory of a node did not suffice: it is started again with so many times its `resources.mem`, in a new "
        "job on the cluster.",
    )
    at_most: int | None = declare_key(
        None,
        Nullable(Scalar("amount with a unit, such as `64GB`", parse_memory, lambda mib: f"{mib}M")),
        "As long as that is not above this. null: it gets no more memory.",
    )
    accumulation: int | None = declare_key(
        None,
        Nullable(Scalar("whole factor such as `x2`", _read_whole_factor, _write_factor)),
        "If the memory of a GPU did not suffice, or that of a node and it gets no more: it is started again with so "
        "many times its `resources.accumulation`. null: it fails.",
    )
    max_accumulation: int = declare_key(16, kinds.whole_number(2), "As long as that is not above this; then it fails.")


class OomSection(NullableSection):
    """The kind of ``requeue.oom``: it must say what a run may get."""

    def read(self, value: object, at: KeyPath, report: Report) -> Any:
        """As :meth:`~slurmtrain.model.spec.kinds.Kind.read` with its ``value``, ``at`` and ``report``."""
        oom = NullableSection.read(self, value, at, report)
        # With a mistake in one of the two keys, or in its name, that is what the user meant to say.
        if isinstance(value, Mapping) and value.keys() <= {"mem", "max_accumulation"}:
            report((*at, "at_most"), "what may it get? set 'at_most', such as '64GB', or 'accumulation', such as 'x2'")
        return oom
