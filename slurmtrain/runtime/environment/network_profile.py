"""Network profiles: a few environment variables that suit a kind of network, from templates/network."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurmtrain.errors import SlurmtrainError
from slurmtrain.system import templates
from slurmtrain.system.files import describe_os_error

_VARIABLE = re.compile(r"[A-Z][A-Z0-9_]*")


@dataclass(frozen=True, slots=True)
class Profile:
    """A profile: a sentence ``about`` it, variables for every rank, and shell lines for the job's ``setup``."""

    name: str
    about: str
    variables: Mapping[str, str]
    setup: tuple[str, ...]


def load(name: str) -> Profile:
    """Read a profile. Raises SlurmtrainError if there is none of this name, or its file is invalid."""
    folder = templates.directory() / "network"
    names = sorted(path.stem for path in folder.glob("*.yaml"))
    if name not in names:
        raise SlurmtrainError(
            f"there is no network profile {name!r} in {folder}; profiles there: {', '.join(names) or 'none'}"
        )
    path = folder / f"{name}.yaml"
    data = _parse(path)
    if unknown := sorted(map(str, data.keys() - {"about", "variables", "setup"})):
        raise _wrong(path, f"{', '.join(unknown)}: a profile has about, variables and setup")
    return Profile(
        name,
        _text(path, "about", data.get("about")),
        _read_variables(path, data.get("variables")),
        _read_setup(path, data.get("setup", [])),
    )


def _parse(path: Path) -> dict[Any, Any]:
    import yaml

    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SlurmtrainError(f"cannot read the network profile {path}: {describe_os_error(error)}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise _wrong(path, " ".join(str(error).split())) from error
    if not isinstance(data, dict):
        raise _wrong(path, "it is not a mapping")
    return data


def _read_variables(path: Path, entries: Any) -> dict[str, str]:
    if not isinstance(entries, dict):
        raise _wrong(path, "variables is not a mapping")
    variables = {}
    for name, entry in entries.items():
        if not isinstance(name, str) or not _VARIABLE.fullmatch(name):
            raise _wrong(path, f"variables: {name!r} cannot name a variable")
        if not isinstance(entry, dict) or entry.keys() != {"value", "why"}:
            raise _wrong(path, f"variables.{name} must have exactly a value and a why")
        _text(path, f"variables.{name}.why", entry["why"])
        variables[name] = _text(path, f"variables.{name}.value", entry["value"])
    return variables


def _read_setup(path: Path, lines: Any) -> tuple[str, ...]:
    if not isinstance(lines, list):
        raise _wrong(path, "setup is not a list")
    return tuple(_text(path, f"setup.{index}", line) for index, line in enumerate(lines))


def _text(path: Path, key: str, value: Any) -> str:
    """Check that a value is one line of text, which a quoted number is too, and return it."""
    if not isinstance(value, str) or not value.strip() or re.search(r"[\n\r\0]", value):
        raise _wrong(path, f"{key} is {value!r}, not a line of text")
    return value


def _wrong(path: Path, problem: str) -> SlurmtrainError:
    return SlurmtrainError(f"{path} is not a network profile: {problem}; reinstall slurmtrain if you did not change it")
