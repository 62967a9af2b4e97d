"""The kinds of values a spec can hold: how each is read, and how the reference names it.

A kind never raises for a user's mistake: it calls ``report(path, message)`` and continues, so that one reading finds
all mistakes of a file.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from functools import cache
from typing import Any, Protocol

from slurmtrain.model.written import plain_numbers

_KEYS = {
    "command": ("cmd", "script", "run", "entrypoint", "program"),
    "params": ("args", "arguments", "parameters", "hyperparameters", "hparams"),
    "name": ("job_name", "job-name", "jobname"),
    "env": ("environment", "environ", "env_vars", "variables"),
    "setup": ("modules", "prolog", "prologue", "setup_commands"),
    "workdir": ("cwd", "chdir", "directory", "working_dir", "working_directory"),
    "sweep": ("grid", "sweeps", "array"),
    "slurm": ("sbatch", "sbatch_options"),
    "slurm.partition": ("queue", "partitions"),
    "resources.nodes": ("node", "num_nodes", "n_nodes", "nnodes"),
    "resources.gpus_per_node": ("gpu", "gpus", "num_gpus", "n_gpus", "ngpus", "gpus_per_task", "gres"),
    "resources.procs_per_node": (
        "procs", "processes", "tasks", "ntasks", "nproc", "nproc_per_node", "tasks_per_node", "ntasks_per_node",
    ),
    "resources.cpus_per_proc": ("cpu", "cpus", "cores", "num_cpus", "cpus_per_task", "cpus-per-task"),
    "resources.mem": ("memory", "ram", "mem_per_node"),
    "resources.time": ("walltime", "timeout", "time_limit", "timelimit", "time-limit"),
    "strategy": ("parallel", "parallelism", "parallelize", "ddp", "fsdp", "hsdp"),
    "strategy.mixed_precision": ("precision", "amp", "param_dtype"),
    "resources.accumulation": ("gradient_accumulation", "gradient_accumulation_steps", "accumulate_grad_batches"),
    "requeue.max_failures": ("retries", "max_retries", "max_restarts"),
}  # fmt: skip

OTHER_NAMES = {name: tuple(key.split(".")) for key, names in _KEYS.items() for name in names}


# A key of the file with the keys of the sections around it, outermost first.
KeyPath = tuple[str, ...]
# Called for each mistake, with the key and a sentence.
Report = Callable[[KeyPath, str], None]
# A key of a section that contradicts another one, and why.
Conflict = tuple[str, str]


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


def suggestion(word: str, candidates: Iterable[str]) -> str:
    """``; did you mean 'x'?`` for the most similar candidate, or an empty string if none is similar."""
    near = nearest(str(word), candidates)
    return f"; did you mean {near!r}?" if near else ""


def nearest(word: str, candidates: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The one of the ``candidates`` most similar to ``word``; None if none is as similar as ``cutoff``, from 0 to 1."""
    import difflib  # only needed for mistakes; loading it would slow down every command

    return next(iter(difflib.get_close_matches(word, list(candidates), n=1, cutoff=cutoff)), None)


def type_name(value: object) -> str:
    """The type of a value in words that a YAML user knows."""
    if value is None:
        return "nothing (null)"
    names = {
        bool: "true/false",
        int: "a whole number",
        float: "a number",
        str: "text",
        list: "a list",
        dict: "a mapping",
    }
    return names.get(type(value), type(value).__name__)


@dataclass(frozen=True, slots=True)
class Scalar:
    """A kind that ``parse`` reads and ``write`` writes; ``parse`` raises ValueError with a sentence.

    ``is_text``: whether a number becomes text, which is then what the user wrote: ``0123`` and not 83.
    """

    text: str
    parse: Callable[[object], Any]
    write: Callable[[Any], object] = lambda value: value
    is_text: bool = False

    def read(self, value: object, at: KeyPath, report: Report) -> Any:
        """As :meth:`Kind.read` with its ``value``, ``at`` and ``report``."""
        try:
            return self.parse(value if self.is_text else plain_numbers(value))
        except ValueError as error:
            report(at, str(error))
            return None


