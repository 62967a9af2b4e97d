"""Runs that start after others: the key ``after``, and facts of other runs such as ``${run.pretrain.checkpoint}``.

Facts are known only once that run has ended. Until then they stay in the plan as they are written; when the first
attempt starts, they are replaced in the command, in ``params`` and in ``env``.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from typing import TYPE_CHECKING, Any

from slurmtrain.model.experiment.kinds import Items, Report, Scalar, suggestion, type_name
from slurmtrain.model.experiment.values import check_name, texts_in

if TYPE_CHECKING:
    from slurmtrain.model.experiment.spec import Spec

AFTER_OK = "afterok"
AFTER_ANY = "afterany"
_CONDITIONS = (AFTER_OK, AFTER_ANY)


@dataclass(frozen=True, slots=True)
class Dependency:
    """A run that must end first. ``name``: a run's name or id, or the id of a sweep. ``any``: however it ends."""

    name: str
    any: bool = False

    def __str__(self) -> str:
        """As in a spec."""
        return f"{AFTER_ANY}:{self.name}" if self.any else self.name


def parse_dependency(value: object) -> Dependency:
    """The dependency that an entry of ``after`` stands for, such as ``pretrain`` or ``afterany:pretrain``.

    Raises ValueError for any other value.
    """
    if not isinstance(value, str):
        # 'afterok: pretrain', with a blank, is a mapping in YAML.
        cure = "put it in quotes" if isinstance(value, int | float) else "write for example afterok:pretrain"
        raise ValueError(f"expected the name or id of a run, found {type_name(value)} ({value!r}); {cure}")
    condition, colon, name = value.strip().rpartition(":")
    if colon and condition not in _CONDITIONS:
        near = suggestion(condition, _CONDITIONS)
        raise ValueError(f"{condition!r} is not a condition: write 'afterok:{name}' or 'afterany:{name}'{near}")
    check_name(name)
    return Dependency(name, any=condition == AFTER_ANY)


@dataclass(frozen=True, slots=True)
class _Dependencies(Items):
    """A list of runs; one alone may be written without brackets."""

    def read(self, value: object, at: tuple[str, ...], report: Report) -> tuple[str, ...]:
        """As :meth:`Kind.read` with its ``value``, ``at`` and ``report``."""
        entries = Items.read(self, [value] if isinstance(value, str) else value, at, report)
        entries_before = set()
        for index, entry in enumerate(entries):
            if entry is not None and entry in entries_before:
                report((*at, str(index)), f"{entry!r} is given twice")
            entries_before.add(entry)
        return entries


DEPENDENCIES = _Dependencies(Scalar("run", lambda value: str(parse_dependency(value)), is_text=True), "list of runs")


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
    # Names of runs and of metrics may have dots: the first ".metrics." parts them, else the last dot does.
    run, dot, field = text.partition(_METRIC) if _METRIC in text else text.rpartition(".")
    if dot == _METRIC and field:
        field = f"metrics.{field}"
    elif field not in FIELDS or not dot:
        fields = ", ".join((*FIELDS, "metrics.NAME"))
        raise ValueError(f"${{run.{text}}} does not exist; a run has {fields}{suggestion(field, FIELDS)}")
    check_name(run)
    return Reference(run, field)


def escape_references(text: str) -> str:
    """The text with its references escaped, so that omegaconf leaves them as they are. Raises ValueError."""

    def escape(match: re.Match[str]) -> str:
        return f"\\{parse_reference(match[1])}"

    return _REFERENCE.sub(escape, text)


def references(value: object) -> Iterator[Reference]:
    """The references in texts, lists and mappings, without invalid ones."""
    for _, text in texts_in(value):
        for match in _REFERENCE.finditer(text):
            # An invalid one is reported by escape_references(), when the spec is interpolated.
            with contextlib.suppress(ValueError):
                yield parse_reference(match[1])


def references_of(spec: Spec) -> list[Reference]:
    """The references that are replaced in a spec, each once."""
    return list(dict.fromkeys(references([getattr(spec, place) for place in PLACES])))


def dependencies_of(spec: Spec) -> list[Dependency]:
    """The runs that must end before a run of this spec: runs in ``after``, and runs that its references name."""
    named = {dependency.name: dependency for dependency in map(parse_dependency, spec.after)}
    for reference in references_of(spec):
        # The condition in "after" wins: by a reference alone, the run must complete.
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


def find_cycle(after: Mapping[int, Sequence[int]]) -> list[int]:
    """Specs that wait for each other, each for the one behind it, the first again at the end; empty if there are none.

    ``after``: by the number of each spec, the numbers of the specs that it waits for.
    """
    try:
        TopologicalSorter(after).prepare()
    except CycleError as error:
        # Python names each before the one that waits for it.
        return list(reversed(error.args[1]))
    return []


def creation_order(after: Mapping[int, Sequence[int]]) -> list[int]:
    """The numbers of specs, each behind the specs that it waits for, otherwise in order; they have no cycle."""
    sorter = TopologicalSorter(after)
    sorter.prepare()
    order: list[int] = []
    ready = list(sorter.get_ready())
    while ready:
        # The smallest number first: specs that do not depend on each other keep their order.
        ready.sort()
        first = ready.pop(0)
        order.append(first)
        sorter.done(first)
        ready += sorter.get_ready()
    return order
