"""Numbers that know how they were written: ``0123`` is 83 to YAML, and still ``0123`` wherever it becomes text."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Self


class WrittenNumber:
    """What :class:`WrittenInt` and :class:`WrittenFloat` share.

    They are numbers in every computation, and in JSON; as text they are what the user wrote.
    """

    written: str

    def __str__(self) -> str:
        return self.written

    __repr__ = __str__


class WrittenInt(WrittenNumber, int):
    """A whole number, and how it was written."""

    def __new__(cls, value: int = 0, written: str = "") -> Self:
        """The number ``value``; ``written``: its text, empty for Python's own."""
        # Copies and pickles call this with the number alone, and set the text afterwards.
        self = int.__new__(cls, value)
        self.written = written or int.__repr__(value)
        return self


class WrittenFloat(WrittenNumber, float):
    """A number with a fraction, and how it was written."""

    def __new__(cls, value: float = 0.0, written: str = "") -> Self:
        """The number ``value``; ``written``: its text, empty for Python's own."""
        self = float.__new__(cls, value)
        self.written = written or float.__repr__(value)
        return self


def as_written(value: Any, text: str) -> Any:
    """A value that was written as ``text``; only a number that Python writes in another way remembers that."""
    # Almost all numbers are written as Python writes them: these stay of its own types, and cost nothing further.
    if isinstance(value, bool) or not isinstance(value, int | float) or repr(value) == text:
        return value
    return WrittenInt(value, text) if isinstance(value, int) else WrittenFloat(value, text)


def plain_numbers(value: Any) -> Any:
    """Plain data without the memory of how its numbers were written."""
    if isinstance(value, WrittenInt):
        return int(value)
    if isinstance(value, WrittenFloat):
        return float(value)
    if isinstance(value, dict):
        return {key: plain_numbers(inside) for key, inside in value.items()}
    return [plain_numbers(inside) for inside in value] if isinstance(value, list) else value


def storable(value: Any) -> Any:
    """A copy of plain data that JSON can hold: a number that is infinite becomes its text, as it would anyway."""
    if isinstance(value, Mapping):
        return {key: storable(inside) for key, inside in value.items()}
    if isinstance(value, list):
        return [storable(inside) for inside in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def texts_as_json(value: Any) -> list[list[str]]:
    """How the numbers in plain data were written, for a JSON document beside them: rows of keys and the text."""
    if isinstance(value, WrittenNumber):
        return [[value.written]]
    # A row has its keys apart: if they were joined by dots, a key with a dot could mean two places.
    inside = (
        value.items() if isinstance(value, Mapping) else enumerate(value if isinstance(value, list | tuple) else ())
    )
    return [[str(key), *row] for key, each in inside for row in texts_as_json(each)]


def remembering(value: Any, rows: object) -> Any:
    """Plain data whose numbers remember how they were written.

    Args:
        value: The data, read from JSON.
        rows: What :func:`texts_as_json` has made of it; raises ValueError for anything else.
    """
    if not rows:
        return value
    if not isinstance(rows, Sequence) or isinstance(rows, str):
        raise ValueError("the record of how numbers were written is not a list")
    texts = {}
    for row in rows:
        # It comes from a file, a plan or a journal, where anything may stand.
        if not (isinstance(row, list | tuple) and len(row) > 1 and all(isinstance(each, str) for each in row)):
            raise ValueError(f"this does not say how a number was written: {row!r}")
        texts[tuple(row[:-1])] = row[-1]

    def remember(value: Any, at: tuple[str, ...]) -> Any:
        if isinstance(value, Mapping):
            return {key: remember(inside, (*at, str(key))) for key, inside in value.items()}
        if isinstance(value, list):
            return [remember(inside, (*at, str(index))) for index, inside in enumerate(value)]
        return as_written(value, texts[at]) if at in texts else value

    return remember(value, ())
