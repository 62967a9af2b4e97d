"""Evaluate interpolations with omegaconf; report mistakes by key."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from omegaconf import AnyNode, DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from slurmtrain.model.experiment.chain import escape_references
from slurmtrain.model.experiment.command_words import is_of_job
from slurmtrain.model.experiment.kinds import KeyPath, Report, suggestion
from slurmtrain.model.experiment.values import SHELL_KEYS
from slurmtrain.model.written import WrittenNumber

_NO_VARIABLE = re.compile(r"Environment variable '(\w+)' not found")
_MISSING = re.compile(r"Interpolation key '(.+)' not found")


class Evaluation:
    """Evaluates values of specs that differ in a few keys.

    omegaconf takes a millisecond to create the config of a spec: only what differs from the spec before is set again.
    """

    def __init__(self) -> None:
        self._config = OmegaConf.create({})
        # What is in the config, by its key.
        self._values: dict[str, Any] = {}

    def evaluate(self, template: Mapping[str, Any], keys: Sequence[str], report: Report) -> dict[str, Any]:
        """Top-level values of a spec as plain data; a failed one is reported, and is None.

        Args:
            template: the spec; the next one may share values with it, which must not have changed.
            keys: keys of the values.
            report: receives what is wrong.
        """
        self._set({key: value for key, value in template.items() if key not in SHELL_KEYS}, report)
        resolver = _Resolver(template, report)
        return {key: resolver.child(self._config, key, (str(key),)) for key in keys}

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
    return _NumberNode(value) if isinstance(value, WrittenNumber) else value


class _NumberNode(AnyNode):  # type: ignore[misc]
    """A number that remembers how it was written, which omegaconf's own nodes refuse."""

    def _validate_and_convert_impl(self, value: Any) -> Any:
        return value


class _Resolver:
    """Evaluates what is in a config, and reports what cannot be evaluated."""

    def __init__(self, template: Mapping[str, Any], report: Report) -> None:
        self._template = template
        self._report = report

    def resolve(self, node: Any, at: KeyPath) -> Any:
        """A node of the config as plain data; ``at``: its key."""
        if isinstance(node, DictConfig):
            return {str(key): self.child(node, key, (*at, str(key))) for key in node}
        if isinstance(node, ListConfig):
            return [self.child(node, index, (*at, str(index))) for index in range(len(node))]
        return node

    def child(self, node: Any, key: Any, at: KeyPath) -> Any:
        """What a node has at a key, as plain data; ``at``: the whole key."""
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
        if variable := _NO_VARIABLE.search(message):
            return _not_set(variable[1])
        missing = _MISSING.search(message)
        if missing is None:
            return message
        name = missing[1]
        if name.isupper():
            hint = f"; for an environment variable write ${{oc.env:{name}}}"
        else:
            keys = list(_value_keys(self._template))
            hint = f"; did you mean '${{params.{name}}}'?" if f"params.{name}" in keys else suggestion(name, keys)
        return f"the interpolation ${{{name}}} refers to a key that does not exist{hint}"


def _not_set(variable: str) -> str:
    """What to write instead of a variable that this machine does not have."""
    problem = f"there is no variable {variable} here; give a value for that: write ${{oc.env:{variable},VALUE}}"
    if is_of_job(variable):
        return f"{problem}, or, for its value in the job, let a shell read it: bash -c 'python train.py ${variable}'"
    return problem


def _value_keys(data: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """The keys of the spec that hold a value, with the keys around them."""
    for key, value in data.items():
        if isinstance(value, Mapping):
            yield from _value_keys(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"
