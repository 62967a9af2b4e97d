"""The tables of a scaling study: what its runs measured, compared, with the law of each series and advice. Pure.

Runs belong to a series if they differ in nothing but their number of processes, their batch, and seeds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from slurmtrain.model.query.comparison import is_seed
from slurmtrain.model.query.fields import differing, repetition_key, write_settings
from slurmtrain.ops.query.performance import Performance, choose_baseline, compare_performance
from slurmtrain.ops.shared.run_measures import Measures
from slurmtrain.ops.shared.views import SCHEMA
from slurmtrain.plugins.scale.scaling_law import MeasuredPoint, Range, ScalingFit, count_workers
from slurmtrain.plugins.scale.study_points import ONE_KIND, BatchKey

# An epoch may end in part of a batch: so much less is counted than the key of the batch says.
_ROUGHLY = 0.75
RULE = (
    "doubling them is worth its cost if it saves a larger share of the time than it adds to the cost: if training "
    "becomes more than 1.5 times as fast"
)
"""How :func:`advise` decides."""
LONELY = "a single size says nothing about others"


class RunSize(NamedTuple):
    """The size of a run."""

    nodes: int
    processes: int
    gpus: int = 0

    @property
    def workers(self) -> int:
        """GPUs, or processes if it trains on CPUs."""
        return self.gpus or self.processes


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyRun:
    """A run of a study, as its directory describes it."""

    performance: Performance
    strategy: str
    """As :func:`~.study_points.describe_strategy` writes it."""
    hardware: str = ONE_KIND
    """As :func:`~.study_points.hardware_kind` names it."""
    params: Mapping[str, Any] = field(default_factory=dict)
    batch: int | None = None
    """The batch size in its spec; None: no key is known to hold it."""
    batch_of_each: bool = False
    """Whether that is the batch of each process."""
    requested: RunSize | None = None
    """Its size in its spec, which counts as long as it has not begun."""
    hour_price: float | None = None
    """What an hour of its resources costs; None: prices are not known."""
    ended: bool = True
    reason: str = ""

    @property
    def id(self) -> str:
        """Its id."""
        return self.performance.id

    @property
    def state(self) -> str:
        """Its state."""
        return self.performance.state

    @property
    def measures(self) -> Measures:
        """Its measures."""
        return self.performance.measures

    @property
    def size(self) -> RunSize:
        """How large it was, or is to be."""
        own = self.measures
        if own.processes is None and self.requested is not None:
            return self.requested
        return RunSize(own.nodes or 0, own.processes or 0, own.gpus)

    @property
    def price_per_1000_steps(self) -> float | None:
        """What 1000 steps cost; without prices in GPU-hours, or process-hours on CPUs."""
        rate = self.measures.steps_per_second
        if self.hour_price is None or not rate:
            return self.performance.hours_per_1000_steps
        return self.hour_price * 1000 / rate / 3600

    @property
    def counted_samples(self) -> float | None:
        """The samples of all processes in a step, as they were counted; None: nothing has counted them."""
        rate, steps = self.measures.samples_per_second, self.measures.steps_per_second
        return rate / steps if rate and steps else None

    @property
    def written_samples(self) -> float | None:
        """The same by the key of the batch; None: there is none."""
        if self.batch is None:
            return None
        return float(self.batch * self.size.processes if self.batch_of_each else self.batch)

    @property
    def is_contradictory(self) -> bool:
        """Whether the key of the batch says something else than was counted."""
        counted, written = self.counted_samples, self.written_samples
        return bool(counted and written and not _ROUGHLY < counted / written < 1 / _ROUGHLY)

    @property
    def samples_per_step(self) -> float | None:
        """The samples of all processes in a step."""
        written = None if self.is_contradictory else self.written_samples
        return self.counted_samples if written is None else written


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleRow:
    """A run in the tables. ``series``: the name of its series."""

    run: StudyRun
    series: str
    speedup: float | None = None
    efficiency: float | None = None

    def to_json(self) -> dict[str, Any]:
        """RUN of ``scale --json``."""
        run, size = self.run, self.run.size
        samples = run.samples_per_step
        return {
            **{key: value for key, value in run.performance.to_dict().items() if key not in ("speedup", "of_ideal")},
            "nodes": size.nodes,
            "processes": size.processes,
            "gpus": size.gpus,
            "series": self.series,
            "strategy": run.strategy,
            "hardware": run.hardware,
            "workers": size.workers,
            "batch": None if samples is None else round(samples),
            "speedup": self.speedup,
            "efficiency": self.efficiency,
            "hour_price": run.hour_price,
            "price_per_1000_steps": run.price_per_1000_steps,
            "reason": run.reason or None,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleSeries:
    """Runs that differ in size only. ``fit``: their law; None: fewer than two sizes have been measured."""

    name: str
    rows: Sequence[ScaleRow]
    fit: ScalingFit | None
    unit: str

    @property
    def measured(self) -> list[ScaleRow]:
        """The rows that have ended with a speed, by size."""
        return [
            row for row in self.rows if row.run.ended and row.run.measures.steps_per_second and row.run.size.workers
        ]

    @property
    def largest(self) -> ScaleRow:
        """The measured row with the most workers; there must be one."""
        return max(self.measured, key=lambda row: row.run.size.workers)

    def to_json(self) -> dict[str, Any]:
        """SERIES of ``scale --json``."""
        law = None if self.fit is None else self.fit.to_json()
        return {"series": self.name, "unit": self.unit, "law": law, "advice": advise(self)}


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyTables:
    """The three tables, each a list of rows in order, and the series of the first."""

    series: Sequence[ScaleSeries]
    sizes: Sequence[ScaleRow]
    strategies: Sequence[ScaleRow]
    hardware: Sequence[HardwareRow]
    unit: str = "GPU"
    currency: str | None = None
    rows: Sequence[ScaleRow] = ()
    """All runs."""

    def batch_problem(self, batch: BatchKey | None) -> str:
        """That the key of the batch may count something else than assumed, as a sentence without a full stop; or empty.

        Args:
            batch: The key.
        """
        run = next((row.run for row in self.rows if row.run.is_contradictory), None)
        if run is None or batch is None:
            return ""
        other = "process" if batch.counts == "total" else "total"
        return (
            f"run {run.id} counted {run.counted_samples:.0f} samples a step, but {batch} is {run.batch}: "
            f"correct its meaning with --batch-of {other}, or name another with --batch-key"
        )

    @property
    def is_measured(self) -> bool:
        """Whether the speed of any run is known."""
        return any(row.run.measures.steps_per_second for row in self.rows)

    @property
    def is_complete(self) -> bool:
        """Whether all runs have completed."""
        return all(row.run.state == "completed" for row in self.rows)

    def to_json(self, study: str) -> dict[str, Any]:
        """What ``scale --json`` prints; ``study``: its id or name."""
        return {
            "schema": SCHEMA,
            "study": study,
            "complete": self.is_complete,
            "unit": self.unit,
            "currency": self.currency,
            "runs": [row.to_json() for row in self.rows],
            "scaling": [series.to_json() for series in self.series],
            "strategies": [row.run.id for row in self.strategies],
            "hardware": [
                {
                    "id": each.row.run.id,
                    "throughput": each.throughput,
                    "cost_efficiency": each.cost_efficiency,
                }
                for each in self.hardware
            ],
        }

    @property
    def sentences(self) -> list[str]:
        """The advice of each series."""
        several = len(self.series) > 1
        return [f"{each.name}: {advise(each)}" if several else advise(each) for each in self.series]


@dataclass(frozen=True, slots=True, kw_only=True)
class HardwareRow:
    """A run among runs on different hardware, compared with the smallest of them."""

    row: ScaleRow
    throughput: float | None = None
    """How many times as fast as the first row it is."""
    cost_efficiency: float | None = None
    """How many times as much the same money (without prices: the same GPU-hours) trains as in the first row."""

    def to_json(self) -> dict[str, Any]:
        """A row of ``hardware`` in ``scale --json``."""
        return {**self.row.to_json(), "throughput": self.throughput, "cost_efficiency": self.cost_efficiency}


def make_tables(runs: Sequence[StudyRun], batch: BatchKey | None, currency: str | None = None) -> StudyTables:
    """Compare the runs of a study.

    Args:
        runs: The runs, in the order of the study.
        batch: The key of the batch, which runs of a series need not share; None: there is none.
        currency: Of the prices of runs, if they are known.
    """
    by_name: dict[str, list[StudyRun]] = {}
    for name, run in zip(_names_of_series(runs, batch), runs, strict=True):
        by_name.setdefault(name, []).append(run)
    unit = "GPU" if any(run.size.gpus for run in runs) else "process"
    series = [_series(name, members, unit) for name, members in by_name.items()]
    rows = [row for each in series for row in each.rows]
    alike = [each for each in series if each.rows[0].run.hardware == ONE_KIND]
    return StudyTables(
        series=[each for each in alike if len({row.run.size for row in each.rows}) > 1],
        sizes=[row for each in alike for row in each.rows],
        strategies=_side_by_side([row for each in alike for row in each.rows]),
        hardware=_on_hardware(rows),
        unit=unit,
        currency=currency,
        rows=rows,
    )


def _names_of_series(runs: Sequence[StudyRun], batch: BatchKey | None) -> list[str]:
    own = None if batch is None else batch.key.removeprefix("params.")
    names = [name for name in differing([run.params for run in runs]) if name != own and not is_seed(name)]
    labels = []
    for run in runs:
        parts = [run.strategy, *([] if run.hardware == ONE_KIND else [run.hardware])]
        if any(value is not None for value in repetition_key(run.params, names)):
            parts.append(write_settings(run.params, names))
        labels.append(", ".join(parts))
    return labels


def _series(name: str, runs: Sequence[StudyRun], unit: str) -> ScaleSeries:
    """The runs of a series, compared with the smallest that has ended, and their law."""
    counted = _with_samples(runs)
    baseline = choose_baseline([each for each in counted if each.measures.steps_per_second] or counted)
    compared = {each.id: each for each in compare_performance(counted, baseline)}
    rows = [
        ScaleRow(
            run=run,
            series=name,
            speedup=compared[run.id].speedup,
            efficiency=compared[run.id].of_ideal,
        )
        for run in sorted(runs, key=lambda run: run.size.workers)
    ]
    # As in the speed-ups, counted samples come first.
    is_counted = all(run.counted_samples for run in runs if run.ended)
    points = [
        MeasuredPoint(
            run.size.workers,
            1 / rate,
            run.counted_samples if is_counted else run.samples_per_step,
            run.measures.rate_error,
            run.measures.communication_share,
        )
        for run in runs
        if run.ended and (rate := run.measures.steps_per_second) and run.size.workers
    ]
    fit = ScalingFit(points) if len({each.workers for each in points}) > 1 else None
    return ScaleSeries(name=name, rows=rows, fit=fit, unit=unit)


def _with_samples(runs: Sequence[StudyRun]) -> list[Performance]:
    """The figures of runs, with samples by the key of the batch where some were not counted."""
    if all(run.measures.samples_per_second for run in runs):
        return [run.performance for run in runs]
    figures = []
    for run in runs:
        rate, samples = run.measures.steps_per_second, run.samples_per_step
        measures = replace(run.measures, samples_per_second=rate * samples if rate and samples else None)
        figures.append(replace(run.performance, measures=measures))
    return figures


def _side_by_side(rows: Sequence[ScaleRow]) -> list[ScaleRow]:
    """Rows of the same size with different strategies, small sizes first; none if there is only one strategy."""
    by_size: dict[tuple[int, int], list[ScaleRow]] = {}
    for row in rows:
        by_size.setdefault((row.run.size.workers, row.run.size.nodes), []).append(row)
    groups = [group for _, group in sorted(by_size.items()) if len({row.run.strategy for row in group}) > 1]
    return [row for group in groups for row in group]


def _on_hardware(rows: Sequence[ScaleRow]) -> list[HardwareRow]:
    """Rows compared with the smallest; none if all hardware is alike."""
    if all(row.run.hardware == ONE_KIND for row in rows):
        return []
    figures = _with_samples([row.run for row in rows])
    first = choose_baseline([each for each in figures if each.measures.steps_per_second] or figures)
    compared = {each.id: each for each in compare_performance(figures, first)}
    of_first = next(row.run for row in rows if row.run.id == first.id)

    def efficiency(run: StudyRun) -> float | None:
        own = compared[run.id]
        if own.speedup is None:
            return None
        if run.hour_price and of_first.hour_price:
            return own.speedup * of_first.hour_price / run.hour_price
        return own.of_ideal

    return [
        HardwareRow(row=row, throughput=compared[row.run.id].speedup, cost_efficiency=efficiency(row.run))
        for row in rows
    ]


# --- advice -----------------------------------------------------------------------------------------------------------


def advise(series: ScaleSeries) -> str:
    """What the figures of a series recommend, as a sentence without a full stop."""
    if not series.measured:
        return "no run has ended and reported its speed yet"
    largest, fit = series.largest, series.fit
    begin = f"{count_workers(largest.run.size.workers, series.unit)}: "
    begin += "efficiency unknown" if largest.efficiency is None else f"{largest.efficiency:.2f} efficient"
    if fit is None:
        return f"{begin}; {LONELY}: a study needs two at least"
    worth = fit.worthwhile()
    if worth.value >= fit.limit:
        return (
            f"{begin}; by this fit, each doubling is worth its cost up to {worth.value:.0f}, "
            f"{fit.limit // fit.most} times the most that were measured{_in_most_fits(worth, fit.limit)}"
        )
    extrapolated = " (extrapolated)" if worth.value > fit.most else ""
    return (
        f"{begin}; more than {worth.value:.0f} cost more than they save{extrapolated}{_in_most_fits(worth, fit.limit)}"
    )


def _in_most_fits(worth: Range, limit: int) -> str:
    if worth.low is None or worth.high is None or worth.low == worth.high:
        return ""
    beyond = " or more" if worth.high >= limit else ""
    return f"; between {worth.low:.0f} and {worth.high:.0f}{beyond} in 90 % of repeated fits"
