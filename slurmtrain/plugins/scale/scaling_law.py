"""How the time of a step depends on the number of GPUs: a law fitted to measured points, and its advice.

The law is Amdahl's with terms for communication, in seconds a step on ``n`` workers, GPUs or processes, with ``b``
times the batch of the smallest size, ``n0`` workers. No coefficient is negative:

    serial + work * b * n0 / n + latency * log2(n) + ring * (n - 1) / n

A ring all-reduce sends ``(n - 1) / n`` of the gradients twice; its latency, and the latency of trees, which NCCL uses
across nodes, grow without end. From times alone, ``ring`` cannot be told from ``serial`` and ``work``, since its term
is a sum of both: it then belongs to them. Where runs have measured their share of communication, both parts of their
steps are fitted, and all terms can be told apart.

With weak scaling, ``b / n`` is the same everywhere, so that ``serial`` and ``work`` are one number.

Points are as uncertain as their steps scatter, and as they deviate from the law. The fit is repeated with points moved
at random by as much; the middle nine tenths of what these fits say are given with each figure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[Any]

# How many times the fit is repeated, and the part of the repetitions on each side that does not count.
_FITS, _TAIL = 400, 0.05
# Doublings are followed up to so many times the most workers that were measured.
_BEYOND = 4
# Batches of processes that differ by no more count as equal: epochs may end in part of a batch.
_ALIKE = 0.1
# Doubling is worth its cost if the time falls by a larger part than the cost rises: 1 - r > 2 r - 1 for the ratio r.
_WORTH = 2 / 3


@dataclass(frozen=True, slots=True)
class MeasuredPoint:
    """A run. ``batch``: samples a step; None: unknown. ``error``: the standard error of ``step_s``, as a part of it.

    ``communication``: its part of a step, as it was measured; None: unknown.
    """

    workers: int
    step_s: float
    batch: float | None = None
    error: float | None = None
    communication: float | None = None

    @property
    def share(self) -> float | None:
        """The part of communication; a worker alone has none."""
        return 0.0 if self.workers == 1 else self.communication


@dataclass(frozen=True, slots=True)
class Range:
    """A figure, and between which ones it is in nine tenths of the repetitions of the fit; None: unknown."""

    value: float
    low: float | None = None
    high: float | None = None

    def to_json(self) -> dict[str, float | None]:
        """This as JSON."""
        return {"value": self.value, "low": self.low, "high": self.high}

    def text(self, write: Callable[[float], str]) -> str:
        """The figure with its range in brackets. ``write``: how figures are written."""
        if self.low is None or self.high is None:
            return write(self.value)
        return f"{write(self.value)} ({write(self.low)} to {write(self.high)})"


def is_weak(points: Sequence[MeasuredPoint]) -> bool:
    """Whether the batch grows with the workers; an unknown batch counts as the same everywhere."""
    batches = [each.batch for each in points]
    if None in batches or len({each.workers for each in points}) < 2:
        return False
    of_each = [batch / each.workers for batch, each in zip(batches, points, strict=True) if batch is not None]
    return max(of_each) <= (1 + _ALIKE) * min(of_each)


class ScalingFit:
    """The law of one series of runs: at least two different numbers of workers."""

    def __init__(self, points: Sequence[MeasuredPoint]) -> None:
        """Fit the law to ``points``, which are in any order."""
        self._points = sorted(points, key=lambda each: each.workers)
        self.first = self._points[0].workers
        self.most = self._points[-1].workers
        self.counts = len({each.workers for each in self._points})
        self.weak = is_weak(self._points)
        batches = [each.batch for each in self._points]
        self._batch = None if None in batches else batches[0]
        self.is_split = all(each.share is not None for each in self._points)
        """Whether communication is fitted by what was measured of it."""

    @cached_property
    def coefficients(self) -> list[float]:
        """Seconds: ``serial``, ``work``, ``latency``, ``ring``; 0 for a term that the points do not tell."""
        return list(map(float, self._solve(1.0, 1.0)[0]))

    @cached_property
    def deviation(self) -> float:
        """How far the points are from the law, as a part of their times: the root of the mean square."""
        squares = ((self._step_s(self.coefficients, each) / each.step_s - 1) ** 2 for each in self._points)
        return math.sqrt(sum(squares) / len(self._points))

    @property
    def terms(self) -> tuple[int, ...]:
        """Which of the four coefficients the points tell apart."""
        enough = self.counts > 2
        if self.is_split:
            return ((1,) if self.weak else (0, 1)) + ((2, 3) if enough else (2,))
        return (1, 2) if self.weak else (0, 1, 2) if enough else (0, 1)

    @property
    def is_exact(self) -> bool:
        """Whether there are no more sizes than terms, so that nothing tests the form of the law."""
        return self.counts <= sum(each < 2 or not self.is_split for each in self.terms)

    @cached_property
    def error(self) -> float | None:
        """The standard error of a point, as a part of its time; None: nothing says it."""
        scatter = [each.error for each in self._points if each.error is not None]
        solved, squares = self._solve(1.0, 1.0)
        # A worker alone has no communication to fit.
        equations = len(self._points) + sum(each.workers > 1 for each in self._points if self.is_split)
        left = equations - sum(solved[each] > 0 for each in self.terms)
        by_law = math.sqrt(squares / left) if left > 0 and squares > 1e-12 else None
        return max([*scatter, *([] if by_law is None else [by_law])], default=None)

    @cached_property
    def _samples(self) -> list[list[float]]:
        """The coefficients of the repetitions; none if the error of the points is unknown."""
        if not self.error:
            return []
        import numpy as np

        # The same points have the same ranges.
        moved = np.exp(self.error * np.random.default_rng(0).standard_normal((_FITS, 2, len(self._points))))
        return [list(self._solve(times, shares)[0]) for times, shares in moved]

    def _relative_batch(self, point: MeasuredPoint) -> float:
        return point.batch / self._batch if self._batch and point.batch else 1.0

    def _basis(self, workers: float, batch: float) -> tuple[float, float, float, float]:
        """What the coefficients are multiplied by; ``batch``: relative to the first point's."""
        return 1.0, batch * self.first / workers, math.log2(workers), (workers - 1) / workers

    def _step_s(self, coefficients: Sequence[float], point: MeasuredPoint) -> float:
        basis = self._basis(point.workers, self._relative_batch(point))
        return sum(map(float.__mul__, coefficients, basis))

    def _solve(self, times: Any, shares: Any) -> tuple[Array, float]:
        """The coefficients of the least squares of deviations relative to times, none negative, and their squares.

        Args:
            times: What times are multiplied by.
            shares: What shares of communication are multiplied by.
        """
        import numpy as np
        from scipy.optimize import nnls

        rows = np.array([self._basis(each.workers, self._relative_batch(each)) for each in self._points])
        # Each row divided by its time: deviations count relative to it.
        rows /= (np.array([each.step_s for each in self._points]) * times)[:, None]
        goals = np.ones(len(self._points))
        if self.is_split:
            parts = np.minimum(np.array([each.share for each in self._points], dtype=float) * shares, 1.0)
            computing, communicating = rows.copy(), rows
            computing[:, 2:] = communicating[:, :2] = 0.0
            rows, goals = np.vstack([computing, communicating]), np.concatenate([1 - parts, parts])
        columns = list(self.terms)
        solved = np.zeros(4)
        solved[columns], norm = nnls(rows[:, columns], goals)
        return solved, float(norm) ** 2

    # --- what follows from it -----------------------------------------------------------------------------------------

    def _of_work(self, coefficients: Sequence[float], workers: float) -> float:
        """The time for the samples of the first point's batch: on more workers, a step of weak scaling has more."""
        batch = workers / self.first if self.weak else 1.0
        basis = self._basis(workers, batch)
        return sum(map(float.__mul__, map(float, coefficients), basis)) / batch

    def _range(self, figure: Callable[[Sequence[float]], float]) -> Range:
        values = sorted(map(figure, self._samples))
        if not values:
            return Range(figure(self.coefficients))
        low, high = values[int(_TAIL * len(values))], values[-1 - int(_TAIL * len(values))]
        return Range(figure(self.coefficients), low, high)

    def speedup(self, workers: float) -> Range:
        """How many times as fast as the first point so many ``workers`` are."""
        return self._range(lambda each: self._of_work(each, self.first) / self._of_work(each, workers))

    def efficiency(self, workers: float) -> Range:
        """The speed-up divided by the ideal one, of so many ``workers``."""
        return self._range(
            lambda each: self._of_work(each, self.first) / self._of_work(each, workers) * self.first / workers
        )

    def communication(self, workers: float) -> Range:
        """The part of a step of so many ``workers`` that the law calls communication."""

        def share(coefficients: Sequence[float]) -> float:
            batch = workers / self.first if self.weak else 1.0
            parts = list(map(float.__mul__, map(float, coefficients), self._basis(workers, batch)))
            return sum(parts[2:]) / sum(parts)

        return self._range(share)

    @property
    def limit(self) -> int:
        """Up to how many workers doublings are followed."""
        return _BEYOND * self.most

    def worthwhile(self) -> Range:
        """The most workers for which each doubling was worth its cost: time falls by a larger part than cost rises."""

        def most(coefficients: Sequence[float]) -> float:
            workers = float(self.first)
            while workers < self.limit:
                before, after = (self._of_work(coefficients, each) for each in (workers, 2 * workers))
                if after >= _WORTH * before:
                    break
                workers *= 2
            return workers

        return self._range(most)

    def curve(self) -> list[tuple[int, float]]:
        """Points to draw: workers, from the first to twice the most that were measured, and the speed-up."""
        begin, end = math.log2(self.first), math.log2(2 * self.most)
        workers = sorted({round(2 ** (begin + (end - begin) * step / 24)) for step in range(25)})
        of_first = self._of_work(self.coefficients, self.first)
        return [(each, of_first / self._of_work(self.coefficients, each)) for each in workers]

    def to_json(self) -> dict[str, Any]:
        """The field ``law`` of SERIES of ``scale --json``."""
        serial, work, latency, ring = self.coefficients
        return {
            "kind": "weak" if self.weak else "strong",
            "first": self.first,
            "serial_s": None if 0 not in self.terms else serial,
            "work_s": work,
            "latency_s": None if 2 not in self.terms else latency,
            "ring_s": None if 3 not in self.terms else ring,
            "points": self.counts,
            "deviation": self.deviation,
            "error": self.error,
            "efficiency": self.efficiency(self.most).to_json(),
            "communication": self.communication(self.most).to_json(),
            "worthwhile": self.worthwhile().to_json(),
            "limit": self.limit,
            "curve": [list(point) for point in self.curve()],
        }


