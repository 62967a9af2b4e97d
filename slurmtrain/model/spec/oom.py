"""The spec's ``requeue.oom``: what a run gets that ran out of memory."""

from __future__ import annotations

import re
from dataclasses import dataclass

from slurmtrain.model.spec.kinds import Scalar, declare_key
from slurmtrain.model.spec.units import parse_memory


def _read_factor(value: object) -> float:
    match = re.fullmatch(r"x(\d{1,3}(?:\.\d{1,3})?)", value) if isinstance(value, str) else None
    if match is None or float(match[1]) <= 1:
        raise ValueError(f"expected a factor above 1 such as 'x2', found {value!r}")
    return float(match[1])


@dataclass(frozen=True, slots=True, kw_only=True)
class OomSpec:
    """What a run gets that ran out of its nodes' memory, on a cluster."""

    mem: float = declare_key(
        2.0,
        Scalar("factor such as `x2`", _read_factor, lambda factor: f"x{factor:g}"),
        "It is started again with so many times its `resources.mem`, in a new job.",
    )
    at_most: int = declare_key(
        0,
        Scalar("amount with a unit, such as `64GB`", parse_memory, lambda mib: f"{mib}M"),
        "As long as that is not above this; then it fails.",
        required=True,
    )
