"""What to write instead: of a value that is a mistake, and of a script where a spec belongs.

A proposed value is one that the spec would be accepted with.
"""

from __future__ import annotations

import contextlib
import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from slurmtrain.errors import PathError
from slurmtrain.model.experiment.kinds import KeyPath, Section, read_all
from slurmtrain.model.experiment.spec import Spec
from slurmtrain.model.experiment.values import value_at
from slurmtrain.system.yaml_file import parse_value, write_yaml

# How messages say what to write instead.
_NAMED = re.compile(
    r"\b(?:write|use|did you mean|put it in quotes|keep one of|leave|remove|belongs (?:under|at)|set|pass it|give it"
    r"|goes into|the keys here are)\b|expected one of "
)
# Larger specs, and further mistakes, get none: the spec is read again for each try.
_MOST_CHARACTERS = 50_000
MOST_MISTAKES = 50


def add_proposal(message: str, at: KeyPath, spec: Mapping[str, Any]) -> str:
    """The message about a mistake, with what to write instead; most messages say it themselves.

    Args:
        message: The message.
        at: The key that it is about.
        spec: Plain data, interpolated.
    """
    if _NAMED.search(message) or len(repr(spec)) > _MOST_CHARACTERS:
        return message
    before = _mistakes_in(spec)
    for each in _repairs(value_at(spec, at)):
        after = _mistakes_in(_with(spec, at, each))
        # What conflicts with other keys is a mistake of its own.
        if (at, message) not in after and not any(path[: len(at)] == at for path, _ in after - before):
            return f"{message}; write {_flow(each)}"
    return message


def _mistakes_in(spec: object) -> set[tuple[KeyPath, str]]:
    return set(read_all(Section(Spec), spec)[1])


def _flow(value: object) -> str:
    """A value on a line of YAML, as a person would write it."""
    return write_yaml(value, flow=True).split("\n")[0]


def _repairs(value: object) -> Iterator[object]:
    """What somebody may have meant who wrote a value, the likeliest first."""
    if isinstance(value, str):
        text = value.strip()
        if span := re.fullmatch(r"(\d+)\s*(?:-|:|\.\.|to)\s*(\d+)", text):
            yield {"min": int(span[1]), "max": int(span[2])}
        with contextlib.suppress(ValueError):
            if not isinstance(parsed := parse_value(text), str):
                yield parsed
        yield from (text.lower(), re.split(r"\s*[,\s]\s*", text), re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-._"))
    elif isinstance(value, bool):
        yield from (str(value).lower(), {"enabled": value})
    elif isinstance(value, int | float):
        yield from (str(value), f"{value}GB", *([int(value)] if value == value // 1 else []), [value])
    elif isinstance(value, list) and value:
        words = [each if isinstance(each, str) else _flow(each) for each in value]
        yield from (",".join(words), " ".join(words), words, value[0])
        if all(isinstance(each, Mapping) for each in value):
            yield {key: inner for each in value for key, inner in each.items()}
    elif isinstance(value, Mapping) and value:
        yield [value]


def _with(data: Any, at: KeyPath, value: object) -> Any:
    """A copy of the data with another value at a key."""
    if not at:
        return value
    key, *below = at
    if isinstance(data, list) and key.isdecimal() and int(key) < len(data):
        return [*data[: int(key)], _with(data[int(key)], tuple(below), value), *data[int(key) + 1 :]]
    section = dict(data) if isinstance(data, Mapping) else {}
    return {**section, key: _with(section.get(key), tuple(below), value)}


_DIRECTIVE = re.compile(r"^#SBATCH\s+(.*)$", re.MULTILINE)
# What runs scripts, by their suffix.
_SCRIPTS = {".py": "python", ".sh": "bash"}


def check_is_spec(path: Path, text: str) -> None:
    """Raise PathError, with what to write instead, if the ``text`` of a file is a script's."""
    is_script = text.startswith("#!") or path.suffix in _SCRIPTS
    if not is_script and (path.suffix in (".yaml", ".yml") or not _DIRECTIVE.search(text)):
        return
    if not _DIRECTIVE.search(text):
        interpreter = _SCRIPTS.get(path.suffix) or ("python" if "python" in text.partition("\n")[0] else "bash")
        command = f"'command: {shlex.join([interpreter, str(path)])}'"
        raise PathError(f"{path} is a script; a spec is a YAML file with a line such as {command}")
    raise PathError(
        f"{path} is a batch script of sbatch; a spec is a YAML file: what runs is its 'command', the lines before that "
        "are its 'setup', and options of sbatch stand under 'slurm' and 'resources' (docs/spec.md)"
    )
