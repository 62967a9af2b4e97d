"""The values of a spec that are more than a number or a word: durations, sizes, names, lines of shell."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from slurmtrain.model.experiment import kinds
from slurmtrain.model.experiment.kinds import WrittenNumber
from slurmtrain.model.experiment.launcher import split_command
from slurmtrain.model.urls import has_url_password

_DURATION = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d{1,2}))?(?::(\d{1,2}))?")
_WRITE_TIME = 'write it in quotes, for example "12:00:00" or "2-12"'


def parse_duration(value: object) -> int:
    """Seconds from one of Slurm's time formats (``sbatch --time``), or from a whole number of minutes.

    Raises ValueError for anything else, and for the number that YAML reads for an unquoted ``12:00:00`` (43200).
    """
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ValueError(f"expected a time, found {kinds.type_name(value)} ({value!r}); {_WRITE_TIME}")
    if isinstance(value, int):
        # As minutes this would be more than two days: more likely an unquoted time than a number of minutes.
        if value >= 3600:
            raise ValueError(f"YAML reads an unquoted 12:00:00 as a (sexagesimal) number, {value}; {_WRITE_TIME}")
        # As for sbatch --time, a bare number is minutes.
        seconds = value * 60
    else:
        match = _DURATION.fullmatch(value.strip())
        if match is None:
            raise ValueError(f"{value!r} is not a time; {_WRITE_TIME}")
        days, *parts = match.groups()
        counts = [int(part) for part in parts if part is not None]
        # Behind days come hours; without days one number, or the first of two, is minutes.
        units = (3600, 60, 1) if days or len(counts) == 3 else (60, 1)
        seconds = int(days or 0) * 86400 + sum(count * unit for count, unit in zip(counts, units, strict=False))
    if seconds <= 0:
        raise ValueError(f"expected a time above zero, found {value!r}")
    return seconds


_LENGTH = re.compile(r"(?=[0-9])(?:(\d{1,9})w)?(?:(\d{1,9})d)?(?:(\d{1,9})h)?(?:(\d{1,9})m)?(?:(\d{1,9})s)?", re.ASCII)
_SECONDS = (7 * 86400, 86400, 3600, 60, 1)


def read_length(text: str) -> int | None:
    """Seconds from a length of time such as ``2w``, ``90s`` or ``1h30m``; None if it is none."""
    match = _LENGTH.fullmatch(text)
    if match is None:
        return None
    return sum(int(count) * unit for count, unit in zip(match.groups(), _SECONDS, strict=True) if count)


def parse_span(value: object, most: int | None = None) -> int:
    """Seconds from what :func:`read_length` or :func:`parse_duration` reads, such as ``10m``. Raises ValueError.

    Args:
        value: The value.
        most: How many there may be; None: any number.
    """
    seconds = read_length(value.replace(" ", "")) if isinstance(value, str) else None
    if seconds is None:
        try:
            seconds = parse_duration(value)
        except ValueError:
            cure = "write for example 90s, 10m or 2h"
            raise ValueError(f"expected a time, found {kinds.type_name(value)} ({value!r}); {cure}") from None
    if seconds <= 0:
        raise ValueError(f"expected a time above zero, found {value!r}")
    if most is not None and seconds > most:
        raise ValueError(f"expected at most {most}s, found {value!r}")
    return seconds


def write_duration(seconds: int) -> str:
    """The time as ``hours:minutes:seconds``, which :func:`parse_duration` reads back."""
    return f"{seconds // 3600:02d}:{seconds % 3600 // 60:02d}:{seconds % 60:02d}"


_AMOUNT = re.compile(r"(?P<amount>\d+(?:\.\d+)?)\s*(?P<unit>[KMGT])(?:i?B)?", re.IGNORECASE)
_NO_AMOUNT = re.compile(r"0+(?:\.0+)?\s*(?:[KMGT](?:i?B)?)?", re.IGNORECASE)
_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
# An exbibyte: more than the memory of any node, and than the checkpoints of any run.
_MOST = 1 << 60


def parse_memory(value: object) -> int:
    """MiB from ``4GB``, ``512M``, ``1.5T``: units are powers of 1024, as in Slurm's ``--mem``."""
    return _parse_amount(value, "an amount of memory", "4GB, 512MB or 1TB", 1 << 20)


