"""How fast runs were, with how many GPUs, and how much faster than one of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Performance:
    """How fast a run was, and the resources that it needed; None for an unknown value."""

    id: str
    name: str
    state: str
    nodes: int | None = None
    processes: int | None = None
    """How many processes trained."""
    gpus: int = 0
    """How many GPUs they had together; 0: they trained on CPUs."""
    steps_per_second: float | None = None
    samples_per_second: float | None = None
    epoch_seconds: float | None = None
    """How long an epoch takes."""
    total_seconds: float | None = None
    """How long all steps of the run take."""
    memory_bytes: int | None = None
    """The most memory that was used at once, of what ``memory`` says."""
    memory: str | None = None
    """``gpu``: what torch had allocated on a GPU; ``device``: all of a GPU; ``process``: what was resident of one."""
    utilization: float | None = None
    """How busy the GPUs were while it trained, else the processors of its nodes, in percent."""

    @property
    def workers(self) -> int | None:
        """What its cost and the ideal are counted in: GPUs, or processes if they trained on CPUs."""
        return self.gpus or self.processes

    @property
    def hours_per_1000_steps(self) -> float | None:
        """GPU-hours for 1000 steps, or process-hours on CPUs."""
        if not self.steps_per_second or self.workers is None:
            return None
        return 1000 / self.steps_per_second * self.workers / 3600


@dataclass(frozen=True, slots=True)
class PerformanceRow:
    """A run, and how many times as fast as the baseline it was; None: unknown."""

    performance: Performance
    speedup: float | None
    of_ideal: float | None
    """The speed-up divided by how many times as many GPUs (or processes on CPUs) it had."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stall:
    """Training stood still for ``seconds`` from ``at`` on, in seconds since 1970."""

    at: float
    seconds: float


def steps_per_second(steps: Sequence[int], times: Sequence[float], stalls: Iterable[Stall] = ()) -> float | None:
    """How many steps ranks made in a second, from the first finished step to the last; None: they made too few.

    Args:
        steps: The numbers of finished steps, in order, since these ranks were started.
        times: When each was finished, in seconds since 1970.
        stalls: When they stood still for a save: that does not count.
    """
    if len(steps) < 2:
        return None
    stalled = sum(stall.seconds for stall in stalls if times[0] <= stall.at < times[-1])
    seconds = times[-1] - times[0] - stalled
    return (steps[-1] - steps[0]) / seconds if seconds > 0 and steps[-1] > steps[0] else None


def choose_baseline(runs: Sequence[Performance]) -> Performance:
    """The run with the fewest GPUs (or processes on CPUs), the first of several; there must be a run."""
    return min(runs, key=lambda run: (run.workers is None, run.workers or 0))


def compare_performance(runs: Sequence[Performance], baseline: Performance) -> list[PerformanceRow]:
    """Each run compared with the baseline, runs with fewer GPUs first.

    Samples per second are compared if both have them; else steps, which have equally many samples if the batch counts
    all processes together.

    Args:
        runs: The runs, among which may be the baseline.
        baseline: The run that they are compared with.
    """
    ordered = sorted(runs, key=lambda run: (run.workers is None, run.workers or 0))
    return [_compared(run, baseline) for run in ordered]


def _compared(run: Performance, baseline: Performance) -> PerformanceRow:
    pairs = (
        (run.samples_per_second, baseline.samples_per_second),
        (run.steps_per_second, baseline.steps_per_second),
    )
    speedup = next((own / other for own, other in pairs if own and other), None)
    if speedup is None or not run.workers or not baseline.workers:
        return PerformanceRow(run, speedup, None)
    return PerformanceRow(run, speedup, speedup * baseline.workers / run.workers)
