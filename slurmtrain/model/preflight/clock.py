"""How far the nodes' clocks are apart, and whose is wrong: pure.

Every node but node 0 exchanges stamps with node 0, as NTP does (RFC 5905, section 8). Times are in seconds; an offset
is positive where the clock is ahead.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median_low
from typing import Any

from slurmtrain.model.preflight.finding import Finding, apply_level
from slurmtrain.model.spec.preflight_checks import ClockCheck

# t1 sent by the node, t2 received by node 0, t3 answered by node 0, t4 back at the node; seconds since 1970, t1 and t4
# by the node's clock, t2 and t3 by node 0's.
Stamps = tuple[float, float, float, float]

CHECK = "clock"
ADVICE = "have its time service looked at, with chronyc tracking for one; slurmtrain never sets a clock"


@dataclass(frozen=True, slots=True)
class ClockOffset:
    """How far a node's clock is ahead of node 0's, and by how much that may be wrong, from so many usable samples."""

    offset_s: float
    bound_s: float
    samples: int


def offset_from_stamps(samples: Sequence[Stamps]) -> ClockOffset:
    """The offset by the sample with the least delay: its error is at most half of that delay (RFC 5905, section 8).

    Samples in which a clock ran backwards, or an answer came before it was asked for, are dropped: a clock was set
    meanwhile. Raises ValueError where no sample is left.
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
    """What to say of each node's clock; None is a node that was not measured, and node 0 has ``Offset(0, 0, 0)``.

    ``disciplines`` is what ``runtime.clock.discipline`` says on each node. An offset counts as far as it is certain, by
    its size less its bound. Clocks are compared with node 0's, unless that is the one that is wrong: most of the nodes
    agree against it, or it differs from the only other one and alone says that it is not synchronised. A clock that
    nothing keeps is a warning, and so is an offset so uncertain that it cannot be told from one over the limit.
    """
    measured = {node: offset for node, offset in offsets.items() if offset is not None}
    if measured:
        measured.setdefault(0, ClockOffset(0.0, 0.0, 0))
    nodes = sorted({*offsets, *disciplines})
    names = {node: hosts.get(node, f"node {node}") for node in {*nodes, 0}}
    against = _Comparison(measured, _reference(measured, disciplines, limits), names, limits)
    return {node: apply_level(_finding(node, against, disciplines.get(node, {})), limits.level) for node in nodes}


def _finding(node: int, against: _Comparison, facts: Mapping[str, Any]) -> Finding:
    span, said, disciplined = against.span(node), _said(facts), facts.get("disciplined")
    compared = against.words(node)
    status = "pass" if span is None else against.status(span)
    if status == "pass" and disciplined is not True:
        status = "warn"
    evidence = {
        "offset_ms": None if span is None else round(span.middle * 1e3, 6),
        "bound_ms": None if span is None else round(span.bound * 1e3, 6),
        "samples": 0 if span is None else against.measured[node].samples,
        "disciplined": disciplined,
        "source": str(facts.get("source", "none")),
        "said": said,
    }
    if status != "pass":
        evidence["advice"] = ADVICE
    # What keeps a clock is worth a word where nothing does, and where nothing else is known.
    tell = disciplined is not True or span is None or not compared
    return Finding(CHECK, status, "; ".join([*compared, said] if tell else compared), evidence)


# --- what is compared -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Span:
    """Seconds ahead of something: certainly no less than ``low`` and no more than ``high``."""

    low: float
    high: float

    @classmethod
    def of(cls, offset: ClockOffset) -> _Span:
        return cls(offset.offset_s - offset.bound_s, offset.offset_s + offset.bound_s)

    def against(self, other: _Span) -> _Span:
        return _Span(self.low - other.high, self.high - other.low)

    @property
    def middle(self) -> float:
        return (self.low + self.high) / 2

    @property
    def bound(self) -> float:
        return (self.high - self.low) / 2

    @property
    def certain(self) -> float:
        """How far it is from zero at least."""
        return max(self.low, -self.high, 0.0)


@dataclass(frozen=True, slots=True)
class _Reference:
    """What clocks are compared with: how far that is ahead of node 0's, and whose clocks it stands for."""

    span: _Span
    nodes: frozenset[int]


