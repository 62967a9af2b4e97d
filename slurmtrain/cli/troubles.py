"""Where an attempt's time went, and what held it up, in words: pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from slurmtrain.cli.shared import formatting
from slurmtrain.model.run.accounting import KINDS

_SHOWN = 5


def time_words(seconds: Mapping[str, float], goodput: float | None = None) -> str:
    """Seconds by kind, without kinds of less than half a second, and the share of them that was of use."""
    told = [f"{kind} {formatting.duration(round(s))}" for kind in KINDS if (s := seconds.get(kind, 0.0)) >= 0.5]
    return ", ".join([*told, *([] if goodput is None else [f"goodput {100 * goodput:.0f} %"])])


def restart_words(restart: Mapping[str, Any]) -> str:
    """Why ranks were started again inside the allocation, after which step, and without which nodes."""
    step = restart.get("reached")
    after = f" after step {step}" if step is not None else ""
    why = f": {restart['why']}" if restart.get("why") else ""
    lost = restart.get("lost") or ()
    without = f"; without node {', '.join(map(str, lost))}" if lost else ""
    return f"{restart.get('cause') or 'restart'}{after}{why}{without}"


def hang_words(hang: Mapping[str, Any]) -> str:
    """Which ranks hung, as far as could be told, and for how long no rank had done anything."""
    idle = min((rank["idle_s"] for rank in hang["ranks"] if rank["idle_s"] > 0), default=None)
    return str(hang["why"]) + (f" (no progress for {formatting.duration(idle)})" if idle is not None else "")


def straggler_words(straggler: Mapping[str, Any]) -> str:
    """How much slower a rank was than the others, of what it does without waiting for them."""
    host = f" on {straggler['host']}" if straggler.get("host") else ""
    after = f" at step {straggler['step']}" if straggler.get("step") is not None else ""
    own, median = (f"{1000 * (straggler.get(name) or 0):.3g} ms" for name in ("own_s", "median_s"))
    times = f"{straggler.get('ratio') or 0:.3g} times as slow as others"
    return f"rank {straggler.get('rank')}{host} was {times}{after}: {own} of its own a step, where they took {median}"


def evidence_words(evidence: Mapping[str, Any]) -> str:
    """What was found beside the reason, without what is nothing."""
    return ", ".join(f"{name} {_value(value)}" for name, value in evidence.items() if value)


def newest(told: Sequence[str]) -> list[str]:
    """The last few of these lines, equal ones once, and how many others there were before them."""
    counted = Counter(told)
    lines = [line if count == 1 else f"{line} ({count} times)" for line, count in counted.items()]
    more = len(lines) - _SHOWN
    return [*([f"{more} earlier ones; --json shows them"] if more > 0 else []), *lines[-_SHOWN:]]


def _first(told: Sequence[str]) -> str:
    return ", ".join(told[:_SHOWN]) + (f" and {len(told) - _SHOWN} more" if len(told) > _SHOWN else "")


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        return "(" + evidence_words(value) + ")"
    if isinstance(value, list | tuple):
        return _first([_value(one) for one in value])
    return formatting.number(value)
