"""A run over time, for drawing: which nodes it had when, and how goodput came about. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from typing import NamedTuple

from slurmtrain.model.hostlist import compress_hostlist, natural_sort_key
from slurmtrain.model.run.accounting import Interval, mean_nodes
from slurmtrain.model.run.run import Attempt

Timelines = Mapping[str, Sequence[Interval]]
"""The intervals of attempts, by their keys (:func:`.accounting.timelines`)."""


class Presence(NamedTuple):
    """When nodes took part in an attempt: its number, and seconds since 1970."""

    attempt: int
    begin: float
    end: float


@dataclass(frozen=True, slots=True)
class NodeRow:
    """Nodes that took part at the same times. ``label``: their names, in brackets where they are many."""

    label: str
    hosts: Sequence[str]
    presences: Sequence[Presence]


def rows_of_nodes(attempts: Sequence[Attempt], lines: Timelines, most: int) -> list[NodeRow]:
    """When nodes took part in attempts: a row for each node or, if there are many, for all whose times are the same.

    Args:
        attempts: The attempts of a run.
        lines: When each spent its time on what.
        most: How many rows there may be; the last one then stands for all other nodes.
    """
    presences: dict[str, list[Presence]] = {}
    for attempt in attempts:
        for node, presence in _presence_of_nodes(attempt, lines.get(attempt.key, ())):
            presences.setdefault(node, []).append(presence)
    names = sorted(presences, key=natural_sort_key)
    if len(names) <= most:
        return [NodeRow(name, [name], presences[name]) for name in names]
    together: dict[tuple[Presence, ...], list[str]] = {}
    for name in names:
        together.setdefault(tuple(presences[name]), []).append(name)
    rows = [NodeRow(compress_hostlist(hosts), hosts, list(of_all)) for of_all, hosts in together.items()]
    if len(rows) <= most:
        return rows
    rest = [host for row in rows[most - 1 :] for host in row.hosts]
    spans: dict[int, Presence] = {}
    for presence in (each for row in rows[most - 1 :] for each in row.presences):
        other = spans.get(presence.attempt, presence)
        begin, end = min(presence.begin, other.begin), max(presence.end, other.end)
        spans[presence.attempt] = Presence(presence.attempt, begin, end)
    return [*rows[: most - 1], NodeRow(f"{len(rest)} more nodes", rest, list(spans.values()))]


def _presence_of_nodes(attempt: Attempt, line: Sequence[Interval]) -> Iterator[tuple[str, Presence]]:
    """Each node of an attempt, and when it took part."""
    begin = next((interval.begin for interval in line if interval.kind != "queue"), None)
    if begin is None:
        return
    end = line[-1].end
    joined: dict[int, float] = {}
    left: dict[int, float] = {}
    for restart in attempt.restarts:
        at = min(max(float(restart["at"]), begin), end)
        joined |= {int(node): at for node in restart.get("joined") or ()}
        # Nodes of its own job are the job's until its end.
        left |= {int(node): at for node in restart.get("lost") or () if int(node) in joined}
    # Several nodes of a local run are one machine.
    machines = Counter(attempt.hosts.values())
    for node, host in sorted(attempt.hosts.items(), key=lambda item: int(item[0])):
        name = host if machines[host] == 1 else f"{host} (node {node})"
        yield name, Presence(attempt.number, joined.get(int(node), begin), left.get(int(node), end))


def goodput_over_time(attempts: Sequence[Attempt], lines: Timelines) -> list[tuple[float, float]]:
    """The goodput so far at the end of each interval on nodes: seconds since 1970, and 0 to 1.

    What is lost counts from the beginning, so that training shows as useful only if it was kept. The last one is
    :func:`.accounting.goodput` of all attempts.

    Args:
        attempts: The attempts of a run.
        lines: When each spent its time on what.
    """
    weighted = [
        (interval, mean_nodes(attempt)) for attempt in attempts for interval in lines.get(attempt.key, ())
    ]  # fmt: skip
    kept = used = 0.0
    points = []
    for interval, nodes in sorted(weighted, key=lambda each: each[0].end):
        if interval.kind == "queue":
            continue
        seconds = nodes * (interval.end - interval.begin)
        used += seconds
        kept += seconds if interval.kind == "train" else 0.0
        points.append((interval.end, kept / used))
    return points


def legible(line: Sequence[Interval], shortest_s: float) -> list[Interval]:
    """A timeline for drawing, which has no more intervals than can be told apart.

    Of neighbours that are too short, the kind that takes the most of their time stands for all.

    Args:
        line: The intervals, in order.
        shortest_s: How long one has to last, in seconds.
    """
    drawn: list[Interval] = []
    short: list[Interval] = []
    for interval in line:
        is_short = interval.end - interval.begin < shortest_s
        if not is_short:
            drawn += _as_one(short)
            drawn.append(interval)
            short = []
            continue
        short.append(interval)
        if interval.end - short[0].begin >= shortest_s:
            drawn += _as_one(short)
            short = []
    drawn += _as_one(short)
    alike = (list(group) for _, group in groupby(drawn, key=attrgetter("kind")))
    return [group[0]._replace(end=group[-1].end) for group in alike]


def _as_one(short: Sequence[Interval]) -> list[Interval]:
    """Neighbours as one interval of the kind that takes the most of their time; none if there are none."""
    if not short:
        return []
    spent: dict[str, float] = {}
    for kind, begin, end in short:
        spent[kind] = spent.get(kind, 0.0) + end - begin
    return [Interval(max(spent, key=spent.__getitem__), short[0].begin, short[-1].end)]
