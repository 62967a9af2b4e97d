"""How other programs write the values of a swept key, and what to write here instead."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from slurmtrain.model.spec.kinds import type_name
from slurmtrain.model.spec.sweep.expressions import is_expression

# Names that other tools have for the ends of an interval.
_ENDS = (("min", "max"), ("low", "high"), ("lower", "upper"), ("start", "stop"), ("from", "to"))
# Names that other tools have for the values themselves.
_VALUES = frozenset({"values", "value", "choice", "choices", "options", "categories", "grid", "list"})
_LIST = re.compile(r"[\w.+-]+(?:\s*,\s*[\w.+-]+)+")


def is_list(value: object) -> bool:
    """Whether a value is text such as ``0.1,0.3``, which lists values without brackets."""
    return isinstance(value, str) and _LIST.fullmatch(value.strip()) is not None


def describe_other_form(value: object, key: str, *, is_key: Callable[[str], bool], drawn: bool) -> str:
    """What is wrong with a value that is no list, and what to write: a sentence without a full stop.

    Args:
        value: the value of a swept key.
        key: that key.
        is_key: whether the spec has a key of this name.
        drawn: whether the sweep says how many random values there are.
    """
    problem = f"expected a list of at least one value, found {type_name(value)} ({value!r})"
    if not isinstance(value, Mapping) or not value:
        some = value if is_list(value) else "0.1, 0.3" if value in (None, [], {}) else json.dumps(value)
        return f"{problem}; write '{key}: [{some}]'"
    name, inner = next(iter(value.items()))
    if is_expression(f"{name}()") and name not in _VALUES:
        return f"{problem}; write '{key}: {_called(str(name), inner)}'{_samples(str(name), drawn=drawn)}"
    for low, high in _ENDS:
        if low in value and high in value:
            scale = "loguniform" if "log" in str(dict(value)).lower() else "uniform"
            ends = _called(scale, [value[low], value[high]])
            return f"{problem}; write '{key}: {ends}'{_samples(scale, drawn=drawn)}"
    if name not in _VALUES and is_key(f"{key}.{name}"):
        while isinstance(inner, Mapping) and inner and is_key(f"{key}.{name}"):
            key, (name, inner) = f"{key}.{name}", next(iter(inner.items()))
        return f"{problem}; name the key as a whole: write '{key}.{name}: [{_listed(inner)}]'"
    values = next((each for word, each in value.items() if word in _VALUES or isinstance(each, list)), [0.1, 0.3])
    return f"{problem}; write '{key}: [{_listed(values)}]'"


def _listed(value: Any) -> str:
    return ", ".join(json.dumps(each) for each in (value if isinstance(value, list) else [value]))


def _called(function: str, arguments: Any) -> str:
    """A call as it is written in YAML: in braces, a comma without quotes would end it."""
    call = f"{function}({_listed(arguments)})"
    return f'"{call}"' if "," in call and '"' not in call else call


def _samples(function: str, *, drawn: bool) -> str:
    """What random values need besides."""
    return "" if drawn or function in ("range", "linspace", "logspace") else " and 'samples: 20'"
