"""How far apart the nodes' clocks are, and whose is wrong. Pure.

Every node but node 0 exchanges stamps with node 0, as NTP does (RFC 5905, section 8). Times are in seconds; an offset
is positive if the clock is ahead.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median_low
from typing import Any

from slurmtrain.model.experiment.sections import ClockCheck
from slurmtrain.model.preflight.checks import Finding, apply_level

# t1 sent by the node, t2 received by node 0, t3 answered by node 0, t4 back at the node; seconds since 1970, t1 and t4
# by the node's clock, t2 and t3 by node 0's.
Stamps = tuple[float, float, float, float]

CHECK = "clock"
ADVICE = "check its time service, for example with chronyc tracking; slurmtrain never sets a clock"


@dataclass(frozen=True, slots=True)
class ClockOffset:
    """How far a node's clock is ahead of node 0's.

    The true offset is within ``offset_s`` plus or minus ``bound_s`` seconds; ``samples`` counts the usable exchanges.
    """

    offset_s: float
    bound_s: float
    samples: int


def offset_from_stamps(samples: Sequence[Stamps]) -> ClockOffset:
    """The offset from the sample with the least delay: its error is at most half of that delay (RFC 5905, section 8).

    Samples whose clock ran backwards, or an answer came before it was asked for, are dropped: a clock was set in
    between. Raises ValueError if no sample is left.
    """
    if not samples:
        raise ValueError("no time stamps were exchanged with node 0")
    usable = [
        stamps
        for stamps in samples
        if stamps[0] <= stamps[3] and stamps[1] <= stamps[2] and 0 <= _delay(stamps) < math.inf
    ]
    if not usable:
        raise ValueError(f"a clock was changed during the measurement, so none of its {len(samples)} samples is usable")
    best = min(usable, key=_delay)
    t1, t2, t3, t4 = best
    return ClockOffset(((t1 - t2) + (t4 - t3)) / 2, _delay(best) / 2, len(usable))


def _delay(stamps: Stamps) -> float:
    t1, t2, t3, t4 = stamps
    return (t4 - t1) - (t3 - t2)


def clock_record(offset: ClockOffset | None, discipline: Mapping[str, Any]) -> dict[str, Any]:
    """What is journaled of a node's clock.

    Args:
        offset: How far it is ahead; None if it was not measured.
        discipline: What :func:`slurmtrain.runtime.preflight.facts.measure.read_discipline` returned.
    """
    return {
        "offset_ms": None if offset is None else round(offset.offset_s * 1e3, 6),
        "bound_ms": None if offset is None else round(offset.bound_s * 1e3, 6),
        "samples": 0 if offset is None else offset.samples,
        "disciplined": discipline.get("disciplined"),
        "source": str(discipline.get("source", "none")),
    }


def judge_clocks(
    offsets: Mapping[int, ClockOffset | None],
    disciplines: Mapping[int, Mapping[str, Any]],
    limits: ClockCheck,
    hosts: Mapping[int, str],
) -> dict[int, Finding]:
    """Judge each node's clock, by node.

    Only the certain part of an offset counts: its size minus its bound. Clocks are compared with node 0's, unless that
    is the wrong one: most of the nodes agree against it, or it differs from the only other one and alone reports that
    it is not synchronised. A clock that no time service synchronises is a warning, and so is an offset so uncertain
    that it may be over the limit.

    Args:
        offsets: By node; None for a node that was not measured; node 0 has ``ClockOffset(0, 0, 0)``.
        disciplines: What :func:`slurmtrain.runtime.preflight.facts.measure.read_discipline` returned on each node.
        limits: The spec's limits.
        hosts: The names of the nodes.
    """
    measured = {node: offset for node, offset in offsets.items() if offset is not None}
    if measured:
        # Node 0 does not measure itself: all offsets are against its clock.
        measured.setdefault(0, ClockOffset(0.0, 0.0, 0))
    nodes = sorted({*offsets, *disciplines})
    names = {node: hosts.get(node, f"node {node}") for node in {*nodes, 0}}
    comparison = _Comparison(measured, *_choose_reference(measured, disciplines, limits), names, limits)
    return {node: apply_level(comparison.judge(node, disciplines.get(node, {})), limits.level) for node in nodes}


@dataclass(frozen=True, slots=True)
class _Span:
    """How many seconds a clock is ahead of another: certainly no less than ``low`` and no more than ``high``."""

    low: float
    high: float

    @classmethod
    def from_offset(cls, offset: ClockOffset) -> _Span:
        return cls(offset.offset_s - offset.bound_s, offset.offset_s + offset.bound_s)

    def minus(self, other: _Span) -> _Span:
        """How far this clock is ahead of another one, given the offsets of both from a third."""
        return _Span(self.low - other.high, self.high - other.low)

    @property
    def middle(self) -> float:
        return (self.low + self.high) / 2

    @property
    def bound(self) -> float:
        return (self.high - self.low) / 2

    @property
    def certain(self) -> float:
        """Its least distance from zero, in either direction."""
        return max(self.low, -self.high, 0.0)


_NODE_0 = _Span(0.0, 0.0), frozenset({0})


def _choose_reference(
    measured: Mapping[int, ClockOffset], disciplines: Mapping[int, Mapping[str, Any]], limits: ClockCheck
) -> tuple[_Span, frozenset[int]]:
    """The time to compare clocks with: how far it is ahead of node 0's clock, and the nodes that agree on it.

    It is node 0's clock, unless that is the wrong one.
    """
    spans = {node: _Span.from_offset(offset) for node, offset in measured.items()}
    # Of two clocks neither has a majority: only a service that is known not to work decides.
    if len(spans) == 2:
        [other] = [node for node in spans if node != 0]
        unsynchronised = [node for node in spans if disciplines.get(node, {}).get("disciplined") is False]
        is_wrong = spans[other].certain > limits.warn_ms / 1e3 and unsynchronised == [0]
        return (spans[other], frozenset({other})) if is_wrong else _NODE_0
    if len(spans) < 2:
        return _NODE_0
    # The median's span runs from the median of the lower ends to the median of the upper ends.
    median = _Span(median_low(span.low for span in spans.values()), median_low(span.high for span in spans.values()))
    # Prefer a majority that agrees closely to one that agrees roughly.
    for limit_ms in (limits.warn_ms, limits.fail_ms):
        agreeing = frozenset(node for node, span in spans.items() if span.minus(median).certain <= limit_ms / 1e3)
        if 2 * len(agreeing) > len(spans) and 0 not in agreeing:
            return median, agreeing
    return _NODE_0


@dataclass(frozen=True, slots=True)
class _Comparison:
    """The clocks that were measured, compared with the ``reference`` of the ``agreeing`` nodes."""

    measured: Mapping[int, ClockOffset]
    reference: _Span
    agreeing: frozenset[int]
    names: Mapping[int, str]
    limits: ClockCheck

    def judge(self, node: int, discipline: Mapping[str, Any]) -> Finding:
        """The finding of one node's clock."""
        span, disciplined = None, discipline.get("disciplined")
        if node in self.measured:
            # Compared with itself it would be uncertain by its own bound, twice.
            is_reference = self.agreeing == {node}
            span = _Span(0.0, 0.0) if is_reference else _Span.from_offset(self.measured[node]).minus(self.reference)
        offset = None if span is None else ClockOffset(span.middle, span.bound, self.measured[node].samples)
        description, compared = (
            str(discipline.get("description", "no time service answers")),
            self._describe(node, span),
        )
        status = "pass" if span is None else self._status(span)
        if status == "pass" and disciplined is not True:
            status = "warn"
        # Journals contain the key "said".
        evidence = {**clock_record(offset, discipline), "said": description}
        if status != "pass":
            evidence["advice"] = ADVICE
        # Mention what keeps a clock if nothing does, or if nothing else is known.
        mention = disciplined is not True or span is None or not compared
        return Finding(CHECK, status, "; ".join(filter(None, [compared, description if mention else ""])), evidence)

    def _status(self, span: _Span) -> str:
        """Pass, warn or fail, by the certain part of the offset."""
        if span.certain > self.limits.fail_ms / 1e3:
            return "fail"
        uncertain = span.bound > self.limits.fail_ms / 1e3
        return "warn" if uncertain or span.certain > self.limits.warn_ms / 1e3 else "pass"

    def _describe(self, node: int, span: _Span | None) -> str:
        """How far a clock is from the others, as a phrase; empty for the clock of the only node."""
        others = len(self.measured) - 1
        if span is None:
            return f"not compared with {self.names[0]}" if len(self.names) > 1 else ""
        if others == 0:
            return ""
        if self.agreeing == {node}:
            other = next(measured for measured in self.measured if measured != node)
            return f"{f'{self.names[other]} is' if others == 1 else f'the other {others} nodes are'} compared with it"
        distance = f"within {_length(max(abs(span.low), abs(span.high)))} of"
        remarks = []
        if span.certain > 0:
            distance = f"{_length(abs(span.middle))} {'ahead of' if span.middle > 0 else 'behind'}"
            remarks.append(f"± {_length(span.bound)}")
        warn, fail = self.limits.warn_ms / 1e3, self.limits.fail_ms / 1e3
        match self._status(span):
            case "fail":
                remarks.append(f"limit {_length(fail)}")
            case "warn" if span.certain > warn:
                remarks.append(f"warning from {_length(warn)}")
            case "warn":
                remarks.append(f"too uncertain for a limit of {_length(fail)}")
        rest = self.agreeing - {node}
        name = f"{'the' if len(rest) == others else f'{len(rest)} of the'} other {others} nodes"
        if len(self.agreeing) == 1:
            name = self.names[next(iter(rest))]
        return f"{distance} {name}" + (f" ({', '.join(remarks)})" if remarks else "")


def _length(seconds: float) -> str:
    """A length of time in ms, s, h or days, whichever reads best."""
    # From here on, three digits of milliseconds would be written as 1e+03.
    if seconds < 0.9995:
        return f"{round(seconds * 1e3, 3):.3g} ms"
    if seconds < 7200:
        return f"{seconds:.3f}".rstrip("0").rstrip(".") + " s"
    return f"{seconds / 3600:.1f} h" if seconds < 2 * 86400 else f"{seconds / 86400:.0f} days"
