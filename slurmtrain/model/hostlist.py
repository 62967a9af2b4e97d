"""Slurm's lists of nodes, such as ``rack[0-1]node[2-3],login1``, expanded and compressed without Slurm; names in order.

``expand_hostlist`` returns what ``scontrol show hostnames`` of Slurm 22.05 prints, in its order and with its
duplicates. It is stricter where Slurm only guesses: it refuses unclosed brackets, and blanks or signs in numbers.
Nothing may follow the last bracket of a name: Slurm refuses that too, and never writes it.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Iterator, Sequence

# The most that Slurm accepts in one range (MAX_RANGE in its hostlist.c); here it limits a whole list.
LIMIT = 65536
_SEPARATORS = ", \t\n"
_ITEM = re.compile(r"(?:[^][, \t\n]|\[[^][]*\])+")
_GROUP = re.compile(r"\[([^]]*)\]")
# Slurm reads 64-bit numbers, which hold any number of 19 digits.
_RANGE = re.compile(r"([0-9]{1,19})(?:-([0-9]{1,19}))?")
_PART = re.compile(r"[A-Za-z0-9._-]*")
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")
_TRAILING_NUMBER = re.compile(r"(.*?)([0-9]{0,19})", re.DOTALL)

# First and last number, and the zero-padded width of both: the width of the first, as in Slurm.
_Range = tuple[int, int, int]


def expand_hostlist(text: str) -> list[str]:
    """The nodes of a list, in Slurm's order; none for an empty list.

    In a name with several brackets the last one varies fastest, then the first, the second, and so on.
    Raises ValueError with a sentence for text that is not such a list, and for lists of more than 65,536 nodes.
    """
    if rest := _ITEM.sub("", text).strip(_SEPARATORS):
        raise ValueError(f"{text!r} is not a list of nodes: its brackets do not match at {rest[0]!r}")
    hosts: list[str] = []
    for item in _ITEM.findall(text):
        # Literal text alternates with the contents of brackets; the last element is what follows the last bracket.
        *parts, after = _GROUP.split(item)
        if not all(map(_PART.fullmatch, (*parts[::2], after))) or item[0] in "-.":
            raise ValueError(f"{item!r} is not a list of nodes: it contains characters that names of nodes cannot have")
        if not parts:
            hosts.append(item)
            continue
        if after:
            raise ValueError(f"{item!r} is not a list of nodes: nothing may follow the last bracket, found {after!r}")
        groups = [[_parse_range(part, item) for part in group.split(",")] for group in parts[1::2]]
        if len(hosts) + math.prod(sum(hi - lo + 1 for lo, hi, _ in group) for group in groups) > LIMIT:
            raise ValueError(f"{text[:80]!r} stands for more than {LIMIT} nodes")
        # Literal texts and numbers alternate.
        *front, last = ([f"{n:0{width}d}" for lo, hi, width in group for n in range(lo, hi + 1)] for group in groups)
        for *others, end in itertools.product(*reversed(front), last):
            numbers = [*reversed(others), end]
            hosts.append("".join(literal + number for literal, number in zip(parts[::2], numbers, strict=True)))
    return hosts


def compress_hostlist(hosts: Iterable[str]) -> str:
    """A short list that Slurm expands to the same set of nodes, sorted by name; duplicates are dropped.

    Only trailing numbers become ranges. Raises ValueError with a sentence for what cannot be a node's name.
    """
    numbers: dict[str, list[str]] = {}
    for host in set(hosts):
        if not _NAME.fullmatch(host):
            raise ValueError(f"{host!r} cannot be the name of a node")
        match = _TRAILING_NUMBER.fullmatch(host)
        assert match is not None
        # The digits as text: n1 and n01 are two nodes.
        numbers.setdefault(match[1], []).append(match[2])
    items = []
    for prefix, suffixes in sorted(numbers.items()):
        if "" in suffixes:
            items.append(prefix)
        ranges = list(_ranges(sorted(filter(None, suffixes), key=lambda digits: (len(digits), digits))))
        if len(ranges) == 1 and "-" not in ranges[0]:
            items.append(prefix + ranges[0])
        elif ranges:
            items.append(f"{prefix}[{','.join(ranges)}]")
    return ",".join(items)


def _parse_range(text: str, item: str) -> _Range:
    match = _RANGE.fullmatch(text)
    if match is None:
        raise ValueError(f"{item!r} is not a list of nodes: {text!r} is neither a number nor a range of numbers")
    low, high = int(match[1]), int(match[2] or match[1])
    if low > high:
        raise ValueError(f"{item!r} is not a list of nodes: the range {text!r} runs backwards")
    return low, high, len(match[1])


def _ranges(numbers: Sequence[str]) -> Iterator[str]:
    """Numbers, sorted by digits and value, as Slurm's ranges: a number joins the range that reaches it."""
    start = 0
    for index in range(1, len(numbers) + 1):
        if index < len(numbers) and numbers[index] == f"{int(numbers[index - 1]) + 1:0{len(numbers[start])}d}":
            continue
        yield numbers[start] if index - start == 1 else f"{numbers[start]}-{numbers[index - 1]}"
        start = index


def natural_sort_key(name: str) -> tuple[tuple[int, str], ...]:
    """A key that sorts node2 before node10."""
    # Pairs of the same types throughout, since a number cannot be compared with text.
    return tuple((int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name) if part)


def name_some(names: Sequence[object], most: int = 3) -> str:
    """The first of these ``names``, at ``most`` so many, and how many more there are."""
    return ", ".join(map(str, names[:most])) + (f" and {len(names) - most} more" if len(names) > most else "")
