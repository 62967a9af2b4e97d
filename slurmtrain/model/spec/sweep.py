"""A sweep: which keys take which values, and the runs that follow from it."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

LIMIT = 10_000


def check_sweep(sweep: object) -> list[tuple[str, str]]:
    """What is wrong with a ``sweep`` section, as (key, message); values themselves are checked run by run."""
    if not isinstance(sweep, Mapping):
        return [("", f"expected a mapping from a key of the spec to a list of values, found {sweep!r}")]
    wrong = []
    for key, values in sweep.items():
        if not isinstance(values, list) or not values:
            wrong.append((str(key), f"expected a list of at least one value, found {values!r}"))
        elif len({repr(value) for value in values}) < len(values):
            wrong.append((str(key), f"a value stands twice in {values!r}, which would run the same thing twice"))
    count = 1
    for values in sweep.values():
        count *= len(values) if isinstance(values, list) else 1
    if count > LIMIT:
        wrong.append(("", f"{count} runs are more than the {LIMIT} that one sweep may have"))
    return wrong


def expand(sweep: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """The combinations of all values, the last key varying fastest: one ``{key: value}`` for each run."""
    return [dict(zip(sweep, values, strict=True)) for values in itertools.product(*sweep.values())]
