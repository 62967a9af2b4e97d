"""Conditions on runs: their parts, which runs they hold for, and how they are written.

A comparison with a missing value does not hold, unless it is with ``null``. A text that is a number
(:func:`.quantities.read_number`) is compared as a number. For a list, one item must be equal, or none for ``!=``.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Protocol

from slurmtrain.model.query.fields import Record, value_of
from slurmtrain.model.query.quantities import SPAN_RELATIONS, Span, moment_of, number_of

KEYWORDS = ("and", "or", "not", "in")
# What a word consists of; anything else is quoted.
WORD = r"""[^\s()=!<>~,"']+"""
_WORD = re.compile(WORD)
_NULL = "null"
ORDERS: Mapping[str, Callable[[Any, Any], bool]] = {
    "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge,
}  # fmt: skip
# The opposites of comparisons that hold for a list if none of its items compares so.
_OPPOSITES = {"!=": "=", "not in": "in", "!~": "~"}


class Condition(Protocol):
    """A condition, which holds of a run or does not; ``str`` writes it so that :func:`.where.parse` reads it back."""

    def holds(self, record: Record) -> bool:
        """Whether it holds of the run ``record``."""

    def comparisons(self) -> Iterator[Comparison]:
        """The comparisons that it consists of."""


@dataclass(frozen=True, slots=True)
class Literal:
    """A value in a condition. ``quoted``: it is text, even if it looks like a number or null."""

    text: str
    quoted: bool = False
    number: float | None = field(default=None, compare=False)
    span: Span | None = field(default=None, compare=False)

    @property
    def is_null(self) -> bool:
        """Whether it stands for a missing value."""
        return not self.quoted and self.text.lower() == _NULL

    @property
    def is_text(self) -> bool:
        """Whether it is neither a number nor a time."""
        return self.number is None and self.span is None

    def __str__(self) -> str:
        return _quote(self.text) if self.quoted else self.text


@dataclass(frozen=True, slots=True)
class Comparison:
    """A field and its operand: several values for ``in``, else one. ``at``: its place in the text."""

    name: str
    operator: str
    literals: tuple[Literal, ...]
    at: int = field(default=0, compare=False)

    @property
    def is_order(self) -> bool:
        """Whether it compares by size."""
        return self.operator in ORDERS

    def holds(self, record: Record) -> bool:
        """Whether it holds of the run ``record``."""
        value = value_of(record, self.name)
        if self.operator in _OPPOSITES:
            return value is not None and not self._any_holds(_OPPOSITES[self.operator], value)
        return self._any_holds(self.operator, value)

    def comparisons(self) -> Iterator[Comparison]:
        """This one."""
        yield self

    def _any_holds(self, relation: str, value: Any) -> bool:
        items = value if isinstance(value, list | tuple) else [value]
        return any(
            value in (None, "", [], {}) if literal.is_null else any(_holds(relation, item, literal) for item in items)
            for literal in self.literals
        )

    def __str__(self) -> str:
        name = self.name if _is_plain(self.name) else _quote(self.name)
        values = ", ".join(map(str, self.literals))
        return f"{name} {self.operator} {f'({values})' if self.operator.endswith('in') else values}"


@dataclass(frozen=True, slots=True)
class Not:
    """The opposite of a condition."""

    inner: Condition

    def holds(self, record: Record) -> bool:
        """Whether it holds of the run ``record``."""
        return not self.inner.holds(record)

    def comparisons(self) -> Iterator[Comparison]:
        """As :meth:`Condition.comparisons`."""
        return self.inner.comparisons()

    def __str__(self) -> str:
        return f"not {_grouped(self.inner, AllOf, AnyOf)}"


@dataclass(frozen=True, slots=True)
class AllOf:
    """Conditions that all hold; none: it always holds."""

    parts: tuple[Condition, ...]

    def holds(self, record: Record) -> bool:
        """Whether it holds of the run ``record``."""
        return all(part.holds(record) for part in self.parts)

    def comparisons(self) -> Iterator[Comparison]:
        """As :meth:`Condition.comparisons`."""
        return (comparison for part in self.parts for comparison in part.comparisons())

    def __str__(self) -> str:
        return " and ".join(_grouped(part, AllOf, AnyOf) for part in self.parts)


@dataclass(frozen=True, slots=True)
class AnyOf:
    """Conditions, at least one of which must hold."""

    parts: tuple[Condition, ...]

    def holds(self, record: Record) -> bool:
        """Whether it holds of the run ``record``."""
        return any(part.holds(record) for part in self.parts)

    def comparisons(self) -> Iterator[Comparison]:
        """As :meth:`Condition.comparisons`."""
        return (comparison for part in self.parts for comparison in part.comparisons())

    def __str__(self) -> str:
        return " or ".join(_grouped(part, AnyOf) for part in self.parts)


def _holds(relation: str, value: Any, literal: Literal) -> bool:
    """Whether a single value, which may be missing, stands in a relation to a literal that is not null."""
    if value is None or isinstance(value, Mapping | list):
        return False
    if literal.span is not None:
        moment = moment_of(value)
        return moment is not None and SPAN_RELATIONS["=" if relation == "in" else relation](moment, literal.span)
    if relation == "~":
        return fnmatchcase(text_of(value), literal.text)
    number = None if literal.number is None else number_of(value)
    if relation in ("=", "in"):
        return text_of(value) == literal.text or (number is not None and number == literal.number)
    if literal.number is not None:
        return number is not None and ORDERS[relation](number, literal.number)
    return isinstance(value, str) and ORDERS[relation](value, literal.text)


def text_of(value: Any) -> str:
    """A value as the JSON has it, text without its quotes."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value)


def _is_plain(text: str) -> bool:
    return bool(_WORD.fullmatch(text)) and text.lower() not in KEYWORDS


def _quote(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _grouped(condition: Condition, *weaker: type) -> str:
    return f"({condition})" if isinstance(condition, weaker) else str(condition)
