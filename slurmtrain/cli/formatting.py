"""JSON values as short text for people: durations, sizes, steps, metrics, checkpoints. ``-`` stands for none.

Times are local, and relative while they are recent; the JSON has them in ISO 8601 and UTC.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from slurmtrain.cli.drawing import whole_ones
from slurmtrain.model.hostlist import compress_hostlist, natural_sort_key
from slurmtrain.model.query.fields import flattened, write_measured, write_settings, write_value
from slurmtrain.model.query.folding import best_text, errors_text, is_folded, short_keys, swept_texts, swept_values
from slurmtrain.model.run.job_state import error_first

if TYPE_CHECKING:
    from slurmtrain.model.query.comparison import Spread

_METRICS_SHOWN = 3
# Nodes without a range between them, such as tb[1,3,5], could fill a screen.
_LONGEST = 60
_LEAST_AMOUNT, _LEAST_MONEY = 0.001, 0.01
_BAR_CELLS = 8
_EIGHTHS = " ▏▎▍▌▋▊▉█"


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


def figures(value: float | None) -> str:
    """A quantity, to three figures, with whole thousands."""
    return "-" if value is None else f"{value:.3g}" if value < 1000 else f"{value:.0f}"


def percent(value: float | None) -> str:
    """A number of percent."""
    return "-" if value is None else f"{value:.0f} %"


def as_percent(value: float | None) -> str:
    """A part of a whole, in percent."""
    return "-" if value is None else percent(100 * value)


def step_time(seconds: float | None) -> str:
    """How long a step takes, with three digits."""
    if seconds is None:
        return "-"
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"


def size(count: float | None) -> str:
    """A number of bytes, in units of 1024."""
    if count is None:
        return "-"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def amount(value: float, currency: str | None = None) -> str:
    """An amount of money, or of hours if there is no ``currency``, as people write it."""
    if abs(value) >= 1000 or not value:
        return f"{value:,.0f}"
    if currency and abs(value) >= _LEAST_MONEY:
        return f"{value:.2f}"
    if abs(value) < 1:
        return f"{value:.2g}" if abs(value) >= _LEAST_AMOUNT else f"<{_LEAST_AMOUNT}"
    return f"{value:.1f}"


def files(count: int) -> str:
    """How many files there are."""
    return "1 file" if count == 1 else f"{count} files"


def age(moment: str | None) -> str:
    """How long ago an ISO time was; seconds only within the first minute."""
    if moment is None:
        return "-"
    seconds = max(0.0, time.time() - datetime.fromisoformat(moment).astimezone(UTC).timestamp())
    # Whole minutes: a live page draws a row again whenever its age reads differently.
    return duration(seconds) if seconds < 60 else duration(seconds // 60 * 60).removesuffix("00s")


def number(value: Any) -> str:
    """A metric, to four figures."""
    return "-" if value is None else write_measured(value) if isinstance(value, float) else str(value)


def steps(run: Mapping[str, Any]) -> str:
    """``step/total`` of a run, with ``~`` if they are guessed from its output."""
    if run["step"] is None:
        return "-"
    guessed = "~" if run.get("metrics_from") else ""
    return f"{guessed}{run['step']}" + ("" if run["total_steps"] is None else f"/{run['total_steps']}")


def bar(step: int | None, total: int | None) -> str:
    """How much of ``total`` steps is done, drawn to an eighth of a cell; empty if that is unknown."""
    if step is None or not total:
        return ""
    eighths = round(max(0.0, min(1.0, step / total)) * _BAR_CELLS * 8)
    whole, rest = divmod(eighths, 8)
    return ("█" * whole + (_EIGHTHS[rest] if rest else "")).ljust(_BAR_CELLS, "·")


def rate(run: Mapping[str, Any]) -> str:
    """Steps per second of a run."""
    return f"{run['steps_per_second']:.3g}/s" if run["steps_per_second"] else "-"


def metrics(run: Mapping[str, Any], limit: int = _METRICS_SHOWN) -> str:
    """The latest metrics of a run; of a sweep, its best run."""
    if is_folded(run):
        return best_text(run) or "-"
    items = list(run["metrics"].items())
    more = f" +{len(items) - limit}" if len(items) > limit else ""
    return " ".join(f"{name}={number(value)}" for name, value in items[:limit]) + more or "-"


def params(values: Mapping[str, Any], names: Iterable[str] | None = None) -> str:
    """Parameters as ``name=value``; empty if there are none. ``names``: the ones to print; None: all."""
    return write_settings(values, (name for name, _ in flattened(values)) if names is None else names)


def params_of(run: Mapping[str, Any], names: Iterable[str] | None = None) -> str:
    """The parameters of a run with these names, or all; of a sweep, the values that it tries; ``-`` for none."""
    return (", ".join(swept_texts(run)) if is_folded(run) else params(run["params"], names)) or "-"


def params_within(runs: Sequence[Mapping[str, Any]], width: int, names: Sequence[str] | None = None) -> list[str]:
    """The same for several runs, in so many cells: with short names, and how many parameters there is no room for.

    The parameters with the most values come first: they tell runs apart.

    Args:
        runs: RUN of the JSON.
        width: In cells.
        names: The parameters; None: all.
    """
    flat = [dict(flattened(run["params"])) for run in runs]
    swept = swept_values([run["params"] for run in runs])
    chosen = list(dict.fromkeys(name for of_run in flat for name in of_run)) if names is None else names
    chosen = sorted(chosen, key=lambda name: -len(swept.get(name, ())))
    short = short_keys(chosen)
    return [
        whole_ones([f"{short[name]}={write_value(of_run[name])}" for name in chosen if name in of_run], width) or "-"
        for of_run in flat
    ]


def reason(run: Mapping[str, Any]) -> str:
    """Why a run is in its state, the error first, with local times; of a sweep, the commonest error."""
    if is_folded(run):
        return "; ".join(filter(None, (localized(errors_text(run)), localized(run["reason"]))))
    return localized(error_first(run["reason"] or ""))


def sweep_parts(line: Mapping[str, Any]) -> list[str]:
    """What a list says of a sweep besides its id and name, in parts with punctuation; of a run nothing."""
    if not is_folded(line):
        return []
    since = f"{age(line['submitted_at'])} old" if line["submitted_at"] else ""
    groups = [
        [*line["state"].split(", "), since],
        swept_texts(line),
        [best_text(line)],
        [localized(errors_text(line))],
        [localized(line["reason"])],
    ]
    filled = [list(filter(None, group)) for group in groups if any(group)]
    parts = [f"{part}{',' if number < len(group) else ';'}" for group in filled for number, part in enumerate(group, 1)]
    return [*parts[:-1], parts[-1].removesuffix(";")]


def setting(value: Any) -> str:
    """A value of a spec, as it was written."""
    if value is None or value == []:
        return "-"
    return " ".join(map(write_value, value)) if isinstance(value, list | tuple) else write_value(value)


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
    # Between two names, unless a single one is longer than that.
    beginning = text[:_LONGEST].rpartition(",")[0] or text[:_LONGEST]
    return f"{beginning},...{']' * (beginning.count('[') > beginning.count(']'))} ({len(names)} nodes)"


def field(name: str, value: Any) -> str:
    """The ``value`` of any field of the JSON by its ``name``: exactly, unless it is a number that was measured."""
    if name == "nodes" and value:
        return describe_nodes(value)
    if name.startswith("usage."):
        return _usage(name, value)
    # A parameter was chosen, not measured: with fewer digits it would be another value.
    return number(value) if isinstance(value, float) and not name.startswith("params.") else setting(value)


# How the figures of a resource are shown.
_WRITE_USAGE: Mapping[str, Callable[[float], str]] = {"memory": size, "time": duration}


def _usage(name: str, value: Any) -> str:
    """A field below ``usage``, such as ``usage.memory.used``, or a resource as a whole: ``9.8 GiB of 64.0 GiB``."""
    _, resource, *rest = name.split(".")
    if isinstance(value, Mapping):
        used, limit = (_usage(f"{name}.{part}", value.get(part)) for part in ("used", "asked"))
        return used if limit == "-" else f"{used} of {limit}"
    if isinstance(value, str) or rest in (["margin"], ["utilization"]):
        return setting(value)
    write = size if rest == ["memory_bytes"] else _WRITE_USAGE.get(resource, number)
    return "-" if value is None else write(value)


def spread(values: Spread | None) -> str:
    """The mean of ``values`` and their standard deviation: ``0.25 ±0.01``."""
    if values is None:
        return "-"
    mean = number(float(values.mean))
    return mean if values.deviation is None else f"{mean} ±{values.deviation:.2g}"


def newest_checkpoint(run: Mapping[str, Any]) -> str:
    """The step of a run's newest checkpoint, and when it was saved."""
    newest = run["checkpoint"]
    if newest is None:
        return "-"
    at = "" if newest["step"] is None else f"step {step_saved(newest)}, "
    return at + when(newest["saved_at"])


def step_saved(checkpoint: Mapping[str, Any]) -> str:
    """The step of a checkpoint; after ``~`` if it is the one logged last when it was saved, ``?`` if it is unknown."""
    if checkpoint["step"] is None:
        return "?"
    return f"~{checkpoint['step']}" if checkpoint.get("step_from") else str(checkpoint["step"])


def checkpoint_state(checkpoint: Mapping[str, Any]) -> str:
    """Whether a checkpoint's files are present and complete."""
    if checkpoint["pruned_at"] is not None:
        return "pruned"
    if problem := checkpoint.get("problem"):
        return f"incomplete: {problem}"
    if not checkpoint["complete"]:
        return "damaged"
    return "verified" if checkpoint["verified"] else "complete"


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
    # Rounded up, since the floor is taken of a negative number: "in 0 min" would say that it is over.
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
