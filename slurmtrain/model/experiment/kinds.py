"""The kinds of values a spec can hold: how each is read, and how the reference names it.

A section is a dataclass: its fields are its keys, each annotated with its kind and followed by its text in the
reference, as a docstring. ``Annotated[int, whole_number(0)] | None`` is a number or null; ``bool`` and the dataclass of
another section need nothing else. A section may have

- ``SHORTHAND``: the key that a single value stands for: ``3`` for ``{last: 3}`` if it is `last`; or a static method
  ``expand`` that returns the mapping which a value stands for, and any other value unchanged; ``WORDS`` lists the
  words that it knows, if these are all such values;
- ``require``: a static method that raises ValueError for a mapping, as written, which says too little;
- ``conflicts``: a method that yields keys which contradict each other, and why.

A kind never raises for a user's mistake: it calls ``report(path, message)`` and continues, so that one reading finds
all mistakes of a file.

Numbers know how they were written: ``0123`` is 83 to YAML, and still ``0123`` wherever it becomes text.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from functools import cache
from types import MappingProxyType
from typing import Annotated, Any, NamedTuple, Protocol, Self, get_args, get_type_hints

# What other programs call keys of a spec: for a hint to who writes one of these names.
_OTHER_NAMES = {
    "command": "cmd script run entrypoint program",
    "params": "args arguments parameters hyperparameters hparams",
    "name": "job_name job-name jobname",
    "env": "environment environ env_vars variables",
    "setup": "modules prolog prologue setup_commands",
    "workdir": "cwd chdir directory working_dir working_directory",
    "sweep": "grid sweeps array",
    "slurm": "sbatch sbatch_options",
    "slurm.partition": "queue partitions",
    "resources.nodes": "node num_nodes n_nodes nnodes",
    "resources.gpus_per_node": "gpu gpus num_gpus n_gpus ngpus gpus_per_task gres",
    "resources.procs_per_node": "procs processes tasks ntasks nproc nproc_per_node tasks_per_node ntasks_per_node",
    "resources.cpus_per_proc": "cpu cpus cores num_cpus cpus_per_task cpus-per-task",
    "resources.mem": "memory ram mem_per_node",
    "resources.time": "walltime timeout time_limit timelimit time-limit",
    "strategy": "parallel parallelism parallelize ddp fsdp hsdp",
    "strategy.mixed_precision": "precision amp param_dtype",
    "resources.accumulation": "gradient_accumulation gradient_accumulation_steps accumulate_grad_batches",
    "requeue.max_failures": "retries max_retries max_restarts",
}
OTHER_NAMES = {name: tuple(key.split(".")) for key, names in _OTHER_NAMES.items() for name in names.split()}
# Limits of sweeps, here because the settings of every command need them, and not what draws values: beyond the first a
# sweep is surely a mistake; beyond the others, a number of runs and of GPU-hours, ``submit`` asks.
MAX_RUNS = 10_000
CONFIRM_RUNS, CONFIRM_GPU_HOURS = 1000, 1000.0
# A key of the file with the keys of the sections around it, outermost first.
KeyPath = tuple[str, ...]
# Called for each mistake, with the key and a sentence.
Report = Callable[[KeyPath, str], None]
# A key of a section that contradicts another one, and why.
Conflict = tuple[str, str]
# Marks a key in its annotation: a file without it has a mistake.
REQUIRED = object()
# The section of each key of a spec, for a hint if a key is in the wrong one. The module of the spec, which imports this
# one, adds them.
HOMES: dict[str, KeyPath] = {}


class Kind(Protocol):
    """One kind of value."""

    @property
    def text(self) -> str:
        """The name of this kind in the reference."""

    def read(self, value: object, at: KeyPath, report: Report) -> Any:
        """Return ``value``, found at the key ``at``, as the program uses it.

        Mistakes go to ``report``; after one of them the returned value must not be used.
        """

    def write(self, value: Any) -> object:
        """Return the value as written in YAML or JSON; ``read`` turns that into the value again."""


def read_all(kind: Kind, value: object, at: KeyPath = ()) -> tuple[Any, list[tuple[KeyPath, str]]]:
    """What a ``kind`` reads from a ``value`` at the key ``at``, and all mistakes, each with its key."""
    mistakes: list[tuple[KeyPath, str]] = []
    return kind.read(value, at, lambda *mistake: mistakes.append(mistake)), mistakes


def suggestion(word: str, candidates: Iterable[str]) -> str:
    """``; did you mean 'x'?`` for the most similar candidate, or an empty string if none is similar."""
    near = nearest(str(word), candidates)
    return f"; did you mean {near!r}?" if near else ""


def nearest(word: str, candidates: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The one of the ``candidates`` most similar to ``word``; None if none is as similar as ``cutoff``, from 0 to 1."""
    import difflib  # only needed for mistakes; loading it would slow down every command

    return next(iter(difflib.get_close_matches(word, list(candidates), n=1, cutoff=cutoff)), None)


