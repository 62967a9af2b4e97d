"""Durations and sizes as Slurm writes them: reading them from a spec, and writing them back."""

from __future__ import annotations

import math
import re

from slurmtrain.model.spec.kinds import type_name

_DURATION = re.compile(
    r"(?:(?P<days>\d+)-(?P<dh>\d{1,2})(?::(?P<dm>\d{1,2})(?::(?P<ds>\d{1,2}))?)?"
    r"|(?P<h>\d+):(?P<m>\d{1,2}):(?P<s>\d{1,2})"
    r"|(?P<mm>\d+):(?P<ss>\d{1,2})"
    r"|(?P<minutes>\d+))"
)
_WRITE_TIME = 'write it in quotes, for example "12:00:00" or "2-12"'


def parse_duration(value: object) -> int:
    """Seconds from one of Slurm's time formats (``sbatch --time``), or from a whole number of minutes.

    Raises ValueError for anything else, and for the number that YAML reads for an unquoted ``12:00:00`` (43200).
    """
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ValueError(f"expected a time, found {type_name(value)} ({value!r}); {_WRITE_TIME}")
    if isinstance(value, int):
        # As minutes this would be more than two days: more likely an unquoted time than a number of minutes.
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


_SPAN = re.compile(r"(\d{1,6})\s*([smh])")


def parse_span(value: object) -> int:
    """Seconds from ``90s``, ``10m`` or ``2h``, or from what :func:`parse_duration` reads. Raises ValueError."""
    match = _SPAN.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is None:
        try:
            return parse_duration(value)
        except ValueError:
            raise ValueError(
                f"expected a time, found {type_name(value)} ({value!r}); write for example 90s, 10m or 2h"
            ) from None
    seconds = int(match[1]) * {"s": 1, "m": 60, "h": 3600}[match[2]]
    if seconds <= 0:
        raise ValueError(f"expected a time above zero, found {value!r}")
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
        raise ValueError(f"expected {quantity}, found {type_name(value)} ({value!r}); write for example {examples}")
    match = _AMOUNT.fullmatch(value.strip())
    if match is None:
        if re.fullmatch(r"[1-9]\d{0,6}(\.\d+)?", value.strip()):
            raise ValueError(f"{value!r} has no unit; write for example {value.strip()}GB")
        raise ValueError(f"{value!r} is not {quantity}; write for example {examples}")
    count = float(match["amount"]) * _UNITS[match["unit"].upper()]
    if count > _MOST:
        raise ValueError(f"expected {quantity}, and {value!r} is more than there is")
    if count <= 0:
        raise ValueError(f"expected {quantity} above zero, found {value!r}")
    return math.ceil(count / per)