def parse_node_memory(value: object) -> int:
    """As :func:`parse_memory`; 0, with a unit or without, is all memory of a node, as for Slurm's ``--mem``."""
    if value == 0 and isinstance(value, int) and not isinstance(value, bool):
        return 0
    return 0 if isinstance(value, str) and _NO_AMOUNT.fullmatch(value.strip()) else parse_memory(value)


def write_node_memory(mib: int) -> str:
    """What :func:`parse_node_memory` reads back; Slurm reads it, too."""
    return f"{mib}M" if mib else "0"


def parse_size(value: object) -> int:
    """Bytes from ``100GB``, ``512M``, ``1.5T``, rounded up to a KiB: units are powers of 1024, as for memory."""
    return _parse_amount(value, "a size", "100GB, 512MB or 1TB", 1 << 10) << 10


def write_size(count: int) -> str:
    """A size in bytes, a multiple of 1 KiB, in the largest unit without a remainder. :func:`parse_size` reads it."""
    # There always is one, since sizes are multiples of 1 KiB.
    unit = next(unit for unit in reversed(_UNITS) if count % _UNITS[unit] == 0)
    return f"{count // _UNITS[unit]}{unit}B"


def _parse_amount(value: object, quantity: str, examples: str, per: int) -> int:
    """A number with a unit, in units of ``per`` bytes, rounded up. Raises ValueError with a sentence.

    ``quantity`` and ``examples`` are parts of that sentence.
    """
    # Slurm reads a bare number as MiB, people mean GB: refuse it rather than be off by a factor of a thousand.
    if isinstance(value, int | float) and not isinstance(value, bool):
        fits = 0 < value < _MOST / _UNITS["G"]
        cure = f"{value}GB or {value}MB" if fits else examples
        raise ValueError(f"{value} {'has no unit' if fits else f'is not {quantity}'}; write for example {cure}")
    if not isinstance(value, str):
        raise ValueError(
            f"expected {quantity}, found {kinds.type_name(value)} ({value!r}); write for example {examples}"
        )
    match = _AMOUNT.fullmatch(value.strip())
    if match is None:
        if re.fullmatch(r"[1-9]\d{0,6}(\.\d+)?", value.strip()):
            raise ValueError(f"{value!r} has no unit; write for example {value.strip()}GB")
        raise ValueError(f"{value!r} is not {quantity}; write for example {examples}")
    count = float(match["amount"]) * _UNITS[match["unit"].upper()]
    if count > _MOST:
        raise ValueError(f"expected {quantity}, and {value!r} is too much")
    if count <= 0:
        raise ValueError(f"expected {quantity} above zero, found {value!r}")
    return math.ceil(count / per)


_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
# Parameters are recorded, so a false alarm stops a submission: only names that end in such a word are refused.
_SECRET_PARAM = re.compile(
    r"(?:^|[_.-])(?:pass(?:word|wd|phrase)?|secrets?|tokens?|credentials?|(?:api|access|private|secret|auth)_?keys?)$"
    r"|(?:password|secret|apikey)$",
    re.IGNORECASE,
)
# The value of such a variable is merely not recorded: a false alarm does no harm.
_SECRET_VARIABLE = re.compile(r"(?:TOKEN|KEY|PASSWORD|PASSWD|SECRET|CREDENTIAL)S?$", re.IGNORECASE)
# Characters of a run's name: it is part of file names and of Slurm's job names.
NAME_LIMIT = 64
# The limit for an experiment's name in MLflow (mlflow/utils/validation.py).
_EXPERIMENT_LIMIT = 500


def check_name(name: str) -> None:
    """Raise ValueError unless this can name a run, in a path, a job name and a shell alike."""
    if len(name) > NAME_LIMIT:
        raise ValueError(f"a name has at most {NAME_LIMIT} characters, this one has {len(name)}")
    if not _NAME.fullmatch(name):
        bad = sorted({character for character in name if not re.match(r"[A-Za-z0-9._-]", character)})
        why = f"{' '.join(map(repr, bad))} cannot be used" if bad else "it must begin with a letter or a digit"
        raise ValueError(
            f"{name!r} cannot be the name of a run: {why}; a name consists of letters, digits, '.', '_' and '-'"
        )


def check_experiment_name(name: str) -> None:
    """Raise ValueError unless this can name an experiment of MLflow, which takes any characters."""
    if len(name) > _EXPERIMENT_LIMIT:
        raise ValueError(f"MLflow's names have at most {_EXPERIMENT_LIMIT} characters, this one has {len(name)}")


