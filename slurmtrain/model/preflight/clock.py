"""How far apart the nodes' clocks are, and whose is wrong. Pure.

Every node but node 0 exchanges stamps with node 0, as NTP does (RFC 5905, section 8). Times are in seconds; an offset
is positive if the clock is ahead.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median_low
from typing import Any

from slurmtrain.model.experiment.sections import ClockCheck
from slurmtrain.model.preflight.finding import Finding, apply_level

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
        raise ValueError("no stamps were exchanged with node 0")
    usable = [stamps for stamps in samples if _is_possible(stamps)]
    if not usable:
        raise ValueError(f"a clock was set during the measurement: none of its {len(samples)} samples is possible")
    best = min(usable, key=_delay)
    t1, t2, t3, t4 = best
    return ClockOffset(((t1 - t2) + (t4 - t3)) / 2, _delay(best) / 2, len(usable))


def _delay(stamps: Stamps) -> float:
    t1, t2, t3, t4 = stamps
    return (t4 - t1) - (t3 - t2)


def _is_possible(stamps: Stamps) -> bool:
    t1, t2, t3, t4 = stamps
    return t1 <= t4 and t2 <= t3 and _delay(stamps) >= 0 and math.isfinite(_delay(stamps))


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
        disciplines: What :func:`slurmtrain.runtime.preflight.facts.clock_facts.read_discipline` returned on each node.
        limits: The spec's limits.
        hosts: The names of the nodes.
    """
    measured = {node: offset for node, offset in offsets.items() if offset is not None}
    if measured:
        # Node 0 does not measure itself: all offsets are against its clock.
        measured.setdefault(0, ClockOffset(0.0, 0.0, 0))
    nodes = sorted({*offsets, *disciplines})
    names = {node: hosts.get(node, f"node {node}") for node in {*nodes, 0}}
    comparison = _Comparison(measured, _choose_reference(measured, disciplines, limits), names, limits)
    return {node: apply_level(_finding(node, comparison, disciplines.get(node, {})), limits.level) for node in nodes}


def _finding(node: int, comparison: _Comparison, discipline: Mapping[str, Any]) -> Finding:
    span, description, disciplined = (
        comparison.span(node),
        _describe_discipline(discipline),
        discipline.get("disciplined"),
    )
    compared = comparison.describe(node)
    status = "pass" if span is None else comparison.status(span)
    if status == "pass" and disciplined is not True:
        status = "warn"
    evidence = {
        "offset_ms": None if span is None else round(span.middle * 1e3, 6),
        "bound_ms": None if span is None else round(span.bound * 1e3, 6),
        "samples": 0 if span is None else comparison.measured[node].samples,
        "disciplined": disciplined,
        "source": str(discipline.get("source", "none")),
        # Journals contain this key.
        "said": description,
    }
    if status != "pass":
        evidence["advice"] = ADVICE
    # Mention what keeps a clock if nothing does, or if nothing else is known.
    mention = disciplined is not True or span is None or not compared
    return Finding(CHECK, status, "; ".join([*compared, description] if mention else compared), evidence)


# --- what is compared -------------------------------------------------------------------------------------------


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


@dataclass(frozen=True, slots=True)
class _Reference:
    """The time that clocks are compared with: how far it is ahead of node 0's clock, and the nodes that agree on it."""

    span: _Span
    nodes: frozenset[int]


_NODE_0 = _Reference(_Span(0.0, 0.0), frozenset({0}))


def _choose_reference(
    measured: Mapping[int, ClockOffset], disciplines: Mapping[int, Mapping[str, Any]], limits: ClockCheck
) -> _Reference:
    """Node 0's clock, unless that is the wrong one."""
    if len(measured) < 2:
        return _NODE_0
    if len(measured) == 2:
        [other] = [node for node in measured if node != 0]
        unsynchronised = [node for node in measured if disciplines.get(node, {}).get("disciplined") is False]
        span = _Span.from_offset(measured[other])
        if span.certain > limits.warn_ms / 1e3 and unsynchronised == [0]:
            return _Reference(span, frozenset({other}))
        return _NODE_0
    # Prefer a majority that agrees closely to one that agrees roughly.
    majorities = (_majority(measured, limit / 1e3) for limit in (limits.warn_ms, limits.fail_ms))
    return next((majority for majority in majorities if majority is not None and 0 not in majority.nodes), _NODE_0)