_TYPES = {bool: "true/false", int: "a whole number", float: "a number", str: "text", list: "a list", dict: "a mapping"}


def type_name(value: object) -> str:
    """The type of a value in words that a YAML user knows."""
    return "nothing (null)" if value is None else _TYPES.get(type(value), type(value).__name__)


def expected(right: str, value: object, cure: str = "") -> ValueError:
    """The error about a ``value`` of the wrong type; ``right``: its type; ``cure``: a hint."""
    return ValueError(f"expected {right}, found {type_name(value)} ({value!r}){cure}")


@dataclass(frozen=True, slots=True)
class Scalar:
    """A kind that ``parse`` reads and ``write`` writes; ``parse`` raises ValueError with a sentence.

    ``is_text``: whether a number becomes text, which is then what the user wrote: ``0123`` and not 83. ``schema``: what
    JSON Schema says of it.
    """

    text: str
    parse: Callable[[Any], Any]
    write: Callable[[Any], object] = lambda value: value
    is_text: bool = False
    schema: Mapping[str, Any] = field(default_factory=dict, compare=False)

    def read(self, value: object, at: KeyPath, report: Report) -> Any:
        """As :meth:`Kind.read` with its ``value``, ``at`` and ``report``."""
        try:
            return self.parse(value if self.is_text else plain_numbers(value))
        except ValueError as error:
            report(at, str(error))
            return None


def whole_number(minimum: int, maximum: int | None = None, why: str = "") -> Scalar:
    """A whole number from ``minimum`` to ``maximum``; ``why`` explains the bounds in the message for another number."""
    return _bounded_number("whole number", "integer", minimum, maximum, why)


def finite_number(minimum: float, maximum: float | None = None) -> Scalar:
    """A finite number from ``minimum`` to ``maximum``."""
    return _bounded_number("number", "number", minimum, maximum)


def _bounded_number(noun: str, json_type: str, minimum: float, maximum: float | None, why: str = "") -> Scalar:
    bounds = f"of at least {minimum}" if maximum is None else f"from {minimum} to {maximum}"
    is_whole = json_type == "integer"
    # Not isfinite(), which raises OverflowError for a whole number that no float can hold.
    most = maximum if maximum is not None else math.inf if is_whole else sys.float_info.max

    def parse(value: Any) -> Any:
        # True is an int to Python, and "yes" is True to YAML.
        if isinstance(value, bool) or not isinstance(value, int if is_whole else int | float):
            raise expected(f"a {noun}", value)
        if not minimum <= value <= most:
            raise ValueError(f"expected a {noun} {bounds}, found {value}{f': {why}' if why else ''}")
        return value

    limits = {"minimum": minimum} | ({} if maximum is None else {"maximum": maximum})
    return Scalar(f"{noun} {bounds}", parse, schema={"type": json_type, **limits})


