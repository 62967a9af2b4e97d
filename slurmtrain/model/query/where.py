"""Conditions on runs: ``params.lr < 0.1 and state = completed and not tags = bad``.

A hand-written recursive-descent parser, since the grammar is small, and any parser generator takes longer to import
than the command that uses it takes to run::

    condition   conjunction ("or" conjunction)*
    conjunction negation ("and" negation)*
    negation    "not" negation | "(" condition ")" | comparison
    comparison  field ("=" | "==" | "!=" | "<" | "<=" | ">" | ">=" | "~" | "!~") value
                | field ["not"] "in" "(" value ("," value)* ")"
                | value ["not"] "in" field

Fields have the names of the JSON. A field or value is a word or a quoted text. A word that is a number
(:func:`.quantities.read_number`) is compared as such; ``null`` stands for a missing or empty value; ``~`` matches a
pattern as shells do. :mod:`.conditions` says what holds.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from slurmtrain.errors import QueryError
from slurmtrain.model.query.conditions import KEYWORDS, ORDERS, WORD, AllOf, AnyOf, Comparison, Condition, Literal, Not
from slurmtrain.model.query.fields import is_time
from slurmtrain.model.query.quantities import read_number, read_span
from slurmtrain.model.run.run import CAUSES, RUN_STATES
from slurmtrain.model.spec.kinds import suggestion

_TOKEN = re.compile(
    r"""\s*(?:(?P<quoted>"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')"""
    r"""|(?P<symbol>==|!=|!~|<=|>=|[=<>~(),])"""
    rf"""|(?P<word>{WORD}))""",
    re.DOTALL,
)
_SYMBOLS = ("=", "==", "!=", "~", "!~", *ORDERS)
# Fields that have one of a few values: anything else is a mistake.
CHOICES: Mapping[str, Sequence[str]] = {"state": RUN_STATES, "cause": CAUSES, "executor": ("slurm", "local")}
# Deeper nesting is no question that a person asks, and would exhaust Python's stack.
_DEEPEST = 50


def parse(text: str, now: float) -> Condition:
    """The condition that a text states.

    Args:
        text: The text.
        now: What ages count back from, in seconds since 1970.

    Raises:
        QueryError: It is not a condition; shows where.
    """
    return _Parser(text, now).parse()


def compare(name: str, operator: str, values: Sequence[str], now: float) -> Comparison:
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
    kind: str
    """``word``, ``quoted``, ``keyword``, ``symbol`` or ``end``."""
    text: str
    at: int


class _Parser:
    """Reads one text."""

    def __init__(self, text: str, now: float) -> None:
        self._text = text
        self._now = now
        self._tokens = list(self._split())
        self._next = 0
        self._depth = 0

    def parse(self) -> Condition:
        if self._token.kind == "end":
            raise QueryError("the condition is empty; write one such as 'params.lr < 0.1 and state = completed'")
        condition = self._alternatives()
        if self._token.kind != "end":
            raise self._error(f"expected 'and' or 'or', not {self._token.text!r}")
        return condition

    def _split(self) -> Iterator[_Token]:
        at = 0
        while match := _TOKEN.match(self._text, at):
            kind, text = str(match.lastgroup), match[str(match.lastgroup)]
            if kind == "word" and text.lower() in KEYWORDS:
                kind, text = "keyword", text.lower()
            elif kind == "quoted":
                text = re.sub(r"\\(.)", r"\1", text[1:-1], flags=re.DOTALL)
            yield _Token(kind, text, match.start(str(match.lastgroup)))
            at = match.end()
        rest = self._text[at:].lstrip()
        if rest:
            why = "a quotation mark that is not closed" if rest[0] in "\"'" else f"{rest[0]!r} cannot stand here"
            raise point_at(self._text, len(self._text) - len(rest), why)
        yield _Token("end", "", len(self._text.rstrip()))

    @property
    def _token(self) -> _Token:
        return self._tokens[self._next]

    def _error(self, message: str) -> QueryError:
        return point_at(self._text, self._token.at, message)

    def _accept(self, kind: str, *texts: str) -> _Token | None:
        """The next token if it is one of these, which is then read."""
        token = self._token
        if token.kind != kind or token.text not in texts:
            return None
        self._next += 1
        return token

    def _operand(self, expected: str) -> _Token:
        """A word or a quoted text."""
        token = self._token
        if token.kind not in ("word", "quoted"):
            instead = "the end" if token.kind == "end" else repr(token.text)
            raise self._error(f"expected {expected}, not {instead}")
        self._next += 1
        return token

    def _alternatives(self) -> Condition:
        parts = [self._conjunction()]
        while self._accept("keyword", "or"):
            parts.append(self._conjunction())
        return parts[0] if len(parts) == 1 else AnyOf(tuple(parts))

    def _conjunction(self) -> Condition:
        parts = [self._negation()]
        while self._accept("keyword", "and"):
            parts.append(self._negation())
        return parts[0] if len(parts) == 1 else AllOf(tuple(parts))

    def _negation(self) -> Condition:
        if self._depth == _DEEPEST:
            raise self._error(f"more than {_DEEPEST} conditions within each other")
        self._depth += 1
        try:
            if self._accept("keyword", "not"):
                return Not(self._negation())
            if self._accept("symbol", "("):
                condition = self._alternatives()
                if not self._accept("symbol", ")"):
                    raise self._error("expected 'and', 'or' or ')'")
                return condition
            return self._comparison()
        finally:
            self._depth -= 1

    def _comparison(self) -> Comparison:
        left = self._operand("a field, such as state or params.lr")
        if symbol := self._accept("symbol", *_SYMBOLS):
            relation = "=" if symbol.text == "==" else symbol.text
            return self._compare(left, relation, [self._operand(f"a value after {symbol.text!r}")])
        negated = self._accept("keyword", "not")
        if not self._accept("keyword", "in"):
            missing = "'in' after 'not'" if negated else f"a comparison after {left.text!r}, such as = or <"
            raise self._error(f"expected {missing}")
        if self._accept("symbol", "("):
            return self._compare(left, "not in" if negated else "in", self._values())
        name = self._operand("a list in parentheses, or a field such as tags, after 'in'")
        return self._compare(name, "!=" if negated else "=", [left])

    def _values(self) -> list[_Token]:
        values = [self._operand("a value")]
        while self._accept("symbol", ","):
            values.append(self._operand("a value after ','"))
        if not self._accept("symbol", ")"):
            raise self._error("expected ',' or ')'")
        return values

    def _compare(self, name: _Token, relation: str, values: Sequence[_Token]) -> Comparison:
        literals = []
        for value in values:
            try:
                literals.append(_literal(name.text, relation, value.text, value.kind == "quoted", self._now))
            except ValueError as error:
                raise point_at(self._text, value.at, str(error)) from None
        return Comparison(name.text, relation, tuple(literals), name.at)


def _literal(name: str, relation: str, text: str, quoted: bool, now: float) -> Literal:
    """A value for the field ``name``. Raises ValueError if the field cannot be compared with it."""
    literal = Literal(text, quoted)
    if literal.is_null:
        if relation in ORDERS or relation.endswith("~"):
            raise ValueError(f"null is not compared with {relation!r}; '=' and '!=' find what is missing, or is not")
        return literal
    if relation.endswith("~"):
        return literal
    if is_time(name):
        return Literal(text, quoted, span=read_span(text, now))
    choices = CHOICES.get(name, (text,))
    if text not in choices and relation not in ORDERS:
        hint = suggestion(text, choices) or f"; {name} is one of {', '.join(choices)}"
        raise ValueError(f"there is no {name} {text!r}{hint}")
    return Literal(text, quoted, number=None if quoted else read_number(text))