_NODE_0 = _Reference(_Span(0.0, 0.0), frozenset({0}))


def _reference(
    measured: Mapping[int, ClockOffset], disciplines: Mapping[int, Mapping[str, Any]], limits: ClockCheck
) -> _Reference:
    if len(measured) < 2:
        return _NODE_0
    if len(measured) == 2:
        [other] = [node for node in measured if node != 0]
        unsynchronised = [node for node in measured if disciplines.get(node, {}).get("disciplined") is False]
        span = _Span.of(measured[other])
        if span.certain > limits.warn_ms / 1e3 and unsynchronised == [0]:
            return _Reference(span, frozenset({other}))
        return _NODE_0
    within = (_majority(measured, limit / 1e3) for limit in (limits.warn_ms, limits.fail_ms))
    return next((found for found in within if found is not None and 0 not in found.nodes), _NODE_0)


def _majority(measured: Mapping[int, ClockOffset], limit_s: float) -> _Reference | None:
    """Those that agree with the median within a limit, if they are more than half of all.

    The median of the lower ends and that of the upper ends are the ends of the median.
    """
    spans = {node: _Span.of(offset) for node, offset in measured.items()}
    median = _Span(median_low(span.low for span in spans.values()), median_low(span.high for span in spans.values()))
    agreeing = frozenset(node for node, span in spans.items() if span.against(median).certain <= limit_s)
    return _Reference(median, agreeing) if 2 * len(agreeing) > len(spans) else None


# --- in words ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Comparison:
    """The clocks that were measured, against the reference."""

    measured: Mapping[int, ClockOffset]
    reference: _Reference
    names: Mapping[int, str]
    limits: ClockCheck

    def span(self, node: int) -> _Span | None:
        if node not in self.measured:
            return None
        if self.reference.nodes == {node}:
            return _Span(0.0, 0.0)
        return _Span.of(self.measured[node]).against(self.reference.span)

    def status(self, span: _Span) -> str:
        if span.certain > self.limits.fail_ms / 1e3:
            return "fail"
        uncertain = span.bound > self.limits.fail_ms / 1e3
        return "warn" if uncertain or span.certain > self.limits.warn_ms / 1e3 else "pass"

    def words(self, node: int) -> list[str]:
        """How far a clock is from the others; no words for that of the only node."""
        span, others = self.span(node), len(self.measured) - 1
        if span is None:
            return [f"not compared with {self.names[0]}"] if len(self.names) > 1 else []
        if others == 0:
            return []
        if self.reference.nodes == {node}:
            other = next(each for each in self.measured if each != node)
            are = f"{self.names[other]} is" if others == 1 else f"the other {others} nodes are"
            return [f"{are} compared with it"]
        brackets = ", ".join(self._brackets(span))
        return [f"{self._distance(span)} {self._whom(node)}" + (f" ({brackets})" if brackets else "")]

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

    def _brackets(self, span: _Span) -> Iterator[str]:
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

    def _whom(self, node: int) -> str:
        agreeing, others = self.reference.nodes - {node}, len(self.measured) - 1
        if len(self.reference.nodes) == 1:
            return self.names[next(iter(agreeing))]
        which = "the" if len(agreeing) == others else f"{len(agreeing)} of the"
        return f"{which} other {others} nodes"


def _said(facts: Mapping[str, Any]) -> str:
    """What a node says of what keeps its clock, or why it says nothing."""
    if facts.get("said"):
        return str(facts["said"])
    if "timeout" in facts:
        return f"its time service did not answer within {facts['timeout']} s"
    if "error" in facts or "skip" in facts:
        return f"its time service was not asked: {facts.get('error', facts.get('skip'))}"
    if facts.get("disciplined") is None:
        return "no time service answers"
    return "synchronised" if facts["disciplined"] else "not synchronised"


def _length(seconds: float) -> str:
    """A length of time, in the unit in which it is easily read."""
    if seconds < 0.9995:
        return f"{round(seconds * 1e3, 3):.3g} ms"
    if seconds < 7200:
        return f"{seconds:.3f}".rstrip("0").rstrip(".") + " s"
    return f"{seconds / 3600:.1f} h" if seconds < 2 * 86400 else f"{seconds / 86400:.0f} days"