def whole_number(minimum: int, maximum: int | None = None, why: str = "") -> Scalar:
    """A whole number from ``minimum`` to ``maximum``; ``why`` explains the bounds in the message for another number."""
    bounds = f"of at least {minimum}" if maximum is None else f"from {minimum} to {maximum}"

    def parse(value: object) -> int:
        # True is an int to Python, and "yes" is True to YAML.
        if isinstance(value, bool) or not isinstance(value, int):
            raise ValueError(f"expected a whole number, found {type_name(value)} ({value!r})")
        if value < minimum or (maximum is not None and value > maximum):
            raise ValueError(f"expected a whole number {bounds}, found {value}{f': {why}' if why else ''}")
        return value

    return Scalar(f"whole number {bounds}", parse)


def finite_number(minimum: float) -> Scalar:
    """A finite number of at least ``minimum``."""

    def parse(value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"expected a number, found {type_name(value)} ({value!r})")
        if not _is_finite(value) or value < minimum:
            raise ValueError(f"expected a number of at least {minimum:g}, found {value}")
        return value

    return Scalar(f"number of at least {minimum:g}", parse)


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer that no float can hold
        return False


def boolean() -> Scalar:
    """True or false."""

    def parse(value: object) -> bool:
        if not isinstance(value, bool):
            raise ValueError(f"expected true or false, found {type_name(value)} ({value!r})")
        return value

    return Scalar("true or false", parse)


def text(name: str = "text", check: Callable[[str], None] | None = None) -> Scalar:
    """A text that is not blank, called ``name`` in messages; ``check`` raises ValueError for a bad one."""

    def parse(value: object) -> str:
        if not isinstance(value, str):
            raise ValueError(f"expected {name}, found {type_name(value)} ({value!r}){_quote_hint(value, check)}")
        if not value.strip():
            raise ValueError(f"expected {name}, found a blank text")
        if "\0" in value:
            raise ValueError("a NUL character cannot be used here")
        if check is not None:
            check(value)
        return value

    return Scalar(name, parse, is_text=True)


def _quote_hint(value: object, check: Callable[[str], None] | None) -> str:
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


def choice(*words: str) -> Scalar:
    """One of a few words."""

    def parse(value: object) -> str:
        if not isinstance(value, str) or value not in words:
            hint = suggestion(value, words) if isinstance(value, str) else ""
            raise ValueError(f"expected one of {', '.join(words)}, found {value!r}{hint}")
        return value

    return Scalar("one of " + ", ".join(f"`{word}`" for word in words), parse)


def level(*words: str) -> Scalar:
    """One of a few words. The first may be written false, and the last one true: YAML 1.1 reads `off` as false."""
    inner = choice(*words)

    def parse(value: object) -> str:
        if isinstance(value, bool):
            return words[-1] if value else words[0]
        parsed: str = inner.parse(value)
        return parsed

    return Scalar(inner.text, parse)


@dataclass(frozen=True, slots=True)
class Nullable:
    """A kind that may also be null."""

    kind: Scalar

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
            report(at, f"expected a list, found {type_name(value)} ({value!r})")
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
            report(at, f"expected a mapping (name: value), found {type_name(value)} ({value!r})")
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
    """A mapping with a fixed set of keys: the fields of a dataclass, each made by :func:`declare_key`.

    The dataclass may have a method ``conflicts`` that yields keys which contradict each other.
    """

    cls: type

    @property
    def text(self) -> str:
        """As :attr:`Kind.text`."""
        return "section"

    def read(self, value: object, at: KeyPath, report: Report) -> Any:
        """As :meth:`Kind.read` with its ``value``, ``at`` and ``report``."""
        if value is None:
            value = {}
        if not isinstance(value, Mapping):
            switch = isinstance(value, bool) and "enabled" in _schema(self.cls)
            cure = f"; write {{enabled: {str(value).lower()}}}" if switch else ""
            report(at, f"expected a section (key: value), found {type_name(value)} ({value!r}){cure}")
            return self.cls()
        schema = _schema(self.cls)
        misspelt = set()
        for key in value:
            if key not in schema:
                hint = hint_for_unknown_key((*at, str(key)), schema)
                misspelt.add(hint.key)
                report((*at, str(key)), f"unknown key{hint}")
        for name, f in schema.items():
            # One mistake, one message: a key that is there under another name is not missing.
            if f.metadata["required"] and name not in value and (*at, name) not in misspelt:
                report((*at, name), "this key is required")
        # Also after a mistake, so that conflicts of the other keys are reported in the same pass.
        section = self.cls(**{name: _read_field(f, value, at, report) for name, f in schema.items()})
        for key, message in section.conflicts() if hasattr(section, "conflicts") else ():
            report((*at, key) if key else at, message)
        return section

    def write(self, value: Any) -> object:
        """As :meth:`Kind.write`."""
        plain: dict[str, Any] = {}
        defaults = _plain_defaults(self.cls)
        for name, f in _schema(self.cls).items():
            inside = getattr(value, name)
            plain[name] = defaults[name] if inside is f.default else f.metadata["kind"].write(inside)
        return plain


