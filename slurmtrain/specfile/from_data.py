"""Specs that a program has built, as the YAML and the overrides that a person would have written."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from numbers import Integral, Real
from typing import Any

from slurmtrain.errors import Mistake, SpecError
from slurmtrain.system.yaml_file import write_yaml

NAME = "spec"
"""What messages call it, in place of a file's path."""
# As many levels as a file may have.
_DEEPEST = 60


def write_spec(data: Mapping[str, Any]) -> str:
    """The YAML of a spec.

    Tuples become lists, paths text, and numbers of other libraries, such as numpy's, plain ones.

    Args:
        data: Its keys and values, nested as in a file.

    Raises:
        SpecError: Lists all values that no spec can hold.
    """
    mistakes: list[Mistake] = []
    plain = _plain(data, (), mistakes)
    if mistakes:
        raise SpecError(mistakes)
    return write_yaml(plain)


def write_assignments(values: Mapping[str, Any]) -> list[str]:
    """Overrides such as ``params.lr=0.1`` or, where values are lists, the keys to vary, as on a command line.

    Args:
        values: By key. The key of a new parameter begins with ``+``, as on a command line.

    Raises:
        SpecError: Lists all values that no spec can hold.
    """
    mistakes: list[Mistake] = []
    texts = [f"{key}={_on_a_line(_plain(value, (key,), mistakes), key, mistakes)}" for key, value in values.items()]
    if mistakes:
        raise SpecError(mistakes)
    return texts


def _on_a_line(value: Any, key: str, mistakes: list[Mistake]) -> str:
    """A plain value as YAML whose texts cannot be taken for anything else: as JSON, but for YAML's characters."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except ValueError:
        mistakes.append(Mistake(NAME, key, "an override cannot be infinite, or NaN"))
        return ""
    return "".join(char if char.isprintable() else f"\\U{ord(char):08x}" for char in text)


def _plain(value: Any, at: tuple[str, ...], mistakes: list[Mistake]) -> Any:
    if len(at) > _DEEPEST:
        mistakes.append(Mistake(NAME, ".".join(at[:2]), f"nested more than {_DEEPEST} levels deep"))
    elif isinstance(value, Mapping):
        return {str(key): _plain(each, (*at, str(key)), mistakes) for key, each in value.items()}
    elif isinstance(value, list | tuple):
        return [_plain(each, (*at, str(index)), mistakes) for index, each in enumerate(value)]
    elif value is None or isinstance(value, bool):
        return value
    elif isinstance(value, str | os.PathLike):
        return str(os.fspath(value))
    elif isinstance(value, Integral):
        return int(value)
    elif isinstance(value, Real):
        return float(value)
    else:
        expected = "expected text, a number, True, False, None, a list or a mapping"
        why = f"a value of type {type(value).__name__} cannot be in a spec; {expected}"
        mistakes.append(Mistake(NAME, ".".join(at), why))
    return None
