"""Reasons of runs, as lists show them: the error first, and which reasons are the same."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

# How runs of earlier versions begin: with the process that failed, and how it ended.
_WHO_FIRST = re.compile(r"(?P<who>(?:rank|the command on node) \d+ exited with code \d+): (?P<error>\S.*)", re.S)
_NUMBER = re.compile(r"\d+(?:\.\d+)?")


def error_first(reason: str) -> str:
    """A ``reason`` that begins with the error itself, and then says which process ended how."""
    match = _WHO_FIRST.fullmatch(reason)
    return f"{match['error']}; {match['who']}" if match else reason


def commonest(reasons: Iterable[str]) -> tuple[str, int]:
    """The commonest of these reasons, and how many are alike: in all but numbers, such as those of ranks and steps."""
    alike: dict[str, str] = {}
    counts: Counter[str] = Counter()
    for reason in map(error_first, reasons):
        key = _NUMBER.sub("#", reason)
        alike.setdefault(key, reason)
        counts[key] += 1
    [(key, count)] = counts.most_common(1) or [("", 0)]
    return alike.get(key, ""), count