def _majority(measured: Mapping[int, ClockOffset], limit_s: float) -> _Reference | None:
    """The nodes that agree with the median within a limit in seconds, if they are more than half of all.

    The median's span runs from the median of the lower ends to the median of the upper ends.
    """
    spans = {node: _Span.from_offset(offset) for node, offset in measured.items()}
    median = _Span(median_low(span.low for span in spans.values()), median_low(span.high for span in spans.values()))
    agreeing = frozenset(node for node, span in spans.items() if span.minus(median).certain <= limit_s)
    return _Reference(median, agreeing) if 2 * len(agreeing) > len(spans) else None


# --- descriptions -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Comparison:
    """The clocks that were measured, compared with the reference."""

    measured: Mapping[int, ClockOffset]
    reference: _Reference
    names: Mapping[int, str]
    limits: ClockCheck

    def span(self, node: int) -> _Span | None:
        """How far a node's clock is ahead of the reference; None if it was not measured."""
        if node not in self.measured:
            return None
        if self.reference.nodes == {node}:
            return _Span(0.0, 0.0)
        return _Span.from_offset(self.measured[node]).minus(self.reference.span)

    def status(self, span: _Span) -> str:
        """Pass, warn or fail, by the certain part of the offset."""
        if span.certain > self.limits.fail_ms / 1e3:
            return "fail"
        uncertain = span.bound > self.limits.fail_ms / 1e3
        return "warn" if uncertain or span.certain > self.limits.warn_ms / 1e3 else "pass"

    def describe(self, node: int) -> list[str]:
        """How far a clock is from the others, as phrases; none for the clock of the only node."""
        span, others = self.span(node), len(self.measured) - 1
        if span is None:
            return [f"not compared with {self.names[0]}"] if len(self.names) > 1 else []
        if others == 0:
            return []
        if self.reference.nodes == {node}:
            other = next(measured for measured in self.measured if measured != node)
            subject = f"{self.names[other]} is" if others == 1 else f"the other {others} nodes are"
            return [f"{subject} compared with it"]
        remarks = ", ".join(self._remarks(span))
        return [f"{self._distance(span)} {self._reference_name(node)}" + (f" ({remarks})" if remarks else "")]

    def _is_narrow(self, span: _Span) -> bool:
        """Whether its bound is too small to matter."""
        return span.bound <= self.limits.warn_ms / 1e3

    def _distance(self, span: _Span) -> str:
        if span.certain == 0:
            if self._is_narrow(span):
                return f"within {_length(max(abs(span.low), abs(span.high)))} of"
            return f"between {_length(abs(span.low))} behind and {_length(span.high)} ahead of"
        near, far = sorted((abs(span.low), abs(span.high)))
        size = _length(abs(span.middle)) if self._is_narrow(span) else f"between {_length(near)} and {_length(far)}"
        return f"{size} {'ahead of' if span.middle > 0 else 'behind'}"

    def _remarks(self, span: _Span) -> Iterator[str]:
        status, warn, fail = self.status(span), self.limits.warn_ms / 1e3, self.limits.fail_ms / 1e3
        if span.certain > 0 and self._is_narrow(span):
            yield f"± {_length(span.bound)}"
        if status == "fail":
            yield f"limit {_length(fail)}"
        elif status == "warn":
            yield (
                f"warning from {_length(warn)}"
                if span.certain > warn
                else f"too uncertain for a limit of {_length(fail)}"
            )

    def _reference_name(self, node: int) -> str:
        agreeing, others = self.reference.nodes - {node}, len(self.measured) - 1
        if len(self.reference.nodes) == 1:
            return self.names[next(iter(agreeing))]
        share = "the" if len(agreeing) == others else f"{len(agreeing)} of the"
        return f"{share} other {others} nodes"


def _describe_discipline(discipline: Mapping[str, Any]) -> str:
    """What keeps a node's clock, or why that is not known."""
    if discipline.get("description"):
        return str(discipline["description"])
    if "timeout" in discipline:
        return f"its time service did not answer within {discipline['timeout']} s"
    if "error" in discipline or "skip" in discipline:
        return f"its time service was not asked: {discipline.get('error', discipline.get('skip'))}"
    if discipline.get("disciplined") is None:
        return "no time service answers"
    return "synchronised" if discipline["disciplined"] else "not synchronised"


def _length(seconds: float) -> str:
    """A length of time in ms, s, h or days, whichever reads best."""
    if seconds < 0.9995:
        return f"{round(seconds * 1e3, 3):.3g} ms"
    if seconds < 7200:
        return f"{seconds:.3f}".rstrip("0").rstrip(".") + " s"
    return f"{seconds / 3600:.1f} h" if seconds < 2 * 86400 else f"{seconds / 86400:.0f} days"
