"""How fast runs were, with how many GPUs and how much faster than one of them, from the files in their directories."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from slurmtrain.errors import PathError, UserError
from slurmtrain.model.run.run import Run
from slurmtrain.ops.query.select import Question, select_runs
from slurmtrain.ops.shared.find import choose_one
from slurmtrain.ops.shared.observe import ListedRuns
from slurmtrain.ops.shared.run_measures import Measures, measure_run
from slurmtrain.ops.shared.views import SCHEMA
from slurmtrain.ops.shared.workspace import Workspace

REASONS = {
    "steps_per_second": "it needs two finished steps, reported by a session, slurmtrain.progress() or tracking.metrics",
    "samples_per_second": "only run.loader() and run.share() count samples",
    "epoch_seconds": "only run.loader() knows the samples of an epoch",
    "memory_bytes": "ranks record it while they train, if they have a session or call slurmtrain.progress()",
    "utilization": "nodes record it every 15 s while they train, unless tracking.system_metrics is false",
}
"""Why figures have no value for some runs, by their names."""
# The same of columns that are left out where no run has a value.
_REASONS_OF_SOME = {
    "data_wait_share": "it needs run.loader(), or a module in run.checkpoint() with a forward pass",
    "communication_share": "only with measures.communication: true, and run.steps()",
    "mfu": "only with run.measure(flops_per_sample=...), on GPUs that are known or with measures.peak_tflops",
}
# What ``compare --performance --json`` has of a run, in the order of its columns in CSV.
_FIGURES = (
    "nodes", "processes", "gpus", "steps_per_second", "rate_error", "samples_per_second", "epoch_seconds",
    "total_seconds", "memory_bytes", "memory", "utilization", "step_p50_s", "step_p95_s", "tokens_per_second",
    "data_wait_share", "communication_share", "gpu_utilization", "gpu_power_w", "energy_kwh", "mfu",
)  # fmt: skip


# --- figures of runs --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Performance:
    """How fast a run was, also compared with another; None for an unknown value."""

    id: str
    name: str
    state: str
    measures: Measures = field(default_factory=Measures)
    speedup: float | None = None
    """How many times as fast as the baseline it was."""
    of_ideal: float | None = None
    """The speed-up divided by how many times as many GPUs (or processes on CPUs) it had."""

    @property
    def workers(self) -> int | None:
        """What its cost and the ideal are counted in: GPUs, or processes if they trained on CPUs."""
        return self.measures.gpus or self.measures.processes

    @property
    def hours_per_1000_steps(self) -> float | None:
        """GPU-hours for 1000 steps, or process-hours on CPUs."""
        if not self.measures.steps_per_second or self.workers is None:
            return None
        return 1000 / self.measures.steps_per_second * self.workers / 3600

    def to_dict(self) -> dict[str, Any]:
        """A run in what ``compare --performance --json`` prints."""
        return {
            **{name: getattr(self, name) for name in ("id", "name", "state")},
            **{name: getattr(self.measures, name) for name in _FIGURES},
            **{name: getattr(self, name) for name in ("hours_per_1000_steps", "speedup", "of_ideal")},
        }


def choose_baseline(runs: Sequence[Performance]) -> Performance:
    """The run with the fewest GPUs (or processes on CPUs), the first of several; there must be a run."""
    return min(runs, key=lambda run: (run.workers is None, run.workers or 0))


def compare_performance(runs: Sequence[Performance], baseline: Performance) -> list[Performance]:
    """Each run compared with the baseline, runs with fewer GPUs first.

    Samples per second are compared if both have them; else steps, which have equally many samples if the batch counts
    all processes together.

    Args:
        runs: The runs, among which may be the baseline.
        baseline: The run that they are compared with.
    """
    ordered = sorted(runs, key=lambda run: (run.workers is None, run.workers or 0))
    rows = []
    for run in ordered:
        own_figures, others = run.measures, baseline.measures
        pairs = (
            (own_figures.samples_per_second, others.samples_per_second),
            (own_figures.steps_per_second, others.steps_per_second),
        )
        speedup = next((own / other for own, other in pairs if own and other), None)
        of_ideal = None
        if speedup is not None and run.workers and baseline.workers:
            of_ideal = speedup * baseline.workers / run.workers
        rows.append(replace(run, speedup=speedup, of_ideal=of_ideal))
    return rows


# --- the answer -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PerformanceAnswer:
    """Runs compared with a baseline. ``notes``: what cannot be read, and why some values are not known."""

    baseline: Performance
    runs: Sequence[Performance]
    notes: Sequence[str]

    def to_json(self) -> dict[str, Any]:
        """What ``compare --performance --json`` prints."""
        return {"schema": SCHEMA, "baseline": self.baseline.id, "runs": [each.to_dict() for each in self.runs]}


def compare_performance_of(
    workspace: Workspace, runs: ListedRuns, question: Question, baseline: str | None
) -> PerformanceAnswer:
    """Compare how fast runs were.

    Args:
        workspace: Where the runs are.
        runs: All of them, as observed.
        question: Which to compare.
        baseline: The id or name of the run to compare them with; None: that with the fewest GPUs.

    Raises:
        RunNotFound: A name refers to no run.
        QueryError: The question means nothing.
        UserError: There is no run.
    """
    ids = [str(record["id"]) for record in select_runs(workspace, runs, question).runs]
    if not ids:
        raise UserError("there is no run to compare")
    base_id = None if baseline is None else choose_one(workspace, runs, baseline)
    notes: list[str] = []
    chosen = dict.fromkeys([*ids, *([] if base_id is None else [base_id])])
    loaded = workspace.store.load_all(list(chosen))
    measured = {run_id: measure_performance(workspace, loaded[run_id], notes) for run_id in chosen}
    base = choose_baseline(list(measured.values())) if base_id is None else measured[base_id]
    rows = compare_performance(list(measured.values()), base)
    return PerformanceAnswer(base, rows, [*notes, *unknown_figures(list(measured.values()))])


def unknown_figures(runs: Sequence[Performance], *, without: Collection[str] = ()) -> list[str]:
    """Why some figures of runs are not known, as sentences without a full stop.

    Args:
        runs: The runs.
        without: The names of figures that do not matter.
    """
    sentences = []
    for name, why in (REASONS | _REASONS_OF_SOME).items():
        if name in without:
            continue
        lacking = sum(getattr(run.measures, name) is None for run in runs)
        if lacking and (name in REASONS or lacking < len(runs)):
            sentences.append(f"no {name.replace('_', ' ')} for {lacking} of {len(runs)} runs: {why}")
    return sentences


def measure_performance(workspace: Workspace, run: Run, notes: list[str]) -> Performance:
    """How fast a run was.

    Args:
        workspace: Where the run is.
        run: The run.
        notes: Receives what cannot be read.
    """
    measures = Measures()
    try:
        measures = measure_run(run, workspace.root.run(run.id))
    except PathError as error:
        notes.append(f"run {run.id}: {error}")
    return Performance(id=run.id, name=run.name, state=run.state, measures=measures)
