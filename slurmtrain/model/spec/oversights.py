"""What is allowed in a spec but hardly ever meant: braces without their ``$``, and lists that are text. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from slurmtrain.model.spec.spec import Spec, write_spec

# Braces as for an interpolation, but without the dollar sign: {params.lr}.
_BRACES = re.compile(r"(?<!\$)\{([A-Za-z_][\w-]*(?:\.[\w-]+)+)\}")
_NUMBER = r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?"
_NUMBERS = re.compile(rf"{_NUMBER}(?:\s*,\s*{_NUMBER})+")


def find_oversights(spec: Spec) -> Iterator[tuple[tuple[str, ...], str]]:
    """Keys of a spec that hold what is hardly meant, each with a message that says what may be."""
    plain = write_spec(spec)
    for section in ("command", "params", "env", "setup"):
        for path, text in _texts(plain[section], (section,)):
            for key in dict.fromkeys(_BRACES.findall(text)):
                if _has(plain, key.split(".")):
                    yield path, f"{{{key}}} is passed on as it is; ${{{key}}} is replaced by the value of that key"
    for path, text in _texts(plain["params"], ("params",)):
        if _NUMBERS.fullmatch(text):
            name = ".".join(path)
            yield path, f"{text!r} is text; for a run with each number: --sweep {name}={text}; for a list: [{text}]"


def _texts(value: Any, at: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], str]]:
    """All texts in a value of JSON, with their keys."""
    if isinstance(value, str):
        yield at, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _texts(item, (*at, str(key)))
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _texts(item, (*at, str(index)))


def _has(plain: Any, path: Sequence[str]) -> bool:
    for name in path:
        if not isinstance(plain, Mapping) or name not in plain:
            return False
        plain = plain[name]
    return True
