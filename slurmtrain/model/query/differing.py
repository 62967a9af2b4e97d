"""What differs among runs, such as the parameters of a sweep, and how a person would have written it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from slurmtrain.model.query.fields import ABSENT, flattened
from slurmtrain.model.written import WrittenNumber

_EXPONENT = re.compile(r"e([+-]?)0*([0-9]+)$")


def differing(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """The names of the settings that differ among runs: first differing values, then settings that some runs lack.

    Args:
        settings: The settings of each run, such as its parameters. A setting in a mapping is named ``section.name``.
    """
    flat = [dict(flattened(of_run)) for of_run in settings]
    values: dict[str, set[Any]] = {}
    counts: dict[str, int] = {}
    for of_run in flat:
        for name, value in of_run.items():
            values.setdefault(name, set()).add(identity(value))
            counts[name] = counts.get(name, 0) + 1
    varying = [name for name, different in values.items() if len(different) > 1]
    return varying + [name for name in values if counts[name] < len(flat) and name not in set(varying)]


def identity(value: Any) -> Any:
    """Something hashable that is equal for equal values: 1 and 1.0 are, 1 and true are not."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return value
    return json.dumps(value, sort_keys=True, default=str)


def repetition_key(settings: Mapping[str, Any], names: Iterable[str]) -> tuple[Any, ...]:
    """The same for runs that have the same values of the settings with these ``names``, hashable."""
    flat = dict(flattened(settings))
    return tuple(identity(flat[name]) if name in flat else None for name in names)


def write_settings(settings: Mapping[str, Any], names: Iterable[str]) -> str:
    """``lr=0.1 batch_size=64``: the settings with these names, without missing ones."""
    flat = dict(flattened(settings))
    values = ((name, flat.get(name, ABSENT)) for name in names)
    return " ".join(f"{name}={write_value(value)}" for name, value in values if value is not ABSENT)


def write_value(value: Any) -> str:
    """A value as people write it: text as it is, numbers as they were written, if that is known, else JSON.

    Other numbers have short exponents, and are not rounded.
    """
    if isinstance(value, str):
        return value
    if isinstance(value, WrittenNumber):
        return str(value)
    if isinstance(value, float):
        return _EXPONENT.sub(lambda match: f"e{match[1].removeprefix('+')}{match[2]}", repr(value))
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{json.dumps(str(key))}: {_inside(each)}" for key, each in value.items()) + "}"
    return f"[{', '.join(map(_inside, value))}]" if isinstance(value, list | tuple) else json.dumps(value)


def _inside(value: Any) -> str:
    """A value in a list or a mapping, where text has quotes."""
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else write_value(value)
