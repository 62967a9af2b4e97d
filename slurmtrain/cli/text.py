"""Facts as text: plain columns anywhere, a table on a terminal."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

HEADERS = ("ID", "NAME", "STATE", "STEP", "RATE", "ETA", "METRICS", "CHECKPOINT", "REASON")
_STYLES = {
    "running": "cyan", "completed": "green", "failed": "red", "lost": "red", "cancelled": "yellow",
    "pending": "magenta",
}  # fmt: skip
_METRICS_SHOWN = 3


def duration(seconds: float | None) -> str:
    """A length of time, to two units."""
    if seconds is None:
        return "-"
    whole = int(seconds)
    days, hours, minutes = whole // 86400, whole // 3600 % 24, whole // 60 % 60
    if days:
        return f"{days}d{hours:02d}h"
    if hours:
        return f"{hours}h{minutes:02d}m"
    return f"{minutes}m{whole % 60:02d}s" if minutes else f"{whole}s"


def size(count: float) -> str:
    """A number of bytes, in units of 1024."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def age(moment: str | None) -> str:
    """How long ago an ISO time was."""
    if moment is None:
        return "-"
    return duration(max(0.0, time.time() - datetime.fromisoformat(moment).astimezone(UTC).timestamp()))


def number(value: Any) -> str:
    """A metric, to four figures."""
    return "-" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def steps(run: Mapping[str, Any]) -> str:
    """``step/total`` of a run."""
    if run["step"] is None:
        return "-"
    return str(run["step"]) if run["total_steps"] is None else f"{run['step']}/{run['total_steps']}"


def rate(run: Mapping[str, Any]) -> str:
    """Steps a second of a run."""
    return f"{run['steps_per_second']:.3g}/s" if run["steps_per_second"] else "-"


def metrics(run: Mapping[str, Any], limit: int = _METRICS_SHOWN) -> str:
    """The latest metrics of a run."""
    items = list(run["metrics"].items())
    more = f" +{len(items) - limit}" if len(items) > limit else ""
    return " ".join(f"{name}={number(value)}" for name, value in items[:limit]) + more or "-"


def checkpoint(run: Mapping[str, Any]) -> str:
    """Step and age of a run's newest checkpoint."""
    newest = run["checkpoint"]
    if newest is None:
        return "-"
    at = "" if newest["step"] is None else f"step {newest['step']}, "
    return f"{at}{age(newest['saved_at'])} ago"


def files(found: Mapping[str, Any]) -> str:
    """What is known of a checkpoint's files."""
    if found["pruned_at"] is not None:
        return "pruned"
    if not found["complete"]:
        return "damaged"
    return "verified" if found["verified"] else "complete"


def interval(told: Mapping[str, Any] | None) -> str:
    """How often an attempt saves, and why so; empty where nobody has said."""
    if not told or told.get("seconds") is None:
        return ""
    return f"every {told['seconds']:.0f} s" + (f": {told['why']}" if told.get("why") else "")


def row(run: Mapping[str, Any]) -> tuple[str, ...]:
    """A run as a row of the list."""
    return (
        run["id"], run["name"], run["state"], steps(run), rate(run), duration(run["eta_seconds"]), metrics(run),
        checkpoint(run), run["reason"] or "",
    )  # fmt: skip


def fancy() -> bool:
    """Whether to draw for a person: on a terminal that is not dumb."""
    return sys.stdout.isatty() and os.environ.get("TERM") != "dumb"


def print_table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table: drawn by rich on a terminal, in plain columns elsewhere."""
    if fancy():
        from rich.console import Console

        Console().print(table(headers, rows))
        return
    # All columns but the last, whose text may be long, are as wide as their widest cell.
    widths = [max(len(line[column]) for line in [headers, *rows]) for column in range(len(headers) - 1)]
    for line in [headers, *rows]:
        cells = [cell.ljust(width) for cell, width in zip(line, widths, strict=False)]
        print("  ".join([*cells, line[-1]]).rstrip())


def table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> Any:
    """A rich table. NO_COLOR is rich's own business."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    drawn = Table(box=SIMPLE_HEAD, pad_edge=False)
    for header in headers:
        drawn.add_column(header, overflow="fold")
    for line in rows:
        drawn.add_row(*(Text(cell, style=_STYLES.get(cell, "")) for cell in line))
    return drawn
