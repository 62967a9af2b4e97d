"""Values of a swept key in short: ``range(5)``, ``linspace(0, 1, 5)``, ``choice(relu, gelu)``; searches among them.

Parsed, never evaluated. All arithmetic is exact or in decimal, so that every machine and every version of Python gets
the same values.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Context, Decimal
from fractions import Fraction
from functools import partial
from typing import Annotated, Any

from slurmtrain.model.experiment import kinds

_CALL = re.compile(r"\s*([A-Za-z_]\w*)\s*\((.*)\)\s*", re.DOTALL)
# An argument: in quotes, or anything without quotes, commas and brackets.
_ARGUMENT = re.compile(r"""\s*("[^"]*"|'[^']*'|[^,"'()\[\]{}]*[^,"'()\[\]{}\s])\s*""")
# So many digits always fit into 64 bits.
_INTEGER = re.compile(r"[+-]?\d{1,18}")
_NUMBER = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?")
_WORDS = {"true": True, "false": False, "null": None}
_DIGITS = Context(prec=40)
# Random values are rounded, for people to read: to this many digits, of the interval's width if it is linear.
_SIGNIFICANT = 6


@dataclass(frozen=True, slots=True)
class Distribution:
    """The values among which a search chooses.

    ``values``: these; empty: numbers from ``low`` to ``high``, both included. ``step``: the distance of whole numbers;
    None: any numbers. ``log``: numbers are alike if their ratios are, not their distances.
    """

    values: Sequence[Any] = ()
    low: float = 0.0
    high: float = 0.0
    step: int | None = None
    log: bool = False

    @property
    def example(self) -> Any:
        """One of the values."""
        return self.values[0] if self.values else self.settle(self.low)

    def __str__(self) -> str:
        if self.values:
            return "one of " + ", ".join(map(str, self.values))
        steps = "" if self.step is None else f", whole numbers in steps of {self.step}"
        return f"{self.low:g} .. {self.high:g}{', logarithmic' if self.log else ''}{steps}"

    def settle(self, number: float) -> int | float:
        """A number of a sampler as a run gets it: with six digits, for people to read."""
        if self.step is not None:
            return int(number)
        return min(max(float(f"{number:.{_SIGNIFICANT}g}"), self.low), self.high)

    def to_dict(self) -> dict[str, Any]:
        """This as JSON."""
        return {"values": list(self.values), "low": self.low, "high": self.high, "step": self.step, "log": self.log}

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> Distribution:
        """Read what :meth:`to_dict` returned. Raises LookupError if it is not that."""
        return cls(tuple(plain["values"]), plain["low"], plain["high"], plain["step"], bool(plain["log"]))


@dataclass(frozen=True, slots=True)
class ListedValues:
    """Values in a fixed order. ``count``: how many; ``at``: the one at an index from 0 on.

    ``distribution``: what a search takes them for; None: for separate values.
    """

    count: int
    at: Callable[[int], Any]
    distribution: Distribution | None = None


@dataclass(frozen=True, slots=True)
class RandomValues:
    """Random values. ``draw`` turns a number from 0 to below 1 into one; ``choices``: how many differ, None: any.

    ``distribution``: the same for a search.
    """

    draw: Callable[[float], Any]
    distribution: Distribution
    choices: int | None = None


def is_expression(value: object) -> bool:
    """Whether a value is text that calls one of the functions of this module."""
    called = _CALL.fullmatch(value) if isinstance(value, str) else None
    return called is not None and called[1] in _FUNCTIONS


def read_expression(text: str) -> ListedValues | RandomValues:
    """The values that ``text`` stands for. Raises ValueError with a sentence."""
    called = _CALL.fullmatch(text)
    if called is None or called[1] not in _FUNCTIONS:
        near = kinds.suggestion(called[1], _FUNCTIONS) if called else ""
        if text.partition("(")[0] in _FUNCTIONS and not text.rstrip().endswith(")"):
            near = "; in braces, put all of it in quotes: a comma ends it otherwise"
        names = ", ".join(f"{name}()" for name in _FUNCTIONS)
        raise ValueError(f"expected a list of at least one value, or one of {names}; found {text!r}{near}")
    read, usage = _FUNCTIONS[called[1]]
    try:
        return read(_arguments(called[2]))
    except _Unusable:
        raise ValueError(f"expected {usage}, found {text.strip()!r}") from None


class _Unusable(Exception):
    """The arguments are too few, too many, or of the wrong kind."""


def _arguments(text: str) -> list[str]:
    """The arguments as written. Raises _Unusable if they cannot be told apart."""
    if not text.strip():
        return []
    arguments, position = [], 0
    while True:
        match = _ARGUMENT.match(text, position)
        if match is None:
            raise _Unusable
        arguments.append(match[1])
        position = match.end()
        if position == len(text):
            return arguments
        if text[position] != ",":
            raise _Unusable
        position += 1


def _integer(text: str) -> int:
    if not _INTEGER.fullmatch(text):
        raise _Unusable
    return int(text)


def _number(text: str) -> Decimal:
    if not _NUMBER.fullmatch(text):
        raise _Unusable
    # Through a float, whose exponent is limited, as numbers in YAML are.
    if not math.isfinite(float(text)):
        raise ValueError(f"{text} is too large")
    return Decimal(repr(float(text)))


def _interval(arguments: Sequence[str], *, positive: bool) -> tuple[Decimal, Decimal]:
    if len(arguments) != 2:
        raise _Unusable
    low, high = map(_number, arguments)
    if positive and min(low, high) <= 0:
        raise ValueError(f"the ends of a logarithmic scale must be positive, found {arguments[0]} and {arguments[1]}")
    return low, high


def _range(arguments: Sequence[str]) -> ListedValues:
    if not 1 <= len(arguments) <= 3:
        raise _Unusable
    numbers = [_integer(text) for text in arguments]
    start, stop, step = (0, *numbers, 1) if len(numbers) == 1 else (*numbers, 1)[:3]
    if step == 0:
        raise ValueError("a range with step 0 never ends; its third number is the step")
    count = max(0, -((start - stop) // step))
    if count == 0:
        raise ValueError(f"this range has no values: from {start} to below {stop} with step {step}")
    last = start + (count - 1) * step
    whole = Distribution(low=min(start, last), high=max(start, last), step=abs(step))
    return ListedValues(count, lambda index: start + index * step, whole)


def _spaced(arguments: Sequence[str], *, log: bool) -> ListedValues:
    if len(arguments) != 3:
        raise _Unusable
    count = _integer(arguments[2])
    if count < 1:
        raise ValueError(f"the third number is how many values to take: at least 1, found {count}")
    first, last = _interval(arguments[:2], positive=log)
    if first == last and count > 1:
        raise ValueError(f"its ends are equal, so it would make {count} identical values")
    start, width, gaps = Fraction(first), Fraction(last) - Fraction(first), max(1, count - 1)
    if log:
        return ListedValues(count, lambda index: _between(first, last, Decimal(index), Decimal(gaps)))
    return ListedValues(count, lambda index: float(start + width * Fraction(index, gaps)))


def _between(first: Decimal, last: Decimal, part: Decimal, whole: Decimal) -> float:
    """The number at ``part`` of ``whole`` on a logarithmic scale."""
    # In decimal, since powers of floats differ between C libraries in their last digit.
    exponent = _DIGITS.divide(part, whole)
    ratio = _DIGITS.divide(last, first)
    return float(_DIGITS.multiply(first, _DIGITS.power(ratio, exponent)))


def _read_choice(arguments: Sequence[str]) -> RandomValues:
    if not arguments:
        raise _Unusable
    values = [_plain(text) for text in arguments]
    if len({repr(value) for value in values}) < len(values):
        raise ValueError(f"a value occurs twice in {values!r}")
    return RandomValues(lambda part: values[int(part * len(values))], Distribution(values), len(values))


def _plain(text: str) -> Any:
    if text[0] in "\"'":
        return text[1:-1]
    if _INTEGER.fullmatch(text):
        return int(text)
    return float(_number(text)) if _NUMBER.fullmatch(text) else _WORDS.get(text, text)


def _drawn(arguments: Sequence[str], *, log: bool) -> RandomValues:
    low, high = _interval(arguments, positive=log)
    if low >= high:
        raise ValueError(f"the second number must be larger than the first, found {arguments[0]} and {arguments[1]}")
    width, places = Fraction(high) - Fraction(low), _SIGNIFICANT - _DIGITS.subtract(high, low).adjusted()

    def draw(part: float) -> float:
        if not log:
            value = round(Fraction(low) + width * Fraction(part), places)
        else:
            number = Decimal(repr(_between(low, high, Decimal(part), Decimal(1))))
            value = Fraction(number.normalize(Context(prec=_SIGNIFICANT)))
        # Rounding must not leave the interval.
        return float(min(max(value, Fraction(low)), Fraction(high)))

    return RandomValues(draw, Distribution(low=float(low), high=float(high), log=log))


_FUNCTIONS: dict[str, tuple[Callable[[Sequence[str]], ListedValues | RandomValues], str]] = {
    "range": (_range, "range(STOP), range(START, STOP) or range(START, STOP, STEP) of whole numbers"),
    "linspace": (partial(_spaced, log=False), "linspace(FIRST, LAST, COUNT)"),
    "logspace": (partial(_spaced, log=True), "logspace(FIRST, LAST, COUNT)"),
    "choice": (_read_choice, "choice(VALUE, ...)"),
    "uniform": (partial(_drawn, log=False), "uniform(LOW, HIGH)"),
    "loguniform": (partial(_drawn, log=True), "loguniform(LOW, HIGH)"),
}


_LIST = re.compile(r"[\w.+-]+(?:\s*,\s*[\w.+-]+)+")


def is_list(value: object) -> bool:
    """Whether a value is text such as ``0.1,0.3``, which lists values without brackets."""
    return isinstance(value, str) and _LIST.fullmatch(value.strip()) is not None


def describe_other_form(value: object, key: str, *, is_key: Callable[[str], bool]) -> str:
    """What is wrong with a value that is no list, and what to write: a sentence without a full stop.

    Args:
        value: the value of a swept key.
        key: that key.
        is_key: whether the spec has a key of this name.
    """
    problem = f"expected a list of at least one value, found {kinds.type_name(value)} ({value!r})"
    if not isinstance(value, Mapping) or not value:
        some = value if is_list(value) else "0.1, 0.3" if value in (None, [], {}) else json.dumps(value)
        return f"{problem}; write '{key}: [{some}]'"
    name, inner = next(iter(value.items()))
    if is_key(f"{key}.{name}"):
        while isinstance(inner, Mapping) and inner and is_key(f"{key}.{name}"):
            key, (name, inner) = f"{key}.{name}", next(iter(inner.items()))
        return f"{problem}; name the key as a whole: write '{key}.{name}: [{_listed(inner)}]'"
    if is_expression(f"{name}()") and name != "choice":
        # In braces, a comma without quotes would end it.
        samples = "" if name in ("range", "linspace", "logspace") else " and 'samples: 20'"
        return f"""{problem}; write '{key}: "{name}({_listed(inner)})"'{samples}"""
    values = next((each for each in value.values() if isinstance(each, list) and each), [0.1, 0.3])
    return f"{problem}; write '{key}: [{_listed(values)}]'"


def _listed(value: Any) -> str:
    return ", ".join(json.dumps(each) for each in (value if isinstance(value, list) else [value]))


SAMPLERS = ("tpe", "random")
PRUNERS = ("none", "median", "percentile")


@dataclass(frozen=True, slots=True)
class Method:
    """A sampler or a pruner: its name, and its settings as its constructor in Optuna calls them."""

    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)


def _method(names: Sequence[str]) -> kinds.Scalar:
    """A name, or a mapping from a name to settings; it is written as a list of both."""

    def parse(value: Any) -> Method:
        settings: Any = {}
        if isinstance(value, Mapping) and len(value) == 1:
            [(value, settings)] = value.items()
        if not isinstance(value, str) or not isinstance(settings, Mapping | None):
            raise ValueError(
                f"expected one of {', '.join(names)}, or a mapping from one to its settings, found {value!r}"
            )
        return Method(kinds.choice(*names).parse(value), {str(key): each for key, each in (settings or {}).items()})

    return kinds.Scalar("name, or mapping", parse, lambda method: [method.name, dict(method.settings)])


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchKeys:
    """What a search is for, and how it chooses.

    ``metric``: its last value is what a run has reached. ``mode``: whether smaller (``min``) or larger values are
    better. ``trials``: how many runs there are in the end. ``parallel``: how many of them run at once. ``seed``: where
    random numbers begin.
    """

    metric: Annotated[str, kinds.text(), kinds.REQUIRED] = ""
    mode: Annotated[str, kinds.choice("min", "max"), kinds.REQUIRED] = "min"
    trials: Annotated[int, kinds.whole_number(1), kinds.REQUIRED] = 1
    parallel: kinds.Positive = 1
    sampler: Annotated[Method, _method(SAMPLERS)] = Method("tpe")
    pruner: Annotated[Method, _method(PRUNERS)] = Method("none")
    seed: Annotated[int, kinds.whole_number(0, 2**31)] = 0

    def conflicts(self) -> Iterator[kinds.Conflict]:
        """More runs at once than there are. After a mistake, a number is None."""
        if self.trials and self.parallel and self.parallel > self.trials:
            yield "parallel", f"{self.parallel} at once are more than all {self.trials} trials"


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchSpec(SearchKeys):
    """A sweep whose runs are chosen one after the other, by what the runs before them have reached.

    ``space``: the values that each key may have.
    """

    space: Mapping[str, Distribution]

    @property
    def larger(self) -> bool:
        """Whether larger values are better."""
        return self.mode == "max"

    @property
    def objective(self) -> dict[str, Any]:
        """What each of its runs records: ``metric``, ``mode`` (``min`` or ``max``) and ``trials``."""
        return {"metric": self.metric, "mode": self.mode, "trials": self.trials}

    def to_dict(self) -> dict[str, Any]:
        """This as JSON."""
        # "larger" says no more than "mode", but from_dict() goes by it, as the first records have it alone.
        space = {key: each.to_dict() for key, each in self.space.items()}
        return {"space": space, "larger": self.larger, **kinds.Section(SearchKeys).write(self)}

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> SearchSpec:
        """Read what :meth:`to_dict` returned. Raises LookupError, TypeError or ValueError if it is not that."""
        keys = kinds.keys_of(SearchKeys)
        # Records of the first versions have 'larger' alone.
        mode = "max" if plain["larger"] else "min"
        return cls(
            **{name: plain[name] for name in keys if name not in ("mode", "sampler", "pruner")},
            mode=mode,
            sampler=Method(*plain["sampler"]),
            pruner=Method(*plain["pruner"]),
            space={str(key): Distribution.from_dict(each) for key, each in plain["space"].items()},
        )

    def describe(self) -> str:
        """What is searched, as a sentence without a full stop."""
        better = "largest" if self.larger else "smallest"
        return (
            f"a search of {self.trials} trials, {self.parallel} at once, for the {better} {self.metric} "
            f"(sampler {self.sampler.name}, pruner {self.pruner.name})"
        )


def read_search(
    value: Any, space: Mapping[str, Distribution], max_runs: int, report: kinds.Report
) -> SearchSpec | None:
    """The value of ``sweep.search``; None after a mistake.

    Args:
        value: the value.
        space: the values that each key of the sweep may have.
        max_runs: how many runs a sweep may have.
        report: receives what is wrong, with its place below ``sweep``.
    """
    if isinstance(value, Mapping):
        keys, mistakes = kinds.read_all(kinds.Section(SearchKeys), value, ("search",))
        if keys.trials is not None and keys.trials > max_runs:
            why = f"from 1 to {max_runs}, found {keys.trials}: sweep_max_runs in slurmtrain.yaml changes that"
            mistakes.append((("search", "trials"), f"expected a whole number {why}"))
    else:
        why = f"expected a mapping such as {{metric: loss, mode: min, trials: 20}}, found {value!r}"
        mistakes = [(("search",), why)]
    if not space:
        why = "the search varies nothing: name a key, as in 'params.lr: loguniform(1e-5, 1e-1)'"
        mistakes.append((("search",), why))
    for at, message in mistakes:
        report(at, message)
    if mistakes:
        return None
    return SearchSpec(space=space, **{name: getattr(keys, name) for name in kinds.keys_of(SearchKeys)})


def is_same(value: Any, other: Any) -> bool:
    """Whether two values of a key are the same; 1, 1.0 and True are not."""
    return json.dumps(value) == json.dumps(other)
