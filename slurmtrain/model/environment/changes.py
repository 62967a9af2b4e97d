"""What differs between two sets of named texts, such as versions or variables, and how it is said."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

Changes: TypeAlias = Mapping[str, tuple[str | None, str | None]]
"""By name: the text in the first, and in the second; None where there is none."""


def changes_between(earlier: Mapping[str, str], later: Mapping[str, str]) -> Changes:
    """What differs, in the order of the names.

    Args:
        earlier: Texts by name.
        later: The others.
    """
    return {
        name: (earlier.get(name), later.get(name))
        for name in sorted(earlier.keys() | later.keys(), key=str.lower)
        if earlier.get(name) != later.get(name)
    }


def describe(changes: Changes, most: int = 5) -> str:
    """Changes in a few words, such as ``torch 2.12 -> 2.13, no numba any more``.

    Args:
        changes: What differs.
        most: How many are named.
    """
    parts = [_describe(name, *texts) for name, texts in list(changes.items())[:most]]
    more = len(changes) - len(parts)
    return ", ".join([*parts, *([f"and {more} more"] if more else [])])


def _describe(name: str, earlier: str | None, later: str | None) -> str:
    if earlier is None:
        return f"{name} {later} (new)"
    if later is None:
        return f"no {name} any more (was {earlier})"
    return f"{name} {earlier} -> {later}"