def is_secret_variable(name: str, value: object = "") -> bool:
    """Whether an environment variable holds a secret, by its ``name`` or ``value``: it is kept out of every file."""
    return bool(_SECRET_VARIABLE.search(name)) or (isinstance(value, str) and has_url_password(value))


def is_secret_param(name: str) -> bool:
    """Whether a parameter of this name holds a secret: it is refused, as parameters are recorded."""
    return bool(_SECRET_PARAM.search(name))


check_variable_name = kinds.matching(r"[A-Za-z_][A-Za-z0-9_]*", "{!r} cannot be the name of an environment variable")
check_check_name = kinds.matching(_NAME, "{!r} cannot be the name of a check")
# Linux's names have at most 15 characters; =, ^ and the comma have a meaning in NCCL_SOCKET_IFNAME.
check_interface = kinds.matching(
    r"[^\s/=^,]{1,15}", "{!r} cannot be the name of an interface; write for example auto or eth0"
)


def check_param_name(name: object, noun: str = "parameter") -> None:
    """Raise ValueError unless this can name a parameter, on the command line and in a path of keys alike.

    Args:
        name: The name.
        noun: The named thing, for the message.
    """
    if not isinstance(name, str) or not name.strip():
        raise ValueError(f"expected a name, found {kinds.type_name(name)} ({name!r}); put it in quotes")
    if re.search(r"[.=\s\[\]{}$]", name):
        raise ValueError(f"a {noun}'s name cannot hold blanks, '.', '=', '$' or brackets")


# More than any cluster has: rooms that place ranks go through all nodes of a run.
MOST_NODES = 1_000_000


def texts_in(value: object, at: kinds.KeyPath = ()) -> Iterator[tuple[kinds.KeyPath, str]]:
    """All texts in a ``value`` of plain data, with their keys; ``at``: its own."""
    if isinstance(value, str):
        yield at, value
    elif isinstance(value, Mapping):
        for key, inside in value.items():
            yield from texts_in(inside, (*at, str(key)))
    elif isinstance(value, list | tuple):
        for index, inside in enumerate(value):
            yield from texts_in(inside, (*at, str(index)))


def value_at(data: Any, path: Sequence[str], default: Any = None) -> Any:
    """What plain ``data`` has at the key ``path``, items of lists included; ``default`` if it has no such key."""
    for key in path:
        if isinstance(data, Mapping) and key in data:
            data = data[key]
        elif isinstance(data, list) and key.isdecimal() and int(key) < len(data):
            data = data[int(key)]
        else:
            return default
    return data


@dataclass(frozen=True, slots=True)
class Nodes:
    """How many nodes train: at least ``min``, at most ``max``."""

    min: int
    max: int

    def to_dict(self) -> object:
        """The value as written in YAML and JSON."""
        return self.max if self.min == self.max else {"min": self.min, "max": self.max}

    def __str__(self) -> str:
        return str(self.max) if self.min == self.max else f"{self.min}-{self.max}"


class ParamKind:
    """The kind of a parameter: a scalar, a list of scalars, or a mapping of such. A secret name is refused."""

    text = "text, number, true/false, null, or a list or mapping of these"

    def read(self, value: object, at: kinds.KeyPath, report: kinds.Report) -> Any:
        """As :meth:`Kind.read` with its ``value``, ``at`` and ``report``."""
        if isinstance(value, dict):
            return kinds.Entries(self, self.text, check_param_name).read(value, at, report)
        if isinstance(value, list | tuple):
            for index, item in enumerate(value):
                item_path = (*at, str(index))
                if isinstance(item, dict | list | tuple):
                    report(
                        item_path,
                        f"a list of parameters holds scalars, found {kinds.type_name(item)}; use a mapping instead",
                    )
                else:
                    self._check_scalar(item, item_path, at[-1], report)
            return list(value)
        self._check_scalar(value, at, at[-1], report)
        return value

    def _check_scalar(self, value: object, at: kinds.KeyPath, name: str, report: kinds.Report) -> None:
        if value is not None and not isinstance(value, bool | int | float | str):
            report(at, f"expected {self.text}, found {kinds.type_name(value)}; put it in quotes")
        if isinstance(value, str) and (is_secret_param(name) or has_url_password(value)):
            report(at, "this looks like a secret, but parameters are recorded; pass it through 'env' instead")
        if isinstance(value, float) and not math.isfinite(value):
            report(at, "JSON has no such number, and parameters are recorded as JSON; write it in quotes")

    def write(self, value: Any) -> object:
        """As :meth:`Kind.write`."""
        return value


