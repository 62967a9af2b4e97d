"""Finding known patterns in a run's logs, which hit is the root cause, and which ranks the others waited for. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta, tzinfo

from slurmtrain.model.diagnosis import patterns
from slurmtrain.model.diagnosis.last_words import EXCEPTION, EXIT, KILLED
from slurmtrain.model.hostlist import name_some

# How many characters on each side of a needle are searched: some logs have lines of megabytes.
_REACH = 2000
# How many of the first lines of a pattern are searched, and how many of the last.
_LIMIT = 20
_ONE_DAY = timedelta(days=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hit:
    """A line that matches a pattern, or a fact from a journal that says the same.

    ``name`` to ``fix``: fields of the pattern, filled in. ``text``: the line. ``origin``: which log or journal.
    ``rank`` and ``host``: who wrote it, if known. ``at``: when, in seconds since 1970; None: unknown. ``exact``:
    whether the line itself has that time; otherwise it is the end of its process. ``line``: its place in the log, used
    only to order hits. ``groups``: text of each group of the regular expression.
    """

    name: str
    role: str
    cause: str
    fix: str
    text: str
    origin: str
    rank: int | None = None
    host: str = ""
    at: float | None = None
    exact: bool = False
    line: int = 0
    groups: Sequence[str] = ()


# --- matching -----------------------------------------------------------------------------------------------------


def scan_log(text: str) -> Iterator[tuple[int, patterns.Pattern, re.Match[str], str]]:
    """(offset of the line, pattern, match, line) for each line of a log that matches a pattern.

    For each pattern, only the first and the last lines are searched: a failing loop may write the same line for
    hours. Long lines are cut to the surroundings of the match.
    """
    for pattern in patterns.PATTERNS:
        # Almost no line contains a needle, and searching for one runs in C; the expression is tried on the few that do.
        needle_by_line: dict[int, int] = {}
        for needle in pattern.needles:
            at = text.find(needle)
            while at >= 0:
                # Continue after this line: a line counts once, however often it repeats the needle.
                needle_by_line.setdefault(text.rfind("\n", 0, at) + 1, at)
                end = text.find("\n", at)
                at = text.find(needle, end) if end >= 0 else -1
        places = sorted(needle_by_line.items())
        candidates = places if len(places) <= 2 * _LIMIT else [*places[:_LIMIT], *places[-_LIMIT:]]
        for begin, at in candidates:
            end = text.find("\n", at, at + _REACH)
            line = text[max(begin, at - _REACH) : end if end >= 0 else at + _REACH].rstrip("\r")
            match = pattern.regex.search(line)
            if match is not None and reports(line):
                yield begin, pattern, match, line


# A line that gives advice: it names errors that have not happened.
_ADVICE = re.compile(
    r"^\W*(?:\S+ ){0,2}?(?:hint|note|tip|advice)\s*:|^\W*(?:if you|consider|please|to (?:avoid|fix|debug)|try |you may|"
    r"for (?:more|debugging))\b|(?:can|may|might) help\b",
    re.IGNORECASE,
)
# A line of source code, as tracebacks quote it: it names errors that it raises, catches or looks for.
_CODE = re.compile(r"^\s*(?:(?:raise|except|elif|if|assert|return)\b|print\(|#)")
# What loggers and launchers put before a message: brackets, a date and time, a level.
_PREFIX = re.compile(r"^(?:\[[^\]]*\]:?\s*|\d{4}-\d\d-\d\d[T ]\S+\s*|[A-Z]+:?\s+(?=[A-Z]))+")


def reports(line: str) -> bool:
    """Whether a line reports what happened, rather than giving advice or quoting source code."""
    message = _PREFIX.sub("", line)
    return not _ADVICE.search(message) and not _CODE.search(message)


def make_hit(pattern: patterns.Pattern, match: re.Match[str], **attributes: object) -> Hit:
    """The hit for a match of a pattern, its phrases filled in; ``attributes`` set other fields of :class:`Hit`."""
    # A group that did not participate in the match is None.
    groups = [group or "" for group in match.groups()]
    if pattern.name == "slurm-names":
        # The fix names a spec key, which is in lower case.
        groups = [groups[0].lower()]
    cause = _fill_in(pattern.cause.replace("{0}", match[0]), groups)
    role, fix = pattern.role, _fill_in(pattern.fix, groups)
    if pattern.name == "xid":
        role, cause, fix = patterns.explain_xid(int(groups[1]), groups[0])
    elif pattern.name == "slurm-reason":
        fix = patterns.REASON_FIXES[groups[0]]
    elif pattern.name == "disk-full":
        # The line may say which file system is full.
        where = groups[0] or next(iter(re.findall(r"/[\w./-]+", match.string)), "")
        if "shm" in where or "shm" in match.string:
            cause, fix = patterns.SHM_FULL, patterns.SHM_FIX
        elif where.startswith(("/tmp", "/var/tmp", "/scratch")):  # noqa: S108 (text of a log)
            cause = f"the file system of {where} is full"
            fix = "free some space there, or set TMPDIR to a place that has some"
        else:
            cause = f"the file system{f' of {where}' if where else ''} is full"
            fix = "free some space, or check your quota; checkpoint.quota limits a run"
    hit = Hit(name=pattern.name, role=role, cause=cause, fix=fix, text="", origin="", groups=tuple(groups))
    return replace(hit, **attributes)  # type: ignore[arg-type]


def _fill_in(phrase: str, groups: Sequence[str]) -> str:
    for number, group in enumerate(groups, 1):
        phrase = phrase.replace(f"{{{number}}}", group)
    return phrase


# --- who wrote a line, and when -----------------------------------------------------------------------------------

_ISO = re.compile(r"(?<!\d)\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d{1,9})?(?:Z|[+-]\d\d:?\d\d)?(?![\d:])")
# glog, which torch uses: severity, month (one or two digits) and day, time; no year.
_GLOG = re.compile(r"(?:^|[\[\s:])[IWEF](\d{1,2})(\d\d) (\d\d):(\d\d):(\d\d)\.(\d{1,9})")


def time_of(line: str, near: float, zone: tzinfo = UTC) -> float | None:
    """When a line was written according to the line itself, in seconds since 1970; None if it does not say.

    Args:
        line: The line, or its beginning.
        near: About when it was written, in seconds since 1970: determines the year if the line has none.
        zone: The time zone if the line names none.
    """
    try:
        if match := _ISO.search(line[:_REACH]):
            written = datetime.fromisoformat(match[0].replace(",", "."))
            return (written if written.tzinfo else written.replace(tzinfo=zone)).timestamp()
        if match := _GLOG.search(line[:_REACH]):
            about = datetime.fromtimestamp(near, zone)
            # Around New Year, the line may be from the year before or after the year of ``near``.
            years = (about - _ONE_DAY).year, (about + _ONE_DAY).year
            month, day, hour, minute, second = map(int, match.groups()[:5])
            times = [datetime(year, month, day, hour, minute, second, tzinfo=zone).timestamp() for year in years]
            return min(times, key=lambda time: abs(time - near)) + float(f"0.{match[6]}")
    except (ValueError, OverflowError):  # a thirteenth month is not a time
        return None
    return None


_RANK = re.compile(r"\[rank(\d+)\]|\bRank (\d+)\]")


def rank_of(line: str) -> int | None:
    """The rank that torch names as the writer of a line; None if there is none."""
    match = _RANK.search(line[:_REACH])
    return int(match[1] or match[2]) if match else None


# --- the root cause -------------------------------------------------------------------------------------------------


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
    # Hits by pattern, and by cause if a pattern has several, each group at the place of its first hit.
    groups: dict[tuple[str, str], list[Hit]] = {}
    for hit in sorted(hits, key=_order):
        groups.setdefault((hit.name, hit.cause if hit.name in patterns.SEVERAL_CAUSES else ""), []).append(hit)
    matches = [
        PatternMatch(members[0], len(members), sorted({hit.rank for hit in members if hit.rank is not None}))
        for members in groups.values()
    ]
    roots = [match for match in matches if match.first.role == patterns.ROOT]
    last_words = [
        match
        for match in matches
        if match.first.role == patterns.CONFIRMATION
        and not {patterns.TASK_FAILURE, patterns.JOB_REQUEUE} & set(match.first.groups)
    ]
    candidates = _without_consequences(roots) or last_words
    root = candidates[0] if candidates else None
    # Lines of one log are already in order; comparing lines of several logs requires times.
    origins = {match.first.origin for match in candidates}
    ordered = len(origins) < 2 or all(match.first.at is not None for match in candidates)
    others = [match for match in matches if match is not root]
    return Diagnosis(root=root, others=others, laggard=find_laggard(hits, ranks), ordered=ordered)


def _order(hit: Hit) -> tuple[object, ...]:
    # What a process ended with says less than what else happened at the same time.
    return (hit.at is None, hit.at or 0.0, hit.name in (EXCEPTION, EXIT, KILLED), hit.origin, hit.line)


def _without_consequences(roots: Sequence[PatternMatch]) -> Sequence[PatternMatch]:
    """The roots, without doubtful ones that another may have caused: a rank that dies breaks connections of others.

    A doubtful root stays if there is no certain one, or if it came before all certain ones, as far as their lines have
    times.
    """
    certain = [match for match in roots if match.first.name not in patterns.DOUBTFUL]
    if not certain:
        return roots
    dated = [match.first.at for match in certain if match.first.exact and match.first.at is not None]
    first_s = min(dated) if len(dated) == len(certain) else -math.inf
    earlier = [
        match
        for match in roots
        if match.first.name in patterns.DOUBTFUL
        and match.first.exact
        and match.first.at is not None
        and match.first.at < first_s
    ]
    return [*earlier, *certain]


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
            return Laggard(behind, f"{_list_ranks(behind)} had completed collective {least}, others {most}")
    # A rank that hangs outside NCCL has no watchdog to report it.
    waiting = {rank for completed in by_group.values() for rank in completed}
    silent = sorted(set(ranks) - waiting)
    if waiting and silent and len(silent) < len(waiting):
        return Laggard(silent, f"{_list_ranks(silent)} wrote nothing while {len(waiting)} others waited")
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


def _list_ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {name_some(ranks, 8)}"
