"""The kinds of values a spec can hold: how each is read, and how the reference names it.

A kind never raises for a user's mistake: it calls ``report(path, message)`` and goes on, so that all mistakes of a
file are found in one reading.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, Protocol

Path = tuple[str, ...]
Report = Callable[[Path, str], None]


class Kind(Protocol):
    """One kind of value."""

    @property
    def text(self) -> str:
        """How the reference names this kind."""

    def read(self, value: object, at: Path, report: Report) -> Any:
        """Return the value as the program uses it; after a ``report`` the return value has no meaning."""

    def write(self, value: Any) -> object:
        """Return the value as it stands in YAML or JSON, such that ``read`` gives it back."""


def suggestion(word: str, known: Iterable[str]) -> str:
    """``; did you mean 'x'?`` for the nearest known word, or an empty string."""
    import difflib  # for mistakes only: it costs every command time to load

    near = difflib.get_close_matches(str(word), list(known), n=1, cutoff=0.6)
    return f"; did you mean {near[0]!r}?" if near else ""


def type_name(value: object) -> str:
    """The name that a writer of YAML has for this value's type."""
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
    """A kind read by one function that raises ValueError with a sentence, and written back by another."""

    text: str
    parse: Callable[[object], Any]
    write: Callable[[Any], object] = lambda value: value

    def read(self, value: object, at: Path, report: Report) -> Any:
        try:
            return self.parse(value)
        except ValueError as error:
            report(at, str(error))
            return None


