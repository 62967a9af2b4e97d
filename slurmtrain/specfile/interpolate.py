"""Evaluate interpolations such as ``${params.lr}`` and ``${oc.env:HOME}`` with omegaconf; report mistakes by key."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from slurmtrain.model.spec.chain.references import escape_references
from slurmtrain.model.spec.kinds import suggestion

KeyPath = tuple[str, ...]
Report = Callable[[KeyPath, str], None]
_MISSING = re.compile(r"Interpolation key '(.+)' not found")


class Interpolator:
    """Evaluates the interpolations of specs that differ in a few keys, as those of the runs of a sweep do.

    omegaconf takes a millisecond to create the config of a spec: only what differs from the spec before is set again.
    """

    def __init__(self) -> None:
        self._config = OmegaConf.create({})
        # What is in the config, by its key.
        self._values: dict[str, Any] = {}

    def interpolate(self, template: Mapping[str, Any], report: Report) -> dict[str, Any]:
        """The template as plain data, its interpolations replaced; a failed one is reported, and its value is None.

        References to other runs, such as ``${run.pretrain.checkpoint}``, stay as they are. ``setup`` holds lines of
        shell, in which ``${NAME}`` belongs to the shell: it is left alone.

        Args:
            template: a spec; the next call may pass one that shares values with it, which must not have changed.
            report: receives what is wrong.
        """
        values = {key: value for key, value in template.items() if key != "setup"}
        if any(map(_refers, values.values())):
            self._set(values, report)
        resolver = _Resolver(template, report)
        return {
            str(key): value if key == "setup" else resolver.resolve_key(self._config, key, value)
            for key, value in template.items()
        }

    def _set(self, values: Mapping[str, Any], report: Report) -> None:
        """Make the config one with these values."""
        for key in list(self._config):
            if key not in values:
                del self._config[key]
                self._values.pop(str(key), None)
        for key, value in values.items():
            if key in self._values and self._values[key] is value:
                continue
            refused: list[KeyPath] = []

            def refuse(at: KeyPath, message: str, to: list[KeyPath] = refused) -> None:
                to.append(at)
                report(at, message)

            self._config[key] = _parsable(value, (str(key),), refuse)
            self._values[key] = value
            if refused:
                # To be reported each time.
                del self._values[key]


def _parsable(value: Any, at: KeyPath, report: Report) -> Any:
    """The value without what omegaconf cannot parse: it would refuse the whole spec, without naming the key."""
    if isinstance(value, Mapping):
        return {key: _parsable(inside, (*at, str(key)), report) for key, inside in value.items()}
    if isinstance(value, list):
        return [_parsable(inside, (*at, str(index)), report) for index, inside in enumerate(value)]
    if isinstance(value, str) and "${" in value:
        # omegaconf parses an interpolation when a config is created, long before it evaluates it.
        try:
            escaped = escape_references(value)
            OmegaConf.create({"value": escaped})
        except OmegaConfBaseException:
            report(at, f"{value!r} is not a valid interpolation; write '\\${{' for a plain '${{'")
            return None
        except ValueError as error:
            report(at, str(error))
            return None
        return escaped
    return value


class _Resolver:
    """Evaluates what is in a config, and reports what cannot be evaluated."""

    def __init__(self, template: Mapping[str, Any], report: Report) -> None:
        self._template = template
        self._report = report

    def resolve_key(self, config: DictConfig, key: str, value: Any) -> Any:
        """A top-level value of the config as plain data.

        Args:
            config: the config.
            key: where it is.
            value: the same, not evaluated.
        """
        # Most of a spec refers to nothing: asking omegaconf for each of its values takes longer than all the rest.
        return self._child(config, key, (str(key),)) if _refers(value) else _plain(value)

    def resolve(self, node: Any, at: KeyPath) -> Any:
        """A node of the config as plain data; ``at``: its key."""
        if isinstance(node, DictConfig):
            return {str(key): self._child(node, key, (*at, str(key))) for key in node}
        if isinstance(node, ListConfig):
            return [self._child(node, index, (*at, str(index))) for index in range(len(node))]
        return node

    def _child(self, node: Any, key: Any, at: KeyPath) -> Any:
        try:
            # "???" is omegaconf's own mark for a value that must be given.
            if OmegaConf.is_missing(node, key):
                self._report(at, "'???' marks a value that must be given; give it here or as key=value")
                return None
            return self.resolve(node[key], at)
        except OmegaConfBaseException as error:
            self._report(at, self._reason(error))
        except RecursionError:
            self._report(at, "the interpolation refers to itself")
        return None

    def _reason(self, error: Exception) -> str:
        message = str(error).splitlines()[0] if str(error) else type(error).__name__
        missing = _MISSING.search(message)
        if missing is None:
            return message
        name = missing[1]
        if name.isupper():
            hint = f"; for an environment variable write ${{oc.env:{name}}}"
        else:
            keys = list(_keys(self._template))
            hint = f"; did you mean '${{params.{name}}}'?" if f"params.{name}" in keys else suggestion(name, keys)
        return f"the interpolation ${{{name}}} refers to a key that does not exist{hint}"


def _refers(value: Any) -> bool:
    """Whether there is anything to evaluate in a value: an interpolation, or the mark of a missing value."""
    if isinstance(value, str):
        return "${" in value or value == "???"
    if isinstance(value, Mapping):
        return any(map(_refers, value.values()))
    return isinstance(value, list) and any(map(_refers, value))


def _plain(value: Any) -> Any:
    """A copy of a value that has nothing to evaluate, as omegaconf returns it: all keys are text."""
    if isinstance(value, Mapping):
        return {str(key): _plain(inside) for key, inside in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list) else value


def _keys(data: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """The keys of the spec that hold a value, with the keys around them."""
    for key, value in data.items():
        if isinstance(value, Mapping):
            yield from _keys(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"