def text(name: str = "text", check: Callable[[str], object] | None = None) -> Scalar:
    """A text that is not blank, called ``name`` in messages; ``check`` raises ValueError for a bad one."""

    def parse(value: object) -> str:
        if not isinstance(value, str):
            raise expected(name, value, _quote_hint(value, check))
        if not value.strip():
            raise ValueError(f"expected {name}, found a blank text")
        if "\0" in value:
            raise ValueError("a NUL character cannot be used here")
        if check is not None:
            check(value)
        return value

    return Scalar(name, parse, is_text=True, schema={"type": "string"})


def _quote_hint(value: object, check: Callable[[str], object] | None) -> str:
    """What to write instead of a value that is no text, if that is right."""
    is_line = isinstance(value, list) and value and all(isinstance(word, str) for word in value)
    if not is_line and not isinstance(value, int | float):
        return ""
    line = " ".join(value) if isinstance(value, list) else str(value).lower()
    try:
        if check is not None:
            check(line)
    except ValueError:
        return ""
    return f"; write {line}" if is_line else "; put it in quotes"


def matching(pattern: str | re.Pattern[str], problem: str) -> Callable[[object], None]:
    """A check that raises ValueError for what does not match as a whole, with this ``problem``; ``{!r}``: the value."""
    compiled = re.compile(pattern)

    def check(value: object) -> None:
        if not isinstance(value, str) or not compiled.fullmatch(value):
            raise ValueError(problem.format(value))

    return check


def choice(*words: str, meant: Mapping[str, str] = MappingProxyType({})) -> Scalar:
    """One of a few words. ``meant``: what is meant by others; the nearest word is hinted at otherwise."""

    def parse(value: object) -> str:
        if not isinstance(value, str) or value not in words:
            other = meant.get(str(value).lower().replace("-", "").replace(" ", "_"))
            hint = f"; did you mean {other!r}?" if other else suggestion(value, words) if isinstance(value, str) else ""
            raise ValueError(f"expected one of {', '.join(words)}, found {value!r}{hint}")
        return value

    return Scalar("one of " + ", ".join(f"`{word}`" for word in words), parse, schema={"enum": list(words)})


def level(*words: str) -> Scalar:
    """One of a few words. The first may be written false, and the last one true: YAML 1.1 reads `off` as false."""
    word = choice(*words)
    booleans = {False: words[0], True: words[-1]}
    return Scalar(
        word.text,
        lambda value: booleans[value] if isinstance(value, bool) else word.parse(value),
        schema={"enum": [*words, True, False]},
    )


def _parse_boolean(value: object) -> bool:
    if not isinstance(value, bool):
        raise expected("true or false", value)
    return value


BOOLEAN = Scalar("true or false", _parse_boolean, schema={"type": "boolean"})
Count = Annotated[int, whole_number(0)]
Positive = Annotated[int, whole_number(1)]
Amount = Annotated[float, finite_number(0)]


@dataclass(frozen=True, slots=True)
class Nullable:
    """A kind that may also be null."""

    kind: Kind

    @property
    def text(self) -> str:
        """As :attr:`Kind.text`."""
        return f"{self.kind.text}, or null"

    def read(self, value: object, at: KeyPath, report: Report) -> Any:
        """As :meth:`Kind.read` with its ``value``, ``at`` and ``report``."""
        return None if value is None else self.kind.read(value, at, report)

    def write(self, value: Any) -> object:
        """As :meth:`Kind.write`."""
        return None if value is None else self.kind.write(value)


@dataclass(frozen=True, slots=True)
class Items:
    """A list, each item of one kind."""

    kind: Kind
    text: str

    def read(self, value: object, at: KeyPath, report: Report) -> tuple[Any, ...]:
        """As :meth:`Kind.read` with its ``value``, ``at`` and ``report``."""
        if not isinstance(value, list | tuple):
            report(at, str(expected("a list", value)))
            return ()
        return tuple(self.kind.read(item, (*at, str(index)), report) for index, item in enumerate(value))

    def write(self, value: Any) -> object:
        """As :meth:`Kind.write`."""
        return [self.kind.write(item) for item in value]