def whole(minimum: int, maximum: int | None = None, why: str = "") -> Scalar:
    """A whole number within bounds; ``why`` they are these is told with a number that is not."""
    bounds = f"of at least {minimum}" if maximum is None else f"from {minimum} to {maximum}"

    def parse(value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise ValueError(f"expected a whole number, found {type_name(value)} ({value!r})")
        if value < minimum or (maximum is not None and value > maximum):
            raise ValueError(f"expected a whole number {bounds}, found {value}{f': {why}' if why else ''}")
        return value

    return Scalar(f"whole number {bounds}", parse)


def number(minimum: float) -> Scalar:
    """A finite number of at least ``minimum``."""

    def parse(value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"expected a number, found {type_name(value)} ({value!r})")
        if not math.isfinite(value) or value < minimum:
            raise ValueError(f"expected a number of at least {minimum:g}, found {value}")
        return value

    return Scalar(f"number of at least {minimum:g}", parse)


def flag() -> Scalar:
    """True or false."""

    def parse(value: object) -> bool:
        if not isinstance(value, bool):
            raise ValueError(f"expected true or false, found {type_name(value)} ({value!r})")
        return value

    return Scalar("true or false", parse)


def text(what: str = "text", check: Callable[[str], None] | None = None) -> Scalar:
    """A text that is not blank; ``check`` raises ValueError for what it does not like."""

    def parse(value: object) -> str:
        if not isinstance(value, str):
            raise ValueError(f"expected {what}, found {type_name(value)} ({value!r}){_quote_hint(value)}")
        if not value.strip():
            raise ValueError(f"expected {what}, found a blank text")
        if "\0" in value:
            raise ValueError("a NUL character cannot be used here")
        if check is not None:
            check(value)
        return value

    return Scalar(what, parse)


def _quote_hint(value: object) -> str:
    return "; put it in quotes" if isinstance(value, int | float) else ""


def choice(*words: str) -> Scalar:
    """One of a few words."""

    def parse(value: object) -> str:
        if not isinstance(value, str) or value not in words:
            hint = suggestion(value, words) if isinstance(value, str) else ""
            raise ValueError(f"expected one of {', '.join(words)}, found {value!r}{hint}")
        return value

    return Scalar("one of " + ", ".join(f"`{word}`" for word in words), parse)


def level(*words: str) -> Scalar:
    """One of a few words, of which `off` is also written false, and the last one true: so does YAML 1.1 with off."""
    inner = choice(*words)

    def parse(value: object) -> str:
        if isinstance(value, bool):
            return words[-1] if value else words[0]
        parsed: str = inner.parse(value)
        return parsed

    return Scalar(inner.text, parse)


@dataclass(frozen=True, slots=True)
class Optional:
    """A kind that may also be null."""

    kind: Scalar

    @property
    def text(self) -> str:
        return f"{self.kind.text}, or null"

    def read(self, value: object, at: Path, report: Report) -> Any:
        return None if value is None else self.kind.read(value, at, report)

    def write(self, value: Any) -> object:
        return None if value is None else self.kind.write(value)


@dataclass(frozen=True, slots=True)
class Items:
    """A list, each item of one kind."""

    kind: Kind
    text: str

    def read(self, value: object, at: Path, report: Report) -> tuple[Any, ...]:
        if not isinstance(value, list | tuple):
            report(at, f"expected a list, found {type_name(value)} ({value!r})")
            return ()
        return tuple(self.kind.read(item, (*at, str(index)), report) for index, item in enumerate(value))

    def write(self, value: Any) -> object:
        return [self.kind.write(item) for item in value]


@dataclass(frozen=True, slots=True)
class Entries:
    """A mapping from names to values of one kind; ``check_key`` raises ValueError for a bad name."""

    kind: Kind
    text: str
    check_key: Callable[[str], None]

    def read(self, value: object, at: Path, report: Report) -> dict[str, Any]:
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
        return {key: self.kind.write(item) for key, item in value.items()}


@dataclass(frozen=True, slots=True)
class Section:
    """A mapping with a fixed set of keys: one of the dataclasses of :mod:`slurmtrain.model.spec.spec`."""

    cls: type

    @property
    def text(self) -> str:
        return "section"

    def read(self, value: object, at: Path, report: Report) -> Any:
        if value is None:
            value = {}
        if not isinstance(value, Mapping):
            report(at, f"expected a section (key: value), found {type_name(value)} ({value!r})")
            return self.cls()
        known = {f.name: f for f in fields(self.cls)}
        for key in value:
            if key not in known:
                report((*at, str(key)), f"unknown key{_where_instead(str(key), known)}")
        read = {name: _read_field(f, value, at, report) for name, f in known.items()}
        section = self.cls(**read)
        for key, message in section.conflicts() if hasattr(section, "conflicts") else ():
            report((*at, key) if key else at, message)
        return section

    def write(self, value: Any) -> object:
        return {f.name: f.metadata["kind"].write(getattr(value, f.name)) for f in fields(self.cls)}


@dataclass(frozen=True, slots=True)
class Short(Section):
    """A section of which a writer may give one value alone: ``3`` for ``{last: 3}``, where ``key`` is `last`."""

    key: str = ""

    @property
    def text(self) -> str:
        return f"{self.key}, or section"

    def expand(self, value: object) -> object:
        """A value alone as the mapping that it stands for; anything else as it is."""
        return {self.key: value} if isinstance(value, bool | int | float | str) else value

    def read(self, value: object, at: Path, report: Report) -> Any:
        whole = self.expand(value)
        if whole is value:
            return Section.read(self, value, at, report)
        # Nobody has written the key, so a mistake in its value is one of the section.
        return Section.read(self, whole, at, lambda path, why: report(at if path == (*at, self.key) else path, why))


@dataclass(frozen=True, slots=True)
class Levelled(Short):
    """A section of which a writer may give the `level` alone."""

    key: str = "level"


@dataclass(frozen=True, slots=True)
class Absent(Section):
    """A section that may be left out as a whole: null."""

    @property
    def text(self) -> str:
        return "section, or null"

    def read(self, value: object, at: Path, report: Report) -> Any:
        return None if value is None else Section.read(self, value, at, report)

    def write(self, value: Any) -> object:
        return None if value is None else Section.write(self, value)


def option(default: Any, kind: Kind, doc: str, *, required: bool = False) -> Any:
    """Declare one key of a section: its default, its kind, and its line in the reference."""
    metadata = {"kind": kind, "doc": doc, "required": required}
    if isinstance(default, dict):
        return field(default_factory=lambda: dict(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def default_of(f: Any) -> Any:
    """The default of a dataclass field, whichever way it was given."""
    return f.default if f.default is not MISSING else f.default_factory()


def _read_field(f: Any, value: Mapping[Any, object], at: Path, report: Report) -> Any:
    if f.name not in value:
        if f.metadata["required"]:
            report((*at, f.name), "this key is required")
        return default_of(f)
    return f.metadata["kind"].read(value[f.name], (*at, f.name), report)


# Set by slurmtrain.model.spec.spec: where each key lives, to tell a writer who put it in the wrong section.
HOMES: dict[str, str] = {}


def _where_instead(key: str, known: Mapping[str, Any]) -> str:
    near = suggestion(key, known)
    if near:
        return near
    if key in HOMES:
        return f"; it belongs under {HOMES[key]!r}" if HOMES[key] else "; it belongs at the top level"
    return suggestion(key, HOMES) or f"; the keys here are {', '.join(sorted(known))}"


_DURATION = re.compile(
    r"(?:(?P<days>\d+)-(?P<dh>\d{1,2})(?::(?P<dm>\d{1,2})(?::(?P<ds>\d{1,2}))?)?"
    r"|(?P<h>\d+):(?P<m>\d{1,2}):(?P<s>\d{1,2})"
    r"|(?P<mm>\d+):(?P<ss>\d{1,2})"
    r"|(?P<minutes>\d+))"
)
_WRITE_TIME = 'write it in quotes, as "hours:minutes:seconds" or "days-hours", for example "12:00:00"'


def parse_duration(value: object) -> int:
    """Seconds from one of Slurm's time formats (``sbatch --time``), or from a whole number of minutes.

    Raises ValueError for what YAML turns an unquoted ``12:00:00`` into (43200), and for anything else.
    """
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ValueError(f"expected a time, found {type_name(value)} ({value!r}); {_WRITE_TIME}")
    if isinstance(value, int):
        if value >= 3600:
            raise ValueError(
                f"{value} is what YAML makes of an unquoted 12:00:00 (a sexagesimal number); {_WRITE_TIME}"
            )
        seconds = value * 60
    else:
        match = _DURATION.fullmatch(value.strip())
        if match is None:
            raise ValueError(f"{value!r} is not a time; {_WRITE_TIME}")
        part = {name: int(digits) for name, digits in match.groupdict().items() if digits is not None}
        seconds = (
            part.get("days", 0) * 86400
            + (part.get("dh", 0) + part.get("h", 0)) * 3600
            + (part.get("dm", 0) + part.get("m", 0) + part.get("mm", 0) + part.get("minutes", 0)) * 60
            + part.get("ds", 0) + part.get("s", 0) + part.get("ss", 0)
        )  # fmt: skip
    if seconds <= 0:
        raise ValueError(f"expected a time above zero, found {value!r}")
    return seconds


def write_duration(seconds: int) -> str:
    """The time as ``hours:minutes:seconds``, which :func:`parse_duration` reads back."""
    return f"{seconds // 3600:02d}:{seconds % 3600 // 60:02d}:{seconds % 60:02d}"


_AMOUNT = re.compile(r"(?P<amount>\d+(?:\.\d+)?)\s*(?P<unit>[KMGT])(?:i?B)?", re.IGNORECASE)
_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
# An exbibyte: more than any node's memory, and than any run's checkpoints.
_MOST = 1 << 60


def parse_memory(value: object) -> int:
    """MiB from ``4GB``, ``512M``, ``1.5T``: units are powers of 1024, as Slurm's ``--mem`` has them."""
    return _parse_amount(value, "an amount of memory", "4GB, 512MB or 1TB", 1 << 20)


def parse_size(value: object) -> int:
    """Bytes from ``100GB``, ``512M``, ``1.5T``, to the KiB: units are powers of 1024, as those of memory."""
    return _parse_amount(value, "a size", "100GB, 512MB or 1TB", 1 << 10) << 10


def write_size(count: int) -> str:
    """Whole KiB, given in bytes, in the largest unit that leaves no rest; :func:`parse_size` reads it back."""
    unit = next(unit for unit in reversed(_UNITS) if count % _UNITS[unit] == 0)
    return f"{count // _UNITS[unit]}{unit}B"


def _parse_amount(value: object, what: str, examples: str, per: int) -> int:
    """A number with a unit, in units of ``per`` bytes, rounded up. Raises ValueError with a sentence."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        raise ValueError(f"{value} has no unit; write for example {value}GB or {value}MB")
    if not isinstance(value, str):
        raise ValueError(f"expected {what} such as {examples.split(',')[0]}, found {type_name(value)} ({value!r})")
    match = _AMOUNT.fullmatch(value.strip())
    if match is None:
        if re.fullmatch(r"[\d.]+", value.strip()):
            raise ValueError(f"{value!r} has no unit; write for example {value.strip()}GB")
        raise ValueError(f"{value!r} is not {what}; write for example {examples}")
    count = float(match["amount"]) * _UNITS[match["unit"].upper()]
    if count > _MOST:
        raise ValueError(f"expected {what}, and {value!r} is more than there is")
    if count <= 0:
        raise ValueError(f"expected {what} above zero, found {value!r}")
    return math.ceil(count / per)