# --- in words ---------------------------------------------------------------------------------------------------------


def plural(unit: str) -> str:
    """GPUs or processes."""
    return f"{unit}es" if unit.endswith("s") else f"{unit}s"


def count_workers(count: int, unit: str) -> str:
    """A number of GPUs or processes."""
    return f"{count} {unit if count == 1 else plural(unit)}"


def describe_law(fit: ScalingFit, unit: str) -> list[str]:
    """A law, and how far it can be trusted, as sentences without a full stop. ``unit``: GPU or process."""
    serial, work, latency, ring = fit.coefficients
    n = "n" if fit.first == 1 else f"(n/{fit.first})"
    parts = [f"{work:.3g} s"] if fit.weak else [f"{serial:.3g} s", f"{work:.3g} s / {n}"]
    parts += [f"{latency:.3g} s * log2 n"] if 2 in fit.terms else []
    parts += [f"{ring:.3g} s * (n - 1)/n"] if 3 in fit.terms else []
    kind = "weak scaling" if fit.weak else "Amdahl's law"
    text = f"a step takes {' + '.join(parts)} ({kind})"
    lines = [text if fit.is_exact else f"{text}; the points are {100 * fit.deviation:.1f} % off"]
    if fit.most > fit.first:
        fitted = f"fitted at {count_workers(fit.most, unit)}: efficiency "
        fitted += fit.efficiency(fit.most).text("{:.2f}".format)
        if 2 in fit.terms:
            name = "communication" if fit.is_split else "communication that grows with n"
            fitted += f", {name} {fit.communication(fit.most).text('{:.0%}'.format)} of a step"
        lines.append(fitted)
    if fit.counts == 2 and not (fit.weak or fit.is_split):
        lines.append("two sizes cannot separate communication from serial time: add a third")
    elif fit.is_exact:
        lines.append(
            f"{fit.counts} sizes determine the terms exactly: the uncertainty is how much steps "
            "scatter, and not how well the law fits"
        )
    if fit.error is None:
        lines.append("the uncertainty is unknown: there are too few steps to tell how much they scatter")
    return lines
