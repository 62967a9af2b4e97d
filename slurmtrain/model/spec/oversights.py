"""What is allowed in a spec but hardly ever meant: braces without their ``$``, a shell's signs without a shell."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import Any

from slurmtrain.model.spec import launcher
from slurmtrain.model.spec.kinds import nearest

KeyPath = tuple[str, ...]
# What commands may have in braces: docs/spec.md.
PLACEHOLDERS = (
    *launcher.PLACEHOLDERS, "resume_from", "resume_dir", "resume_tag", "run_dir", "checkpoint_dir", "run_id", "attempt",
)  # fmt: skip
# Braces as for an interpolation, but without the dollar sign: {params.lr}, or {lr}.
_BRACES = re.compile(r"(?<!\$)\{([A-Za-z_][\w-]*(?:\.[\w-]+)*)\}")
_NUMBER = r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?"
_NUMBERS = re.compile(rf"{_NUMBER}(?:\s*,\s*{_NUMBER})+")
# A variable, and words that only a shell understands, outside of quotes.
_VARIABLE = re.compile(r"\$([A-Za-z_]\w*)")
_OPERATOR = re.compile(r"&&|\|\|?|;|&|[0-9]?>>?(?:&[0-9])?|<|.*;")
# How similar a name in braces must be to a placeholder to be a slip.
_SLIP = 0.8


def find_oversights(plain: Mapping[str, Any]) -> Iterator[tuple[KeyPath, str]]:
    """Keys of a spec, as plain data, that hold what is hardly meant, each with a message that says what may be."""
    for section in ("command", "params", "env", "setup"):
        for path, text in _texts(plain[section], (section,)):
            for key in dict.fromkeys(_BRACES.findall(text)):
                meant = _meant_by_braces(key, plain, placeholders=section == "command")
                if meant:
                    yield path, f"{{{key}}} is passed on as it is; {meant}"
    yield from ((("command",), message) for message in _shell_words(plain["command"]))
    for path, text in _texts(plain["params"], ("params",)):
        if _NUMBERS.fullmatch(text):
            name = ".".join(path)
            yield path, f"{text!r} is text; for a run with each number: --sweep {name}={text}; for a list: [{text}]"


def _meant_by_braces(key: str, plain: Mapping[str, Any], *, placeholders: bool) -> str:
    """What a name in braces may stand for, as half a sentence; empty if it can be meant as it is."""
    if placeholders and key in PLACEHOLDERS:
        return ""
    path = key.split(".")
    if len(path) > 1 and _has(plain, path):
        return f"${{{key}}} is replaced by the value of that key"
    if placeholders and _has(plain, ["params", *path]):
        return f"${{params.{key}}} is replaced by the value of that parameter"
    near = nearest(key, PLACEHOLDERS, _SLIP) if placeholders else None
    return f"did you mean {{{near}}}?" if near else ""


def _shell_words(command: str) -> Iterator[str]:
    """What in a command only a shell would understand."""
    try:
        # With their quotes: what is quoted is meant.
        words = shlex.split(command, posix=False)
    except ValueError:  # a backslash before a quote, which this mode does not know
        return
    operator = next((word for word in words[1:] if _OPERATOR.fullmatch(word)), None)
    if PurePath(words[0]).name == "cd" or operator is not None:
        shown = operator or words[0]
        yield f"no shell runs the command, and {shown!r} is passed on as it is; write bash -c '...', or a script"
        return
    for word in words:
        variable = None if word.startswith("'") else _VARIABLE.search(word)
        if variable is not None:
            yield (
                f"no shell runs the command, and {variable[0]} is passed on as it is; ${{oc.env:{variable[1]}}} is "
                "replaced by the variable as it is now"
            )
        elif word.startswith("~"):
            yield f"no shell runs the command, and {word!r} is passed on as it is; write the path in full"


def _texts(value: Any, at: KeyPath) -> Iterator[tuple[KeyPath, str]]:
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
