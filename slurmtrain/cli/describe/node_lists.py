"""Nodes, and what each of them reports, in as few words as possible: what many have in common is written once. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from slurmtrain.model.hostlist import compress_hostlist
from slurmtrain.model.preflight.election import natural_sort_key

# Nodes without a range between them, such as tb[1,3,5], could fill a screen.
_LONGEST = 60
# So many clocks are listed one by one.
_CLOCKS_LISTED = 4
# Measured figures: numbers with a unit, but not the numbers in names, versions and addresses.
_FIGURE = re.compile(
    r"(?<![\w.:-])([+-]?\d+(?:\.\d+)?(?:e[+-]\d+)?)"
    r"(?= ?(?:ms|s|min|h|days|times|%|[kKMGT]i?B(?:/s)?|[MG]bit/s|TFLOP/s)(?!\w))"
)


def describe_nodes(hosts: Iterable[str]) -> str:
    """Nodes as Slurm writes them, such as ``tb[1-15]``; a long list is cut."""
    names = sorted(set(hosts), key=natural_sort_key)
    try:
        text = compress_hostlist(names)
    except ValueError:
        # Not all are names that Slurm would know.
        text = ",".join(names)
    if len(text) <= _LONGEST:
        return text
    beginning = text[:_LONGEST].rpartition(",")[0] or text[:_LONGEST]
    return f"{beginning},...{']' * (beginning.count('[') > beginning.count(']'))} ({len(names)} nodes)"


def count_and_nodes(hosts: Sequence[str]) -> str:
    """The nodes of an attempt, and how many there are if that is not obvious."""
    text = describe_nodes(hosts)
    return text if len(hosts) < 2 or text.endswith(")") else f"{text} ({len(hosts)} nodes)"


def describe_values(values: Mapping[str, str]) -> str:
    """A value of each node: once if all have it, else each with its nodes, the most frequent first."""
    hosts: dict[str, list[str]] = {}
    for host, value in values.items():
        hosts.setdefault(value, []).append(host)
    if len(hosts) == 1:
        return next(iter(hosts))
    ordered = sorted(hosts.items(), key=lambda item: -len(item[1]))
    return ", ".join(f"{value} on {describe_nodes(with_it)}" for value, with_it in ordered)


def describe_clocks(clock: Mapping[str, Mapping[str, Any]]) -> str:
    """How far the nodes' clocks are ahead of node 0's: each of a few, else the range, and which is furthest off."""
    if len(clock) <= _CLOCKS_LISTED:
        ordered = sorted(clock.items(), key=lambda pair: natural_sort_key(pair[0]))
        return ", ".join(f"{host} {describe_clock(measured)}" for host, measured in ordered)
    offsets = {host: float(measured["offset_ms"]) for host, measured in clock.items() if _is_measured(measured)}
    phrases = []
    if offsets:
        furthest = max(offsets, key=lambda host: abs(offsets[host]))
        low, high = _offset(min(offsets.values())), _offset(max(offsets.values()))
        phrases.append(low if low == high else f"{low} to {high}, the furthest on {furthest}")
    if missing := [host for host in clock if host not in offsets]:
        phrases.append(f"not measured on {describe_nodes(missing)}")
    return "; ".join(phrases)


def describe_clock(measured: Mapping[str, Any]) -> str:
    """How far one clock is ahead of node 0's, with the bound of the error."""
    if not _is_measured(measured):
        return "not measured"
    bound, offset = measured.get("bound_ms"), float(measured["offset_ms"])
    return _offset(offset) + (f" ± {bound:.2g}" if bound and abs(offset) < 1000 else "")


def pattern(text: str) -> str:
    """A sentence without its figures: equal for sentences that :func:`merge` can merge."""
    return _FIGURE.sub("0", text)


def merge(texts: Sequence[tuple[str, str]]) -> str:
    """Sentences of one pattern as one, with ranges for the figures that differ.

    Args:
        texts: Each with its node; the node with the largest figure is named.
    """
    first = texts[0][1]
    figures = [[float(figure) for figure in _FIGURE.findall(text)] for _, text in texts]
    columns = list(zip(*figures, strict=True))
    differing = [column for column in columns if min(column) != max(column)]
    if not differing:
        return first
    ranges = iter(columns)

    def spread(match: re.Match[str]) -> str:
        column = next(ranges)
        low, high = min(column), max(column)
        return match[0] if low == high else f"{low:g} to {high:g}"

    largest = texts[differing[0].index(max(differing[0]))][0]
    return f"{_FIGURE.sub(spread, first)} (the largest on {largest})"


def _is_measured(measured: Mapping[str, Any]) -> bool:
    return measured.get("offset_ms") is not None


def _offset(milliseconds: float) -> str:
    return f"{milliseconds / 1000:+.4g} s" if abs(milliseconds) >= 1000 else f"{milliseconds:+.3g} ms"