@dataclass(frozen=True, slots=True)
class Entries:
    """A mapping from names to values of one kind; ``check_key`` raises ValueError for a bad name."""

    kind: Kind
    text: str
    check_key: Callable[[str], None]

    def read(self, value: object, at: KeyPath, report: Report) -> dict[str, Any]:
        """As :meth:`Kind.read` with its ``value``, ``at`` and ``report``."""
        if value is None:
            return {}
        if not isinstance(value, Mapping):
            report(at, str(expected("a mapping (name: value)", value)))
            return {}
        entries = {}
        for key, item in value.items():
            try:
                self.check_key(key)
            except ValueError as error:
                report((*at, str(key)), str(error))
                continue
            entries[str(key)] = self.kind.read(item, (*at, str(key)), report)
        return entries

    def write(self, value: Any) -> object:
        """As :meth:`Kind.write`."""
        return {key: self.kind.write(item) for key, item in value.items()}


@dataclass(frozen=True, slots=True)
class Section:
    """A mapping with a fixed set of keys: the fields of a dataclass. ``nullable``: whether it may be null."""

    cls: type
    nullable: bool = False

    @property
    def text(self) -> str:
        """As :attr:`Kind.text`."""
        return "section, or null" if self.nullable else "section"

    def expand(self, value: object) -> object:
        """The mapping that a single value stands for; anything else unchanged."""
        if hasattr(self.cls, "expand"):
            return self.cls.expand(value)
        key = getattr(self.cls, "SHORTHAND", None)
        return {key: value} if key and isinstance(value, bool | int | float | str) else value

    def read(self, value: object, at: KeyPath, report: Report) -> Any:
        """As :meth:`Kind.read` with its ``value``, ``at`` and ``report``."""
        written, value = value, None if value is None else self.expand(value)
        if value is None:
            if self.nullable:
                return None
            value = {}
        keys = keys_of(self.cls)
        if not isinstance(value, Mapping):
            switch = isinstance(value, bool) and "enabled" in keys
            cure = f"; write {{enabled: {str(value).lower()}}}" if switch else ""
            report(at, str(expected("a section (key: value)", value, cure)))
            return self.cls()
        if written is not None and not isinstance(written, Mapping):
            # The file does not contain the key, so a mistake in its value is reported at the section.
            report_outside, inside = report, {(*at, key) for key in value}
            report = lambda key, message: report_outside(at if key in inside else key, message)  # noqa: E731
        self._check_keys(value, at, report)
        # Also after a mistake, so that conflicts of the other keys are reported in the same pass.
        section = self.cls(
            **{
                name: key.kind.read(value[name], (*at, name), report) if name in value else key.default
                for name, key in keys.items()
            }
        )
        for name, message in section.conflicts() if hasattr(section, "conflicts") else ():
            report((*at, name) if name else at, message)
        return section

    def _check_keys(self, value: Mapping[Any, object], at: KeyPath, report: Report) -> None:
        """Report the keys that there are not, and what is missing."""
        keys = keys_of(self.cls)
        misspelt = set()
        for key in value:
            if key not in keys:
                hint = hint_for_unknown_key((*at, str(key)), keys)
                misspelt.add(hint.key)
                report((*at, str(key)), f"unknown key{hint.text}")
        for name, each in keys.items():
            # One mistake, one message: a key that is there under another name is not missing.
            if each.required and name not in value and (*at, name) not in misspelt:
                report((*at, name), "this key is required")
        try:
            if hasattr(self.cls, "require"):
                self.cls.require(value)
        except ValueError as error:
            report(at, str(error))

    def write(self, value: Any) -> Any:
        """As :meth:`Kind.write`."""
        if value is None:
            return None
        defaults = plain_defaults(self.cls)
        plain: dict[str, Any] = {}
        for name, key in keys_of(self.cls).items():
            inside = getattr(value, name)
            # Most keys have their default, whose plain form is made once for all specs.
            plain[name] = defaults[name] if inside is key.field.default else key.kind.write(inside)
        return plain


