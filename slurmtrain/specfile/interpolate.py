"""Interpolations such as ``${params.lr}`` and ``${oc.env:HOME}``: plain data in place of a template."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from slurmtrain.model.experiment.chain import escape_references
from slurmtrain.model.experiment.kinds import KeyPath, Report, suggestion
from slurmtrain.model.experiment.values import SHELL_KEYS

_NO_VARIABLE = re.compile(r"Environment variable '(\w+)' not found")
_MISSING = re.compile(r"Interpolation key '(.+)' not found")


class Interpolator:
    """Evaluates the interpolations of specs that differ in a few keys, like the specs of the runs of a sweep."""

    def __init__(self) -> None:
        self._config: Any = None
        # What is in the config, by its key.
        self._values: dict[str, Any] = {}

    def interpolate(self, template: Mapping[str, Any], report: Report) -> dict[str, Any]:
        """The template as plain data, its interpolations replaced; a failed one is reported, and its value is None.

        References to other runs, such as ``${run.pretrain.checkpoint}``, stay as they are. ``setup`` holds lines of
        shell, whose ``${NAME}`` belongs to the shell: it is left alone.

        Args:
            template: a spec; the next call may pass one that shares values with it, which must not have changed.
            report: receives what is wrong.
        """
        referring = [key for key, value in template.items() if key not in SHELL_KEYS and _refers(value)]
        # Most of a spec refers to nothing: asking omegaconf for each of its values takes longer than all the rest, and
        # importing it longer than reading a spec.
        if referring:
            self._set({key: value for key, value in template.items() if key not in SHELL_KEYS}, report)
        resolver = _Resolver(template, report)
        return {
            str(key): value if key in SHELL_KEYS
            else resolver.child(self._config, key, (str(key),)) if key in referring
            else _with_text_keys(value)
            for key, value in template.items()
        }  # fmt: skip

    def _set(self, values: Mapping[str, Any], report: Report) -> None:
        """Make the config one with these values: omegaconf takes a millisecond to create one anew."""
        from omegaconf import OmegaConf

        # Of its own it refuses a number that remembers how it was written.
        flags = {"allow_objects": True}
        self._config = OmegaConf.create({}, flags=flags) if self._config is None else self._config
        for key in [each for each in self._config if each not in values]:
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


def _refers(value: Any) -> bool:
    """Whether there is anything to evaluate in a value: an interpolation, or the mark of a missing value."""
    if isinstance(value, str):
        return "${" in value or value == "???"
    if isinstance(value, Mapping):
        return any(map(_refers, value.values()))
    return isinstance(value, list) and any(map(_refers, value))


def _with_text_keys(value: Any) -> Any:
    """A copy of a value that has nothing to evaluate, as omegaconf returns it: all keys are text."""
    if isinstance(value, Mapping):
        return {str(key): _with_text_keys(inside) for key, inside in value.items()}
    return [_with_text_keys(item) for item in value] if isinstance(value, list) else value


def _parsable(value: Any, at: KeyPath, report: Report) -> Any:
    """The value without what omegaconf cannot parse: it would refuse the whole spec, without naming the key."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    if isinstance(value, Mapping):
        return {key: _parsable(inside, (*at, str(key)), report) for key, inside in value.items()}
    if isinstance(value, list):
        return [_parsable(inside, (*at, str(index)), report) for index, inside in enumerate(value)]
    if not isinstance(value, str) or "${" not in value:
        return value
    # omegaconf parses an interpolation when a config is created, long before it evaluates it.
    try:
        escaped = escape_references(value)
        OmegaConf.create({"value": escaped})
    except OmegaConfBaseException:
        report(at, f"{value!r} is not a valid interpolation; write '\\${{' for a plain '${{'")
    except ValueError as error:
        report(at, str(error))
    else:
        return escaped
    return None


class _Resolver:
    """Evaluates what is in a config, and reports what cannot be evaluated."""

    def __init__(self, template: Mapping[str, Any], report: Report) -> None:
        self._template = template
        self._report = report

    def child(self, node: Any, key: Any, at: KeyPath) -> Any:
        """What a node has at a key, as plain data; ``at``: the whole key."""
        from omegaconf import DictConfig, ListConfig, OmegaConf
        from omegaconf.errors import OmegaConfBaseException

        try:
            # "???" is omegaconf's own mark for a value that must be given.
            if OmegaConf.is_missing(node, key):
                self._report(at, "'???' stands for a value that you must set; set it here or as key=value")
                return None
            value = node[key]
            if isinstance(value, DictConfig):
                return {str(name): self.child(value, name, (*at, str(name))) for name in value}
            if isinstance(value, ListConfig):
                return [self.child(value, index, (*at, str(index))) for index in range(len(value))]
            return value
        except OmegaConfBaseException as error:
            self._report(at, self._reason(error))
        except RecursionError:
            self._report(at, "the interpolation refers to itself")
        return None

    def _reason(self, error: Exception) -> str:
        # The lines after the first name types of omegaconf, and say nothing to users.
        message = str(error).splitlines()[0] if str(error) else type(error).__name__
        if variable := _NO_VARIABLE.search(message):
            return (
                f"the variable {variable[1]} is not set here; for a default write ${{oc.env:{variable[1]},VALUE}}, "
                f"or, for its value in the job, let a shell read it: bash -c 'python train.py ${variable[1]}'"
            )
        missing = _MISSING.search(message)
        if missing is None:
            return message
        name = missing[1]
        keys = list(_value_keys(self._template))
        hint = f"; did you mean '${{params.{name}}}'?" if f"params.{name}" in keys else suggestion(name, keys)
        if name.isupper():
            hint = f"; for an environment variable write ${{oc.env:{name}}}"
        return f"the interpolation ${{{name}}} refers to a key that does not exist{hint}"


def _value_keys(data: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """The keys of the spec that hold a value, with the keys around them."""
    for key, value in data.items():
        if isinstance(value, Mapping):
            yield from _value_keys(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"
