"""What a line of a script's output says about its progress: a line of a log, of a CSV file, or of JSON. Pure."""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from slurmtrain.model.experiment.tracking import JSON_SUFFIXES, STEP, TOTAL, ScriptMetricsSpec
from slurmtrain.model.run.events.base import is_text

LONGEST_LINE = 4096
"""Of longer lines of a log, only so many characters are searched."""
# Larger numbers are no counts of steps.
_MOST_STEPS = 10**15
_LONGEST_NUMBER = 40
# As long as a name may be in MLflow (tracking/to_mlflow/sending.py).
_LONGEST_NAME = 250
CONTROLS = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")
"""Select Graphic Rendition and the like: progress bars and loggers colour their output."""
# What may stand around a number that a greedy group such as \S+ has matched.
_AROUND = " \t,;:()[]{}%'\""


class OutputRow(NamedTuple):
    """What a line says. ``step``: finished steps; ``total``: how many there will be; None: it does not say.

    ``counts``: lines with metrics are counted, since nothing says which step they belong to.
    """

    step: int | None
    metrics: Mapping[str, float]
    total: int | None = None
    counts: bool = False


class LineReader(Protocol):
    """Reads lines of one kind of output, from the first one on."""

    problem: str
    """Why nothing can be read; empty if lines can."""

    def read(self, line: str) -> OutputRow | None:
        """What a line, without its end, says; None: nothing."""


def reader_of(spec: ScriptMetricsSpec) -> LineReader:
    """The reader of what the spec says."""
    if spec.pattern is not None:
        return PatternReader(spec.pattern, spec.step)
    assert spec.file is not None
    name = spec.file.lower()
    if name.endswith(JSON_SUFFIXES):
        return JsonReader(spec.step)
    return CsvReader(spec.step, "\t" if name.endswith(".tsv") else None)


class PatternReader:
    """Reads lines of a log, and searches regular expressions in them."""

    def __init__(self, pattern: str, step: str | None) -> None:
        """``pattern`` and ``step``: as in the spec, which has been checked."""
        self.problem = ""
        self._pattern = re.compile(pattern)
        self._step = re.compile(step) if step is not None else None
        self._counts = step is None and STEP not in self._pattern.groupindex

    def read(self, line: str) -> OutputRow | None:
        """As :meth:`LineReader.read` with its ``line``."""
        line = CONTROLS.sub("", line[:LONGEST_LINE])
        texts: dict[str, str] = {}
        # An alternation finds one metric at a time; of one that stands there twice, the first counts.
        for match in self._pattern.finditer(line):
            for name, text in match.groupdict().items():
                if text is not None:
                    texts.setdefault(name, text)
        if self._step is not None and (match_of_step := self._step.search(line)):
            names = self._step.groupindex
            texts[STEP] = match_of_step[STEP if STEP in names else 1] or ""
            if TOTAL in names:
                texts[TOTAL] = match_of_step[TOTAL] or ""
        if not texts:
            return None
        step, total = as_steps(texts.pop(STEP, "")), as_steps(texts.pop(TOTAL, ""))
        return OutputRow(step, _numbers(texts), total, self._counts)


class CsvReader:
    """Reads lines of a CSV file. The first one is the header; so is a later one without any number."""

    def __init__(self, step: str | None, delimiter: str | None = None) -> None:
        """``step``: the column with the number of steps; None: ``step``, if there is one.

        ``delimiter``: between columns; None: a comma or a semicolon, whichever the header has more of.
        """
        self.problem = ""
        self._step = step
        self._delimiter = delimiter
        self._header: Sequence[str] = ()

    def read(self, line: str) -> OutputRow | None:
        """As :meth:`LineReader.read` with its ``line``."""
        if not line.strip():
            return None
        # A byte order mark would become part of the name of the first column.
        line = line.lstrip("\ufeff")
        if self._delimiter is None:
            self._delimiter = ";" if line.count(";") > line.count(",") else ","
        try:
            cells = next(csv.reader([line], delimiter=self._delimiter), [])
        except csv.Error:
            cells = []
        # Loggers that restart, or learn of a new metric, write another header.
        if not self._header or not any(as_number(cell) is not None for cell in cells):
            self._begin(cells)
            return None
        texts = {name: cell for name, cell in zip(self._header, cells, strict=False) if name and cell.strip()}
        return _row_of_columns(texts, self._step, counts=STEP not in self._header)

    def _begin(self, cells: Sequence[str]) -> None:
        """Take these cells for the header, unless a row has only lost its numbers."""
        names = [cell.strip() for cell in cells]
        if not any(names):
            return
        if self._step is not None and self._step not in names:
            if not self._header:
                self.problem = f"there is no column {self._step!r}; the columns are {', '.join(filter(None, names))}"
            return
        self._header = names


class JsonReader:
    """Reads lines that are JSON objects."""

    def __init__(self, step: str | None) -> None:
        """``step``: the key of the number of steps; None: ``step``, if there is one."""
        self.problem = ""
        self._step = step
        self._counts = step is None

    def read(self, line: str) -> OutputRow | None:
        """As :meth:`LineReader.read` with its ``line``."""
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            return None
        if not isinstance(record, dict):
            return None
        # By the exact types, since True is an int, too.
        texts = {name: repr(value) for name, value in record.items() if type(value) in (int, float)}
        # If the first object has no step, none has: lines are counted.
        self._counts = self._counts and STEP not in texts
        return _row_of_columns(texts, self._step, counts=self._counts)


def _row_of_columns(texts: dict[str, str], step: str | None, *, counts: bool) -> OutputRow | None:
    steps = as_steps(texts.pop(step or STEP, ""))
    metrics = _numbers(texts)
    return OutputRow(steps, metrics, None, counts and step is None) if metrics or steps is not None else None


def _numbers(texts: Mapping[str, str]) -> dict[str, float]:
    numbers = {}
    for name, text in texts.items():
        number = as_number(text)
        if number is not None and len(name) <= _LONGEST_NAME and is_text(name):
            numbers[name] = number
    return numbers


def as_number(text: str) -> float | None:
    """A number as programs print it, ``nan`` and ``inf`` included; None if the text is none."""
    text = text.strip(_AROUND)
    try:
        return float(text) if len(text) <= _LONGEST_NUMBER else None
    except ValueError:
        return None


def as_steps(text: str) -> int | None:
    """A number of steps, such as ``1,000`` or ``1000.0``; None if the text is none."""
    number = as_number(text[:_LONGEST_NUMBER].replace(",", ""))
    if number is None or not math.isfinite(number) or not 0 <= number < _MOST_STEPS or number != int(number):
        return None
    return int(number)


class StepCounter:
    """Assigns steps to rows: the step that a row, or one before it, says; or the number of rows with metrics."""

    def __init__(self, finished: int = 0) -> None:
        """``finished``: with how many rows counting begins."""
        self._counted = finished
        self._step: int | None = None

    def place(self, row: OutputRow) -> tuple[int, Mapping[str, float]] | None:
        """The step of a row, with its metrics; None if it has nothing new, or nothing has said a step yet."""
        if row.counts:
            self._counted += bool(row.metrics)
            return (self._counted, row.metrics) if row.metrics else None
        # A progress bar prints the same step many times.
        is_new = row.step is not None and row.step != self._step
        self._step = row.step if row.step is not None else self._step
        if self._step is None or not (is_new or row.metrics):
            return None
        return self._step, row.metrics
