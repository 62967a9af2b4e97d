"""Conditions on runs: ``params.lr < 0.1 and state = completed and not tags = bad``.

A condition is an expression of Python, read by :mod:`ast`, but for its operands: fields (by the names of the JSON) and
values are words or quoted texts, such as ``val-loss``, ``2h`` or ``resnet*``. ``=`` means ``==``, ``~`` and ``!~``
match patterns as shells do, and ``value in field`` looks into a list.

A comparison with a missing value does not hold, unless it is with ``null``. A text that is a number
(:func:`.fields.read_number`) is compared as a number. For a list, one item must be equal, or none for ``!=``.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from slurmtrain.errors import QueryError
from slurmtrain.model.experiment.kinds import suggestion
from slurmtrain.model.query import fields
from slurmtrain.model.query.measures import check_field, read_measure
from slurmtrain.model.run.run import CAUSES, RUN_STATES

ORDERS: Mapping[str, Callable[[Any, Any], bool]] = {
    "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge,
}  # fmt: skip
# Fields that have one of a few values: anything else is a mistake.
CHOICES: Mapping[str, Sequence[str]] = {"state": RUN_STATES, "cause": CAUSES, "executor": ("slurm", "local")}
# The opposites of comparisons that hold for a list if none of its items compares so.
_OPPOSITES = {"!=": "=", "not in": "in", "!~": "~"}
# How many fields or values a mistake lists.
_SHOWN = 3


@dataclass(frozen=True, slots=True)
class Literal:
    """A value in a condition. ``quoted``: it is text, even if it looks like a number or null."""

    text: str
    quoted: bool = False
    number: float | None = field(default=None, compare=False)
    span: fields.Span | None = field(default=None, compare=False)

    @property
    def is_null(self) -> bool:
        """Whether it stands for a missing value."""
        return not self.quoted and self.text.lower() == "null"

    @property
    def is_text(self) -> bool:
        """Whether it is neither a number nor a time."""
        return self.number is None and self.span is None


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

    def holds(self, record: fields.Record) -> bool:
        """Whether it holds of the run ``record``."""
        value = fields.value_of(record, self.name)
        # A list is unequal to a value if none of its items is equal to it.
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


@dataclass(frozen=True, slots=True)
class Combination:
    """Conditions: all (``and``), one (``or``) or none (``not``) must hold."""

    operator: str
    parts: tuple[Condition, ...]

    def holds(self, record: fields.Record) -> bool:
        """Whether it holds of the run ``record``."""
        held = (part.holds(record) for part in self.parts)
        return all(held) if self.operator == "and" else any(held) == (self.operator == "or")

    def comparisons(self) -> Iterator[Comparison]:
        """The comparisons that it consists of."""
        return (comparison for part in self.parts for comparison in part.comparisons())


Condition = Comparison | Combination


def _holds(relation: str, value: Any, literal: Literal) -> bool:
    """Whether a single value, which may be missing, stands in a relation to a literal that is not null."""
    # A section has no single value that could be compared.
    if value is None or isinstance(value, Mapping | list):
        return False
    if literal.span is not None:
        moment = fields.moment_of(value)
        return moment is not None and fields.SPAN_RELATIONS["=" if relation == "in" else relation](moment, literal.span)
    if relation == "~":
        return fnmatchcase(fields.text_of(value), literal.text)
    number = None if literal.number is None else fields.number_of(value)
    if relation in ("=", "in"):
        return fields.text_of(value) == literal.text or (number is not None and number == literal.number)
    if literal.number is not None:
        return number is not None and ORDERS[relation](number, literal.number)
    return isinstance(value, str) and ORDERS[relation](value, literal.text)


# --- reading ----------------------------------------------------------------------------------------------------------

_TOKEN = re.compile(
    r"""\s*(?:(?P<quoted>"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')"""
    r"""|(?P<symbol>==|!=|!~|<=|>=|[=<>~(),])"""
    r"""|(?P<word>[^\s()=!<>~,"']+))""",
    re.DOTALL,
)
_KEYWORDS = ("and", "or", "not", "in")
_OPERAND = "_"
# What a condition may end with.
_ENDS = (_OPERAND, ")")
# Python has no patterns: other operators, which have the same precedence, stand for them.
_IN_PYTHON = {"=": "==", "~": "is", "!~": "is not"}
_RELATIONS: Mapping[type[ast.cmpop], str] = {
    ast.Eq: "=", ast.NotEq: "!=", ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Is: "~", ast.IsNot: "!~",
    ast.In: "in", ast.NotIn: "not in",
}  # fmt: skip
# Deeper nesting is no question that a person asks.
_DEEPEST = 50


def parse(text: str, now: float) -> Condition:
    """The condition that a text states.

    Args:
        text: The text.
        now: What ages count back from, in seconds since 1970.

    Raises:
        QueryError: It is not a condition; shows where.
    """
    return _ConditionReader(text, now).read()


def compare_texts(name: str, operator: str, values: Sequence[str], now: float) -> Comparison:
    """A comparison with texts that stand outside an expression.

    Args:
        name: The field.
        operator: As in an expression.
        values: The operands; several for ``in``.
        now: The time that ages count back from, in seconds since 1970.

    Raises:
        QueryError: The field cannot have such a value.
    """
    try:
        return Comparison(name, operator, tuple(_literal(name, operator, value, True, now) for value in values))
    except ValueError as error:
        raise QueryError(str(error)) from None


def point_at(text: str, at: int, message: str) -> QueryError:
    """An error that shows an expression, with a caret under the place that it is about.

    Args:
        text: The expression.
        at: The place, in characters.
        message: What is wrong there.
    """
    from unicodedata import east_asian_width

    shown = "".join(character if character.isprintable() else " " for character in text)
    cells = sum(2 if east_asian_width(character) in "WF" else 1 for character in shown[:at])
    return QueryError(f"{message}\n  {shown}\n  {' ' * cells}^")


class _Token(NamedTuple):
    """A part of a condition, and what stands for it in Python. ``quoted``: it is a quoted text."""

    text: str
    at: int
    python: str
    quoted: bool = False


class _ConditionReader:
    """Reads one text."""

    def __init__(self, text: str, now: float) -> None:
        self._text = text
        self._now = now
        self._tokens = list(self._split())

    def _split(self) -> Iterator[_Token]:
        at = 0
        while match := _TOKEN.match(self._text, at):
            kind = str(match.lastgroup)
            text, place, at = match[kind], match.start(kind), match.end()
            if kind == "quoted":
                yield _Token(re.sub(r"\\(.)", r"\1", text[1:-1], flags=re.DOTALL), place, _OPERAND, quoted=True)
            elif kind == "symbol":
                yield _Token(text, place, _IN_PYTHON.get(text, text))
            else:
                yield _Token(text, place, text.lower() if text.lower() in _KEYWORDS else _OPERAND)
        if rest := self._text[at:].lstrip():
            why = "a quotation mark is not closed" if rest[0] in "\"'" else f"{rest[0]!r} is not allowed here"
            raise point_at(self._text, len(self._text) - len(rest), why)

    def read(self) -> Condition:
        if not self._tokens:
            raise QueryError("the condition is empty; write one such as 'params.lr < 0.1 and state = completed'")
        # On a line of its own each, so that the line of a node, or of a mistake, says which token it is about.
        try:
            tree = ast.parse("\\\n".join(token.python for token in self._tokens), mode="eval")
        except SyntaxError as error:
            raise self._mistake(error) from None
        except (MemoryError, RecursionError):
            raise self._too_deep() from None
        return self._condition(tree.body, 0)

    def _condition(self, node: ast.expr, depth: int) -> Condition:
        if depth == _DEEPEST:
            raise self._too_deep()
        match node:
            case ast.BoolOp(op=op, values=values):
                parts = tuple(self._condition(value, depth + 1) for value in values)
                return Combination("and" if isinstance(op, ast.And) else "or", parts)
            case ast.UnaryOp(operand=operand):
                return Combination("not", (self._condition(operand, depth + 1),))
            case ast.Compare(left=ast.Name() as left, ops=[op], comparators=[right]):
                return self._comparison(self._token(left), _RELATIONS[type(op)], right)
            case ast.Name():
                token = self._token(node)
                raise self._error(node.lineno, f"expected a comparison after {token.text!r}, such as = or <")
            case ast.Compare(ops=[_, *_], comparators=[first, _, *_]):
                raise self._error(first.end_lineno or 0, "expected 'and' or 'or'")
        raise self._error(node.lineno - 1, "expected a field, such as state or params.lr")

    def _comparison(self, name: _Token, relation: str, right: ast.expr) -> Comparison:
        values = [right]
        if relation.endswith("in"):
            if isinstance(right, ast.Tuple) and right.elts:
                values = right.elts
            # Without parentheses it is a list of the run: value in tags.
            elif self._tokens[right.lineno - 2].text != "(":
                return self._compare(self._token(right), "!=" if relation == "not in" else "=", [name])
        return self._compare(name, relation, [self._token(value) for value in values])

    def _compare(self, name: _Token, relation: str, values: Sequence[_Token]) -> Comparison:
        literals = []
        for value in values:
            try:
                literals.append(_literal(name.text, relation, value.text, value.quoted, self._now))
            except ValueError as error:
                raise point_at(self._text, value.at, str(error)) from None
        return Comparison(name.text, relation, tuple(literals), name.at)

    def _token(self, node: ast.expr) -> _Token:
        """The word or quoted text that a node stands for."""
        if not isinstance(node, ast.Name):
            raise self._error(node.lineno - 1, "expected a value")
        return self._tokens[node.lineno - 1]

    def _mistake(self, error: SyntaxError) -> QueryError:
        """What is wrong with a text that is no expression, in terms of its tokens."""
        if "too many nested" in error.msg:
            return self._too_deep()
        # Python shows where the first of two operands begins, not where the second does.
        pairs = enumerate(zip(self._tokens, self._tokens[1:], strict=False), 1)
        place = next((i for i, (a, b) in pairs if a.python in _ENDS and b.python in (_OPERAND, "(")), None)
        if place is None and "was never closed" in error.msg:
            return self._error(len(self._tokens), "expected ')'")
        if place is None:
            # Behind the last token it has no column.
            place = (error.lineno or 1) - bool(error.offset)
        earlier, before = ["", "", *(token.python for token in self._tokens)][place : place + 2]
        text = self._tokens[place - 1].text
        if before in ("", "and", "or", "("):
            return self._error(place, "expected a field, such as state or params.lr")
        if before == "not" and earlier in _ENDS:
            return self._error(place, "expected 'in' after 'not'")
        if before not in _ENDS:
            return self._error(place, f"expected a value after {text!r}")
        if before == _OPERAND and earlier in ("", "and", "or", "not"):
            return self._error(place, f"expected a comparison after {text!r}, such as = or <")
        return self._error(place, "expected 'and' or 'or'")

    def _error(self, place: int, expected: str) -> QueryError:
        token = self._tokens[place] if place < len(self._tokens) else None
        at = len(self._text.rstrip()) if token is None else token.at
        return point_at(self._text, at, f"{expected}, not {'the end' if token is None else repr(token.text)}")

    def _too_deep(self) -> QueryError:
        return QueryError(f"conditions are nested more than {_DEEPEST} levels deep")


def _literal(name: str, relation: str, text: str, quoted: bool, now: float) -> Literal:
    """A value for the field ``name``. Raises ValueError if the field cannot be compared with it."""
    literal = Literal(text, quoted)
    if literal.is_null:
        if relation in ORDERS or relation.endswith("~"):
            raise ValueError(
                f"null cannot be compared with {relation!r}; use '=' to find missing values, '!=' to find others"
            )
        return literal
    if relation.endswith("~"):
        return literal
    if fields.is_time(name):
        return Literal(text, quoted, span=fields.read_span(text, now))
    # Only fields of few values: a name may be anything.
    choices = CHOICES.get(name, (text,))
    if text not in choices and relation not in ORDERS:
        hint = suggestion(text, choices) or f"; {name} is one of {', '.join(choices)}"
        raise ValueError(f"there is no {name} {text!r}{hint}")
    return Literal(text, quoted, number=None if quoted else fields.read_number(text))


# --- mistakes that only the runs show ---------------------------------------------------------------------------------


def check_condition(condition: Condition, text: str, records: Sequence[fields.Record]) -> None:
    """Raise QueryError, which shows where, if a condition compares what no run has, or what cannot be compared.

    Args:
        condition: The condition.
        text: The text that states it.
        records: All runs.
    """
    for comparison in condition.comparisons():
        try:
            check_field(comparison.name, records)
            # A measure is a number, and may take reading a file.
            is_measure = read_measure(comparison.name) is not None
            values = [0.0] if is_measure else [fields.look_up(record, comparison.name) for record in records]
            _check_values(comparison, values)
        except QueryError as error:
            raise point_at(text, comparison.at, str(error)) from None


def _check_values(comparison: Comparison, values: Sequence[object]) -> None:
    sections = [value for value in values if isinstance(value, Mapping)]
    if sections and not all(literal.is_null for literal in comparison.literals):
        parts = dict.fromkeys(f"{comparison.name}.{part}" for section in sections for part in section)
        named = f", such as {', '.join([*parts][:_SHOWN])}" if parts else ""
        raise QueryError(f"{comparison.name!r} has several values{named}")
    text = next((literal.text for literal in comparison.literals if literal.is_text), None)
    if text is None or not comparison.is_order:
        return
    present = [value for value in values if value is not None and value is not fields.ABSENT]
    if present and all(isinstance(value, int | float) and not isinstance(value, bool) for value in present):
        raise QueryError(f"{comparison.name!r} is a number, and {text!r} is not")
