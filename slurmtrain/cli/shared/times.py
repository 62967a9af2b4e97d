"""Times for people: local, and relative while they are recent. The JSON has them in ISO 8601 and UTC. Pure."""

from __future__ import annotations

import re
import time
from datetime import datetime, timedelta

# Within a week a weekday is unambiguous.
_WEEK_DAYS = 7
# A time of the JSON contract within a sentence, such as a run's reason.
_ISO = re.compile(r"\b\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d+)?Z")


def when(moment: str | None, now: float | None = None) -> str:
    """An ISO time as ``3 min ago`` or ``in 3 min`` within an hour of now; else as :func:`calendar` has it.

    Args:
        moment: The time; None, as of what has not happened: ``-``.
        now: Seconds since 1970; None: the current time.
    """
    if moment is None:
        return "-"
    now = time.time() if now is None else now
    seconds = now - datetime.fromisoformat(moment).timestamp()
    if 0 <= seconds < 60:
        return f"{int(seconds)} s ago"
    if 0 <= seconds < 3600:
        return f"{int(seconds // 60)} min ago"
    if -3600 < seconds < 0:
        return f"in {-int(seconds // 60)} min"
    return calendar(moment, now)


def calendar(moment: str | None, now: float | None = None, *, seconds: bool = False) -> str:
    """An ISO time in the local time zone: ``today 14:03``, ``Mon 14:03`` within a week, ``2026-11-02 14:03``.

    Args:
        moment: The time; None, as of what has not happened: ``-``.
        now: Seconds since 1970; None: the current time.
        seconds: Add the seconds, where the order of what happened matters.
    """
    if moment is None:
        return "-"
    today = datetime.fromtimestamp(time.time() if now is None else now).astimezone().date()
    try:
        local = datetime.fromisoformat(moment).astimezone()
    except (ValueError, OverflowError):
        return moment  # at the end of the calendar another time zone may have no such time
    days, clock = abs(local.date() - today), f"{local:%H:%M:%S}" if seconds else f"{local:%H:%M}"
    if not days:
        return f"today {clock}"
    return f"{local:%a} {clock}" if days < timedelta(days=_WEEK_DAYS) else f"{local:%Y-%m-%d} {clock}"


def localized(text: str, now: float | None = None) -> str:
    """A sentence with the ISO times in it replaced by what :func:`calendar` makes of them at ``now``."""
    return _ISO.sub(lambda match: calendar(match[0], now), text)


def between(begin: str, end: str) -> float:
    """How many seconds lie between two ISO times."""
    return (datetime.fromisoformat(end) - datetime.fromisoformat(begin)).total_seconds()