class Key(NamedTuple):
    """A key of a section. ``required``: whether a file without it has a mistake."""

    kind: Kind
    field: Field[Any]
    required: bool

    @property
    def default(self) -> Any:
        """Its value if the file does not have it; a new one each time where it may be changed."""
        factory = self.field.default_factory
        return self.field.default if factory is MISSING else factory()


# Evaluating the annotations of a class takes longer than reading a section.
@cache
def keys_of(cls: type) -> Mapping[str, Key]:
    """The keys of a section, by name, from the annotations of its dataclass."""
    hints = get_type_hints(cls, include_extras=True)
    required = {name for name, hint in hints.items() if REQUIRED in getattr(hint, "__metadata__", ())}
    return {f.name: Key(_kind_of(hints[f.name]), f, f.name in required) for f in fields(cls)}


def walk_keys(cls: type, at: KeyPath = ()) -> Iterator[tuple[KeyPath, Key]]:
    """Every key of a section and of the sections in it, these before their keys; ``at``: what the section's path is."""
    for name, key in keys_of(cls).items():
        yield (*at, name), key
        if isinstance(key.kind, Section):
            yield from walk_keys(key.kind.cls, (*at, name))


def _kind_of(hint: Any) -> Kind:
    """The kind that an annotation names."""
    for each in getattr(hint, "__metadata__", ()):
        if hasattr(each, "read"):
            kind: Kind = each
            return kind
    if hint is bool:
        return BOOLEAN
    if isinstance(hint, type) and is_dataclass(hint):
        return Section(hint)
    [inner] = [each for each in get_args(hint) if each is not type(None)]
    kind = _kind_of(inner)
    return Section(kind.cls, nullable=True) if isinstance(kind, Section) else Nullable(kind)


@cache
def plain_defaults(cls: type) -> Mapping[str, Any]:
    """What is written for the defaults of a section's keys, which most specs leave most keys at.

    All specs of this process share these lists and mappings: whoever changes one of them changes a copy.
    """
    return {name: key.kind.write(key.default) for name, key in keys_of(cls).items()}


# How similar a key of the section must be to outweigh that a key of this very name is in another section.
_ALMOST_THE_SAME = 0.75


class Hint(NamedTuple):
    """What an unknown key may be meant to be: the end of a message, and the key; an empty one if that is not known."""

    text: str
    key: KeyPath = ()


def hint_for_unknown_key(path: KeyPath, siblings: Iterable[str]) -> Hint:
    """A hint for the unknown key ``path``; ``siblings``: the keys that its section has."""
    (*at, key), names = path, sorted(siblings)
    near = nearest(key, names, _ALMOST_THE_SAME)
    meant = OTHER_NAMES.get(key.lower(), ())
    # At the top level, where users write most, other names of a key outweigh its similarity to other keys.
    if meant and (near is None or meant[:-1] == tuple(at) or not at):
        return Hint(f"; did you mean {(meant[-1] if meant[:-1] == tuple(at) else '.'.join(meant))!r}?", meant)
    if near is None and key in HOMES:
        home = HOMES[key]
        return Hint(f"; it belongs under {'.'.join(home)!r}" if home else "; it belongs at the top level", (*home, key))
    near = near or nearest(key, names)
    if near is not None:
        return Hint(f"; did you mean {near!r}?", (*at, near))
    elsewhere = nearest(key, HOMES, _ALMOST_THE_SAME)
    if elsewhere is not None:
        meant = (*HOMES[elsewhere], elsewhere)
        return Hint(f"; did you mean {'.'.join(meant)!r}?", meant)
    return Hint(f"; the keys here are {', '.join(names)}")


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
