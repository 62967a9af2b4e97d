"""Places: of each mistake of a spec and of the command line, and of what each value of a plan comes from."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slurmtrain.errors import Mistake, SpecError
from slurmtrain.model.experiment.kinds import KeyPath, Section
from slurmtrain.model.experiment.plan import Plan
from slurmtrain.model.experiment.spec import Spec, write_spec
from slurmtrain.model.experiment.sweep import Point
from slurmtrain.model.passwords import without_url_passwords
from slurmtrain.specfile.overrides import SCHEMA, Override, whole_value
from slurmtrain.system.yaml_file import YamlDocument


class Mistakes:
    """Collects mistakes, and finds the line or the argument of each."""

    def __init__(self, document: YamlDocument, overrides: Sequence[Override], swept: Sequence[Override] = ()) -> None:
        """Places are in ``document``, or in arguments: ``overrides``, and the keys to vary, ``swept``."""
        self._document = document
        self._mistakes = list(document.mistakes)
        self._overrides = overrides
        self._swept = {".".join(override.path): override for override in swept}
        self._point: Point = {}

    def __bool__(self) -> bool:
        return bool(self._mistakes)

    def set_point(self, point: Point) -> None:
        """Note what the sweep sets in this run: a mistake in such a value is reported where the sweep has it."""
        self._point = point

    def add(self, path: KeyPath, message: str) -> None:
        """Add a mistake at a key, unless another run of the sweep has it already, or its value cannot even be read."""
        where = self._locate(path)
        key = "" if where.startswith("command line") and path[:1] == ("sweep",) else ".".join(path)
        mistake = Mistake(where, key, without_url_passwords(message))
        unread = any((where, mistake.key) == (other.where, other.key) for other in self._document.mistakes)
        if not unread and mistake not in self._mistakes:
            self._mistakes.append(mistake)

    def add_from_command_line(self, mistakes: Iterable[Mistake]) -> None:
        """Add mistakes that already name their place."""
        self._mistakes.extend(mistakes)

    def raise_if_any(self) -> None:
        """Raise SpecError if there is any mistake, with all of them in the order of the file."""
        if self._mistakes:
            raise SpecError(self.sorted())

    def sorted(self) -> list[Mistake]:
        """All of them, in the order of the file."""
        return sorted(self._mistakes, key=self._order)

    def _order(self, mistake: Mistake) -> tuple[bool, bool, str, int]:
        """Mistakes in the spec's own file come first, then in files that it extends, then on the command line."""
        if mistake.where.startswith("command line"):
            return True, True, "", 0
        file, _, line = mistake.where.rpartition(":")
        return False, file != self._document.name, file, int(line)

    def _locate(self, path: KeyPath) -> str:
        if path == ("sweep",) and self._swept:
            return "command line (--sweep)"
        in_sweep = path[:1] == ("sweep",)
        for key, swept in self._point.items():
            if not in_sweep and _overlap(path, tuple(key.split("."))):
                path, in_sweep = ("sweep", *swept.at), True
        if in_sweep and path[1:2] and path[1] in self._swept:
            return f"command line ({self._swept[path[1]].text})"
        for override in () if in_sweep else self._overrides:
            if _overlap(path, override.path):
                return f"command line ({override.text})"
        return self._document.place_of(path)


def _overlap(path: KeyPath, other: KeyPath) -> bool:
    """Whether two keys are the same, or one is in the section of the other."""
    length = min(len(path), len(other))
    return length > 0 and path[:length] == other[:length]


@dataclass(frozen=True, slots=True)
class ValueSource:
    """Where a value of a plan comes from.

    ``key``: key of the value, with dots. ``origin``: ``file``, ``override``, ``sweep``, ``default``, or ``derived``
    from other values. ``place``: ``FILE:LINE``, or the argument of the command line, without secrets; empty for
    defaults and derived values.
    """

    key: str
    value: Any
    origin: str
    place: str = ""

    def __str__(self) -> str:
        if self.origin == "sweep":
            return f"sweep, {self.place}"
        return self.place or self.origin


@dataclass(frozen=True, slots=True)
class SpecInputs:
    """The inputs that the plans of a spec were made from.

    ``document``: the file, with all that it extends. ``overrides``, ``swept``: from the command line.
    """

    document: YamlDocument
    overrides: Sequence[Override]
    swept: Sequence[Override]

    def sources(self, plan: Plan, point: Point) -> list[ValueSource]:
        """The source of each value of a plan, in the order of the plan.

        Args:
            plan: the plan.
            point: what the sweep sets in it.
        """
        defaults = dict(_leaves(write_spec(Spec()), ()))
        return [
            ValueSource(".".join(path), value, *self._source(path, point, is_default=defaults.get(path, plan) == value))
            for path, value in _leaves(plan.content, ())
        ]

    def _source(self, path: KeyPath, point: Point, *, is_default: bool) -> tuple[str, str]:
        """The origin and the place of a value."""
        unset = ("default" if is_default else "derived", "")
        for key, swept in reversed(list(point.items())):
            at, value = whole_value(Override(tuple(key.split(".")), swept.value, ""))
            if path[: len(at)] == at:
                return ("sweep", self._place_in_sweep(swept.at)) if _written(value, at, path) else unset
        for override in reversed(self.overrides):
            at, value = whole_value(override)
            if path[: len(at)] == at:
                return ("override", f"command line ({override.text})") if _written(value, at, path) else unset
        written = _written(self.document.data, (), path)
        return ("file", self.document.place_of(written)) if written else unset

    def _place_in_sweep(self, at: KeyPath) -> str:
        """Where a value of the sweep is written; ``at``: its key below ``sweep``."""
        for override in self.swept:
            if ".".join(override.path) == at[0]:
                return f"command line ({override.text})"
        return self.document.place_of(("sweep", *at))


def _leaves(content: Mapping[str, Any], at: KeyPath) -> Iterator[tuple[KeyPath, Any]]:
    """The values of a plan that are no sections, with their keys; a list is one value."""
    for key, value in content.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, (*at, key))
        else:
            yield (*at, key), value


def _written(value: Any, at: KeyPath, path: KeyPath) -> KeyPath:
    """The key, as written, that sets ``path``, or of what stands for the section around it; empty: none does.

    Args:
        value: what is written.
        at: the key of ``value``.
        path: what is looked for, at or below ``at``.
    """
    inside = path[len(at) :]
    if not inside:
        return at
    if isinstance(value, Mapping):
        return _written(value[inside[0]], (*at, inside[0]), path) if inside[0] in value else ()
    kind = SCHEMA.get(at)
    if isinstance(kind, Section):
        expanded = kind.expand(value)
        return at if isinstance(expanded, Mapping) and inside[0] in expanded else ()
    return at if value is not None else ()
