"""Interpolations such as ``${params.lr}`` and ``${oc.env:HOME}``: plain data in place of a template."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from slurmtrain.model.experiment.kinds import Report
from slurmtrain.model.experiment.values import SHELL_KEYS

if TYPE_CHECKING:
    from slurmtrain.specfile.evaluation import Evaluation


class Interpolator:
    """Evaluates the interpolations of specs that differ in a few keys, like the specs of the runs of a sweep."""

    def __init__(self) -> None:
        self._evaluation: Evaluation | None = None

    def interpolate(self, template: Mapping[str, Any], report: Report) -> dict[str, Any]:
        """The template as plain data, its interpolations replaced; a failed one is reported, and its value is None.

        References to other runs, such as ``${run.pretrain.checkpoint}``, stay as they are. ``setup`` holds lines of
        shell, whose ``${NAME}`` belongs to the shell: it is left alone.

        Args:
            template: a spec; the next call may pass one that shares values with it, which must not have changed.
            report: receives what is wrong.
        """
        referring = [key for key, value in template.items() if key not in SHELL_KEYS and _refers(value)]
        evaluated: dict[str, Any] = {}
        # Most of a spec refers to nothing: asking omegaconf for each of its values takes longer than all the rest.
        if referring:
            if self._evaluation is None:
                # omegaconf takes longer to import than a spec without interpolations to read.
                from slurmtrain.specfile.evaluation import Evaluation

                self._evaluation = Evaluation()
            evaluated = self._evaluation.evaluate(template, referring, report)
        return {
            str(key): value if key in SHELL_KEYS else evaluated[key] if key in evaluated else _with_text_keys(value)
            for key, value in template.items()
        }


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
