"""Which of the hits in a run's logs is the root cause, and which ranks the others waited for. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from slurmtrain.model.diagnosis.log_scan import Hit
from slurmtrain.model.diagnosis.patterns import CONFIRMATION, DOUBTFUL, JOB_REQUEUE, ROOT, SEVERAL_CAUSES, TASK_FAILURE


@dataclass(frozen=True, slots=True)
class PatternMatch:
    """All hits of one pattern: the first one, their number, and the ranks."""

    first: Hit
    count: int
    ranks: Sequence[int]


@dataclass(frozen=True, slots=True)
class Laggard:
    """The ranks that others waited for in a collective, and why they are suspected."""

    ranks: Sequence[int]
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """What a run's logs show.

    ``root``: None if no hit is a root. ``others``: all other hits, in order. ``laggard``: the ranks that others waited
    for. ``ordered``: whether that order is by time; if not, hits are ordered by file and line.
    """

    root: PatternMatch | None
    others: Sequence[PatternMatch] = ()
    laggard: Laggard | None = None
    ordered: bool = True


def diagnose_hits(hits: Sequence[Hit], ranks: Iterable[int] = ()) -> Diagnosis:
    """The root cause among these hits, and all others in order. ``ranks``: all ranks of the attempt.

    The earliest root wins; a hit without a time comes after those that have one. If there is no root, Slurm's final
    state takes its place, provided that it has a reason.
    """
    matches = _grouped(sorted(hits, key=_order))
    roots = [match for match in matches if match.first.role == ROOT]
    last_words = [
        match
        for match in matches
        if match.first.role == CONFIRMATION and not {TASK_FAILURE, JOB_REQUEUE} & set(match.first.groups)
    ]
    candidates = _without_consequences(roots) or last_words
    root = candidates[0] if candidates else None
    # Lines of one log are already in order; comparing lines of several logs requires times.
    origins = {match.first.origin for match in candidates}
    ordered = len(origins) < 2 or all(match.first.at is not None for match in candidates)
    others = [match for match in matches if match is not root]
    return Diagnosis(root=root, others=others, laggard=find_laggard(hits, ranks), ordered=ordered)


def _without_consequences(roots: Sequence[PatternMatch]) -> Sequence[PatternMatch]:
    """The roots, without doubtful ones that another may have caused: a rank that dies breaks connections of others.

    A doubtful root stays if there is no certain one, or if it came before all certain ones, as far as their lines have
    times.
    """
    certain = [match for match in roots if match.first.name not in DOUBTFUL]
    if not certain:
        return roots
    doubtful = [match for match in roots if match.first.name in DOUBTFUL]
    earlier = [match for match in doubtful if all(_is_before(match.first, other.first) for other in certain)]
    return [*earlier, *certain]


def _is_before(hit: Hit, other: Hit) -> bool:
    return hit.exact and other.exact and hit.at is not None and other.at is not None and hit.at < other.at


def _order(hit: Hit) -> tuple[bool, float, str, int]:
    return (hit.at is None, hit.at or 0.0, hit.origin, hit.line)


def _grouped(hits: Sequence[Hit]) -> list[PatternMatch]:
    """Hits by pattern, and by cause if a pattern has several, each group at the place of its first hit."""
    groups: dict[tuple[str, str], list[Hit]] = {}
    for hit in hits:
        groups.setdefault((hit.name, hit.cause if hit.name in SEVERAL_CAUSES else ""), []).append(hit)
    return [
        PatternMatch(members[0], len(members), sorted({hit.rank for hit in members if hit.rank is not None}))
        for members in groups.values()
    ]


# --- who is behind ------------------------------------------------------------------------------------------------

_GROUP = re.compile(r"PG GUID (\S+)|\[PG (\S+)")


def find_laggard(hits: Sequence[Hit], ranks: Iterable[int]) -> Laggard | None:
    """The ranks that others waited for, from the messages of NCCL's watchdogs; None if these do not show it.

    These are the ranks behind the others in their process group; else those in ``ranks`` without a message while others
    wait, unless they are the majority.
    """
    # The last completed collective if the watchdog prints it, else the one that timed out.
    by_group = _numbers_by_group(hits, "nccl-progress", 1) or _numbers_by_group(hits, "nccl-watchdog", 0)
    for completed in by_group.values():
        least, most = min(completed.values()), max(completed.values())
        # All ranks with the lowest number, not just one: a whole node may be behind.
        if least < most:
            behind = sorted(rank for rank, number in completed.items() if number == least)
            return Laggard(behind, f"{_names(behind)} had completed collective {least}, others {most}")
    # A rank that hangs outside NCCL has no watchdog to report it.
    waiting = {rank for completed in by_group.values() for rank in completed}
    silent = sorted(set(ranks) - waiting)
    if waiting and silent and len(silent) < len(waiting):
        return Laggard(silent, f"{_names(silent)} wrote nothing while {len(waiting)} others waited")
    return None


def _numbers_by_group(hits: Sequence[Hit], name: str, group: int) -> dict[str, dict[int, int]]:
    """The highest collective that each rank reports, by process group; ``group``: the pattern's group for it."""
    numbers: dict[str, dict[int, int]] = {}
    for hit in hits:
        if hit.name == name and hit.rank is not None:
            # Sequence numbers count per process group, so numbers of two groups cannot be compared.
            match = _GROUP.search(hit.text)
            of_group = numbers.setdefault((match[1] or match[2]) if match else "", {})
            of_group[hit.rank] = max(of_group.get(hit.rank, -1), int(hit.groups[group]))
    return numbers


def _names(ranks: Sequence[int]) -> str:
    shown = ", ".join(str(rank) for rank in ranks[:8])
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}" + (" and more" if len(ranks) > 8 else "")
