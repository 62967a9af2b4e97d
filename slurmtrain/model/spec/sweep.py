"""A sweep: which keys take which values, and the combinations of these."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

# Beyond this a sweep is surely a mistake: schedulers limit the length of job arrays to less.
MAX_RUNS = 10_000


def check_sweep(sweep: object) -> list[tuple[str, str]]:
    """The mistakes of a ``sweep`` section as (key, message); the values themselves are checked run by run."""
    if not isinstance(sweep, Mapping):
        return [("", f"expected a mapping from a key of the spec to a list of values, found {sweep!r}")]
    mistakes = []
    for key, values in sweep.items():
        if isinstance(values, Mapping) and values:
            mistakes.append((str(key), f"name the key as a whole, as in '{key}.{next(iter(values))}: [...]'"))
        elif not isinstance(values, list) or not values:
            mistakes.append((str(key), f"expected a list of at least one value, found {values!r}"))
        elif len({repr(value) for value in values}) < len(values):
            mistakes.append((str(key), f"a value occurs twice in {values!r}, which would make two identical runs"))
    count = 1
    for values in sweep.values():
        count *= len(values) if isinstance(values, list) else 1
    if count > MAX_RUNS:
        mistakes.append(("", f"{count} runs are more than the {MAX_RUNS} that one sweep may have"))
    return mistakes


def expand_sweep(sweep: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """The combinations of all values, the last key varying fastest: one ``{key: value}`` for each run."""
    return [dict(zip(sweep, values, strict=True)) for values in itertools.product(*sweep.values())]