def read_variable(value: object) -> str:
    """The value of an environment variable as text. Raises ValueError."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise kinds.expected("text", value, "; put it in quotes")
    # NUL ends a value in the environment of a process.
    if "\0" in str(value):
        raise ValueError("a NUL character cannot be used here")
    return str(value)


def read_sbatch_value(value: object) -> str | int | bool | None:
    """The value of an sbatch option. Raises ValueError."""
    if value is not None and not isinstance(value, str | int | float | bool):
        raise kinds.expected("text, a number, true or false", value)
    # As it was written: an account may be called 0123.
    if isinstance(value, WrittenNumber | float):
        return str(value)
    # It becomes a line of the batch script (#SBATCH): a line break would add lines to it.
    if isinstance(value, str) and re.search(r"[\n\r\0]", value):
        raise ValueError("an sbatch option cannot hold a line break")
    return value


def read_setup_line(value: object) -> str:
    """One line of shell. Raises ValueError."""
    if not isinstance(value, str):
        raise kinds.expected("a line of shell", value, "; put it in quotes")
    if re.search(r"[\0\r]", value):
        raise ValueError("a carriage return or a NUL character cannot be used here")
    return value


SHELL_KEYS = ("setup", "setup_node", "sidecars", "teardown")
"""The keys of the spec that hold lines of shell, where nothing is interpolated."""


class _Block(kinds.Items):
    """A list of lines of shell, or a block of text (``setup: |``) that has them."""

    def read(self, value: object, at: kinds.KeyPath, report: kinds.Report) -> tuple[Any, ...]:
        """As :meth:`Kind.read` with its ``value``, ``at`` and ``report``."""
        # Not splitlines(), which knows more ends of lines than a shell.
        return super().read(value.rstrip("\n").split("\n") if isinstance(value, str) else value, at, report)


def read_node_count(value: object) -> int:
    """A number of nodes. Raises ValueError."""
    count: int = kinds.whole_number(1).parse(value)
    if count > MOST_NODES:
        raise ValueError(f"no cluster has so many nodes; expected at most {MOST_NODES}, found {count}")
    return count


def read_node_range(value: object) -> Nodes:
    """``resources.nodes``: a number, or ``{min: N, max: N}``. Raises ValueError."""
    if isinstance(value, dict):
        unknown = [key for key in value if key not in ("min", "max")]
        if unknown or len(value) != 2:
            hint = "".join(kinds.suggestion(key, ("min", "max")) for key in unknown[:1])
            raise ValueError(f"expected a whole number of nodes, or {{min: N, max: N}}, found {value!r}{hint}")
        least, most = (read_node_count(value[key]) for key in ("min", "max"))
        if least > most:
            raise ValueError(f"'min' is more than 'max': {least} > {most}")
        return Nodes(least, most)
    count = read_node_count(value)
    return Nodes(count, count)


def check_command(command: str) -> None:
    """Raise ValueError unless a shell could split this command, which is one line."""
    if re.search(r"[\n\r]", command.strip()):
        raise ValueError("a command is one line; fold it with '>-' or put the lines in a script")
    try:
        split_command(command)
    except ValueError as error:
        raise ValueError(f"the quotes of the command do not match ({error}): {command!r}") from None


def compile_pattern(text: str) -> re.Pattern[str]:
    """A regular expression. Raises ValueError with a sentence."""
    try:
        return re.compile(text)
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(f"{text!r} is not a regular expression: {error}") from None


_LINE = kinds.Scalar("line of shell", read_setup_line, is_text=True)
_VARIABLE_VALUE = kinds.Scalar("text or number", read_variable, is_text=True)
Lines = Annotated[tuple[str, ...], kinds.Items(_LINE, "list of shell lines")]
ShellBlock = Annotated[tuple[str, ...], _Block(_LINE, "list of shell lines, or a block of them")]
Params = Annotated[dict[str, Any], kinds.Entries(ParamKind(), "mapping of parameters", check_param_name)]
Variables = Annotated[
    dict[str, str], kinds.Entries(_VARIABLE_VALUE, "mapping of environment variables", check_variable_name)
]
Span = Annotated[int, kinds.Scalar("time such as `10m`", parse_span, write_duration)]