@cache
def _schema(cls: type) -> Mapping[str, Any]:
    """The fields of a section's dataclass, by name: a sweep of a thousand runs reads and writes it so often."""
    return {f.name: f for f in fields(cls)}


@cache
def _plain_defaults(cls: type) -> Mapping[str, Any]:
    """What is written for the defaults of a section's keys, which most specs leave most keys at.

    All specs of this process share these lists and mappings: whoever changes one of them changes a copy.
    """
    return {name: f.metadata["kind"].write(f.default) for name, f in _schema(cls).items() if f.default is not MISSING}


@dataclass(frozen=True, slots=True)
class ShorthandSection(Section):
    """A section that may be written as one value, for its ``key``: ``3`` for ``{last: 3}`` if the key is `last`."""

    key: str = ""

    @property
    def text(self) -> str:
        """As :attr:`Kind.text`."""
        return f"{self.key}, or section"

    def expand(self, value: object) -> object:
        """The mapping that a single value stands for; anything else unchanged."""
        return {self.key: value} if isinstance(value, bool | int | float | str) else value

    def read(self, value: object, at: KeyPath, report: Report) -> Any:
        """As :meth:`Kind.read` with its ``value``, ``at`` and ``report``."""
        mapping = self.expand(value)
        if mapping is value:
            return Section.read(self, value, at, report)
        # The file does not contain the key, so a mistake in its value is reported at the section.
        return Section.read(self, mapping, at, lambda path, why: report(at if path == (*at, self.key) else path, why))


@dataclass(frozen=True, slots=True)
class LevelSection(ShorthandSection):
    """A section that may be written as its `level`."""

    key: str = "level"


@dataclass(frozen=True, slots=True)
class NullableSection(Section):
    """A section that may also be null."""

    @property
    def text(self) -> str:
        """As :attr:`Kind.text`."""
        return "section, or null"

    def read(self, value: object, at: KeyPath, report: Report) -> Any:
        """As :meth:`Kind.read` with its ``value``, ``at`` and ``report``."""
        return None if value is None else Section.read(self, value, at, report)

    def write(self, value: Any) -> object:
        """As :meth:`Kind.write`."""
        return None if value is None else Section.write(self, value)


def declare_key(default: Any, kind: Kind, doc: str, *, required: bool = False) -> Any:
    """Declare one key of a section, as a field of its dataclass.

    Args:
        default: Its value if the file does not have the key; a dict is copied.
        kind: How it is read and written.
        doc: Its text in the reference (docs/spec.md).
        required: Whether a file without the key has a mistake.
    """
    metadata = {"kind": kind, "doc": doc, "required": required}
    # A dataclass would share one dict between all of its instances, and therefore refuses it.
    if isinstance(default, dict):
        return field(default_factory=lambda: dict(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def default_of(f: Any) -> Any:
    """The default of a dataclass field that has a default or a default factory."""
    return f.default if f.default is not MISSING else f.default_factory()


def _read_field(f: Any, value: Mapping[Any, object], at: KeyPath, report: Report) -> Any:
    if f.name not in value:
        return default_of(f)
    return f.metadata["kind"].read(value[f.name], (*at, f.name), report)


# The section of each key, for a hint if a key is in the wrong one. Filled by slurmtrain.model.spec.spec, which
# imports this module and not the other way round.
HOMES: dict[str, KeyPath] = {}
# How similar a key of the section must be to outweigh that a key of this very name is in another section.
_ALMOST_THE_SAME = 0.75


@dataclass(frozen=True, slots=True)
class Hint:
    """What an unknown key may be meant to be: the end of a message, and the key; an empty one if that is not known."""

    text: str
    key: KeyPath = ()

    def __str__(self) -> str:
        return self.text


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
