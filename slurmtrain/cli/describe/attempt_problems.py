"""Sentences on where an attempt's time went, and what held it up. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from slurmtrain.cli.shared import formatting, times
from slurmtrain.model.query.quantities import iso
from slurmtrain.model.run.accounting import KINDS

# How many restarts, hangs or stragglers are listed; --json has all of them.
_SHOWN = 5


def describe_time(seconds: Mapping[str, float], goodput: float | None = None) -> str:
    """``seconds`` by kind, omitting kinds under half a second, and ``goodput``, the useful share."""
    times = [f"{kind} {formatting.duration(round(s))}" for kind in KINDS if (s := seconds.get(kind, 0.0)) >= 0.5]
    return ", ".join([*times, *([] if goodput is None else [f"goodput {100 * goodput:.0f} %"])])


def describe_restart(restart: Mapping[str, Any]) -> str:
    """Why ranks were restarted in place, after which step, and without which nodes."""
    step = restart.get("reached")
    after = f" after step {step}" if step is not None else ""
    why = f": {restart['why']}" if restart.get("why") else ""
    lost = restart.get("lost") or ()
    without = f"; without node {', '.join(map(str, lost))}" if lost else ""
    return f"{restart.get('cause') or 'restart'}{after}{why}{without}"


def describe_hang(hang: Mapping[str, Any]) -> str:
    """Which ranks hung, if known, and for how long no rank had made progress."""
    idle = min((rank["idle_s"] for rank in hang["ranks"] if rank["idle_s"] > 0), default=None)
    return str(hang["why"]) + (f" (no progress for {formatting.duration(idle)})" if idle is not None else "")


def describe_raised_limit(change: Mapping[str, Any]) -> str:
    """Why the limit for a step was raised, and to what."""
    raised = change.get("raised_s")
    to = f"raised to {formatting.duration(raised)}" if raised is not None else "raised"
    return f"{to}: {change['why']}" if change.get("why") else to


def describe_passed_over(passed_over: Mapping[str, Any]) -> str:
    """Which checkpoint its ranks did not resume from, and why."""
    step = passed_over.get("step")
    of_step = f" of step {step}" if step is not None else ""
    return f"the checkpoint{of_step} ({passed_over.get('path')}), since {passed_over.get('why') or 'it is suspected'}"


def describe_straggler(straggler: Mapping[str, Any]) -> str:
    """How much slower a rank was than the others, excluding the time that it waited for them."""
    host = f" on {straggler['host']}" if straggler.get("host") else ""
    after = f" at step {straggler['step']}" if straggler.get("step") is not None else ""
    own, median = (f"{1000 * (straggler.get(name) or 0):.3g} ms" for name in ("own_s", "median_s"))
    times = f"{straggler.get('ratio') or 0:.3g} times as slow as others"
    return f"rank {straggler.get('rank')}{host} was {times}{after}: {own} of its own per step, the median is {median}"


def describe_evidence(evidence: Mapping[str, Any]) -> str:
    """What the agent observed on its node besides the reason, without empty values."""
    return ", ".join(_observation(name, value) for name, value in evidence.items() if value)


def newest_lines(texts: Iterable[str]) -> list[str]:
    """The last few of these lines without duplicates, and how many came before them."""
    counted = Counter(texts)
    lines = [line if count == 1 else f"{line} ({count} times)" for line, count in counted.items()]
    more = len(lines) - _SHOWN
    return [*([f"{more} earlier ones; --json shows them"] if more > 0 else []), *lines[-_SHOWN:]]


def _first(items: Sequence[str]) -> str:
    return ", ".join(items[:_SHOWN]) + (f" and {len(items) - _SHOWN} more" if len(items) > _SHOWN else "")


def _observation(name: str, value: Any) -> str:
    """A value with its name; times are in seconds since 1970 if the name ends in ``_time``, lengths if in ``_s``."""
    if isinstance(value, float) and name.endswith("_time"):
        return f"{name} {times.calendar(iso(value))}"
    if isinstance(value, float) and name.endswith("_s"):
        return f"{name.removesuffix('_s')} {formatting.duration(value)}"
    return f"{name} {_value(value)}"


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        return "(" + describe_evidence(value) + ")"
    if isinstance(value, list | tuple):
        return _first([_value(item) for item in value])
    return formatting.number(value)
