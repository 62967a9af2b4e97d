"""Finding known patterns in a log, and when and by which rank a line was written. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta, tzinfo

from slurmtrain.model.diagnosis.patterns import PATTERNS, REASON_FIXES, SHM_FIX, SHM_FULL, Pattern, explain_xid

# How many characters on each side of a needle are searched: some logs have lines of megabytes.
_REACH = 2000
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


def scan_log(text: str, limit: int = 20) -> Iterator[tuple[int, Pattern, re.Match[str], str]]:
    """(offset of the line, pattern, match, line) for each line of a log that matches a pattern.

    For each pattern, at most the first ``limit`` and the last ``limit`` lines are searched: a failing loop may write
    the same line for hours. Long lines are cut to the surroundings of the match.
    """
    for pattern in PATTERNS:
        # Almost no line contains a needle, and searching for one runs in C; the expression is tried on the few that do.
        places = _lines_with(text, pattern.needles)
        candidates = places if len(places) <= 2 * limit else [*places[:limit], *places[-limit:]]
        for begin, needle in candidates:
            end = text.find("\n", needle, needle + _REACH)
            line = text[max(begin, needle - _REACH) : end if end >= 0 else needle + _REACH].rstrip("\r")
            match = pattern.regex.search(line)
            if match is not None and not is_advice(line) and not is_code(line):
                yield begin, pattern, match, line


def _lines_with(text: str, needles: Iterable[str]) -> list[tuple[int, int]]:
    """(offset of the line, offset of the needle) of the lines that contain a needle, each line once, in order."""
    needle_by_line: dict[int, int] = {}
    for needle in needles:
        at = text.find(needle)
        while at >= 0:
            # Continue after this line: a line counts once, however often it repeats the needle.
            needle_by_line.setdefault(text.rfind("\n", 0, at) + 1, at)
            end = text.find("\n", at)
            at = text.find(needle, end) if end >= 0 else -1
    return sorted(needle_by_line.items())


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


def is_advice(line: str) -> bool:
    """Whether a line only gives advice, rather than reporting what happened."""
    return _ADVICE.search(_without_prefix(line)) is not None


def is_code(line: str) -> bool:
    """Whether a line quotes source code, rather than reporting what happened."""
    return _CODE.search(_without_prefix(line)) is not None


def _without_prefix(line: str) -> str:
    return _PREFIX.sub("", line)


def make_hit(pattern: Pattern, match: re.Match[str], **attributes: object) -> Hit:
    """The hit for a match of a pattern, its phrases filled in; ``attributes`` set other fields of :class:`Hit`."""
    # A group that did not participate in the match is None.
    groups = [group or "" for group in match.groups()]
    if pattern.name == "slurm-names":
        # The fix names a spec key, which is in lower case.
        groups = [groups[0].lower()]
    role, cause, fix = pattern.role, _fill_in(pattern.cause, groups), _fill_in(pattern.fix, groups)
    if pattern.name == "xid":
        role, cause, fix = explain_xid(int(groups[1]), groups[0])
    elif pattern.name == "slurm-reason":
        fix = REASON_FIXES[groups[0]]
    elif pattern.name == "disk-full":
        cause, fix = _explain_full_disk(match.string, groups[0])
    hit = Hit(name=pattern.name, role=role, cause=cause, fix=fix, text="", origin="", groups=tuple(groups))
    return replace(hit, **attributes)  # type: ignore[arg-type]


def _fill_in(phrase: str, groups: Sequence[str]) -> str:
    for number, group in enumerate(groups, 1):
        phrase = phrase.replace(f"{{{number}}}", group)
    return phrase


def _explain_full_disk(line: str, path: str) -> tuple[str, str]:
    """Cause and fix: which file system is full, if the line says so, and what to do."""
    where = path or next(iter(re.findall(r"/[\w./-]+", line)), "")
    if "/dev/shm" in where or "shm" in line:  # noqa: S108 (text of a log)
        return SHM_FULL, SHM_FIX
    if where.startswith(("/tmp", "/var/tmp", "/scratch")):  # noqa: S108
        return f"the file system of {where} is full", "free some space there, or set TMPDIR to a place that has some"
    name = f" of {where}" if where else ""
    return f"the file system{name} is full", "free some space, or check your quota; checkpoint.quota limits a run"


# --- who wrote a line, and when -----------------------------------------------------------------------------------

_ISO = re.compile(r"(?<!\d)(\d{4})-(\d\d)-(\d\d)[T ](\d\d):(\d\d):(\d\d)(?:[.,](\d{1,9}))?(Z|[+-]\d\d:?\d\d)?(?![\d:])")
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
            return _iso_time(match, zone)
        if match := _GLOG.search(line[:_REACH]):
            return _glog_time(match, near, zone)
    except (ValueError, OverflowError):  # a thirteenth month is not a time
        return None
    return None


def _iso_time(match: re.Match[str], zone: tzinfo) -> float:
    year, month, day, hour, minute, second = (int(part) for part in match.groups()[:6])
    fraction = float(f"0.{match[7] or 0}")
    offset = match[8]
    if offset == "Z":
        zone = UTC
    elif offset:
        zone = datetime.strptime(offset, "%z").tzinfo or zone
    return datetime(year, month, day, hour, minute, second, tzinfo=zone).timestamp() + fraction


def _glog_time(match: re.Match[str], near: float, zone: tzinfo) -> float:
    month, day, hour, minute, second = (int(part) for part in match.groups()[:5])
    about = datetime.fromtimestamp(near, zone)
    # Around New Year, the line may be from the year before or after the year of ``near``.
    years = (about - _ONE_DAY).year, (about + _ONE_DAY).year
    times = [datetime(year, month, day, hour, minute, second, tzinfo=zone).timestamp() for year in years]
    return min(times, key=lambda time: abs(time - near)) + float(f"0.{match[6]}")


_RANK = re.compile(r"\[rank(\d+)\]|\bRank (\d+)\]")


def rank_of(line: str) -> int | None:
    """The rank that torch names as the writer of a line; None if there is none."""
    match = _RANK.search(line[:_REACH])
    return int(match[1] or match[2]) if match else None
