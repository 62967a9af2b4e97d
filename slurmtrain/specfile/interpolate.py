"""Evaluate interpolations such as ``${params.lr}`` and ``${oc.env:HOME}`` with omegaconf; report mistakes by key."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

KeyPath = tuple[str, ...]
Report = Callable[[KeyPath, str], None]
_MISSING = re.compile(r"Interpolation key '(.+)' not found")


def interpolate(template: Mapping[str, Any], report: Report) -> dict[str, Any]:
    """The template as plain data, its interpolations replaced; a failed one is reported, and its value is None.

    ``setup`` holds lines of shell, in which ``${NAME}`` belongs to the shell: it is left alone.
    """
    shell = {key: value for key, value in template.items() if key == "setup"}
    rest = {key: _parsable(value, (key,), report) for key, value in template.items() if key != "setup"}
    return {**_resolved(OmegaConf.create(rest), (), report), **shell}


def _parsable(value: Any, at: KeyPath, report: Report) -> Any:
    """The value without what omegaconf cannot parse: it would refuse the whole spec, without naming the key."""
    if isinstance(value, Mapping):
        return {key: _parsable(inside, (*at, str(key)), report) for key, inside in value.items()}
    if isinstance(value, list):
        return [_parsable(inside, (*at, str(index)), report) for index, inside in enumerate(value)]
    if isinstance(value, str) and "${" in value:
        # omegaconf parses an interpolation when a config is created, long before it evaluates it.
        try:
            OmegaConf.create({"value": value})
        except OmegaConfBaseException:
            report(at, f"{value!r} is not a valid interpolation; write '\\${{' for a plain '${{'")
            return None
    return value


def _resolved(node: Any, at: KeyPath, report: Report) -> Any:
    if isinstance(node, DictConfig):
        return {str(key): _resolved_child(node, key, (*at, str(key)), report) for key in node}
    if isinstance(node, ListConfig):
        return [_resolved_child(node, i, (*at, str(i)), report) for i in range(len(node))]
    return node


def _resolved_child(node: Any, key: Any, at: KeyPath, report: Report) -> Any:
    try:
        # "???" is omegaconf's own mark for a value that must be given.
        if OmegaConf.is_missing(node, key):
            report(at, "'???' marks a value that must be given; give it here or as key=value")
            return None
        return _resolved(node[key], at, report)
    except OmegaConfBaseException as error:
        report(at, _reason(error))
    except RecursionError:
        report(at, "the interpolation refers to itself")
    return None


def _reason(error: Exception) -> str:
    message = str(error).splitlines()[0] if str(error) else type(error).__name__
    missing = _MISSING.search(message)
    if missing:
        hint = f"; for an environment variable write ${{oc.env:{missing[1]}}}" if missing[1].isupper() else ""
        return f"the interpolation ${{{missing[1]}}} refers to a key that does not exist{hint}"
    return message
