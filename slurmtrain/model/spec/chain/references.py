"""``${run.pretrain.checkpoint}``: facts of another run, which are known only once that run has ended.

Until then they stay in the plan as they are written. When the first attempt starts, they are replaced in the command,
in ``params`` and in ``env``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slurmtrain.model.spec.chain.dependencies import Dependency, parse_dependency
from slurmtrain.model.spec.kinds import suggestion
from slurmtrain.model.spec.names import check_name
from slurmtrain.model.spec.spec import Spec

FIELDS = ("checkpoint", "dir", "id", "step")
# The keys of a spec where references are replaced.
PLACES = ("command", "params", "env")
_METRIC = ".metrics."
# One that is escaped for omegaconf is text, also for us.
_REFERENCE = re.compile(r"(?<!\\)\$\{\s*run\.([^{}$]*?)\s*\}")


@dataclass(frozen=True, slots=True)
class Reference:
    """A fact of another run. ``run``: its name or id. ``field``: one of FIELDS, or ``metrics.NAME``."""

    run: str
    field: str

    def __str__(self) -> str:
        """As in a spec."""
        return f"${{run.{self.run}.{self.field}}}"


def parse_reference(text: str) -> Reference:
    """The reference whose text between ``${run.`` and ``}`` this is. Raises ValueError."""
    run, dot, field = text.partition(_METRIC) if _METRIC in text else text.rpartition(".")
    if dot == _METRIC and field:
        field = f"metrics.{field}"
    elif field not in FIELDS or not dot:
        fields = ", ".join((*FIELDS, "metrics.NAME"))
        raise ValueError(f"${{run.{text}}} is no fact of a run; these are {fields}{suggestion(field, FIELDS)}")
    check_name(run)
    return Reference(run, field)


def escape_references(text: str) -> str:
    """The text with its references escaped, so that omegaconf leaves them as they are. Raises ValueError."""

    def escape(match: re.Match[str]) -> str:
        return f"\\{parse_reference(match[1])}"

    return _REFERENCE.sub(escape, text)


def references(value: object) -> Iterator[Reference]:
    """The references in texts, lists and mappings, without invalid ones."""
    if isinstance(value, str):
        for match in _REFERENCE.finditer(value):
            try:
                yield parse_reference(match[1])
            except ValueError:
                continue
    elif isinstance(value, Mapping):
        for inside in value.values():
            yield from references(inside)
    elif isinstance(value, Sequence):
        for inside in value:
            yield from references(inside)


def references_of(spec: Spec) -> list[Reference]:
    """The references that are replaced in a spec, each once."""
    return list(dict.fromkeys(references([getattr(spec, place) for place in PLACES])))


def dependencies_of(spec: Spec) -> list[Dependency]:
    """The runs that must end before a run of this spec: runs in ``after``, and runs that its references name."""
    named = {dependency.name: dependency for dependency in map(parse_dependency, spec.after)}
    for reference in references_of(spec):
        named.setdefault(reference.run, Dependency(reference.run))
    return list(named.values())


def fill(value: Any, values: Mapping[str, Any]) -> Any:
    """A value of a spec with its references replaced.

    Args:
        value: Text, a list, a mapping, or anything else, which stays as it is.
        values: What references stand for, by their text. A text that is nothing but a reference becomes that value,
            also if it is a number.
    """
    if isinstance(value, str):
        whole = _REFERENCE.fullmatch(value)
        if whole and value in values:
            return values[value]
        return _REFERENCE.sub(lambda match: str(values.get(match[0], match[0])), value)
    if isinstance(value, Mapping):
        return {key: fill(inside, values) for key, inside in value.items()}
    if isinstance(value, list | tuple):
        return [fill(inside, values) for inside in value]
    return value
