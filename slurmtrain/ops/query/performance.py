"""How fast runs were, with how many GPUs and how much faster than one of them, from the files in their directories."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from slurmtrain.errors import PathError, UserError
from slurmtrain.history import read_rows
from slurmtrain.model.metrics.curves import Segment
from slurmtrain.model.run.accounting import mean_gpus
from slurmtrain.model.run.events.agent_events import WorkersStarted
from slurmtrain.model.run.events.base import select
from slurmtrain.model.run.events.rank_events import RankMeasured
from slurmtrain.model.run.layout import ATTEMPTS, AttemptDir, RunDir, node_of
from slurmtrain.model.run.run import Attempt, Run
from slurmtrain.ops.query.select import Question, select_runs
from slurmtrain.ops.shared.find import choose_one
from slurmtrain.ops.shared.observe import ListedRuns
from slurmtrain.ops.shared.views import SCHEMA
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.runtime.job.run_reader import read_events
from slurmtrain.system.journal_files import JournalFile, journal_files, read_pieces

# The unit of the memory that nodes note (runtime/agent/monitor).
_MEGABYTE = 1e6
_RANK = re.compile(r"rank-\d+(?:\.(\d+))?\.jsonl")
_GPU_USE = re.compile(r"gpu_\d+_utilization_percentage")
_GPU_MEMORY = re.compile(r"gpu_\d+_memory_usage_megabytes")
_CPU_USE = "cpu_utilization_percentage"
# Why a column has no value for some runs.
_REASONS = {
    "steps_per_second": "it needs two finished steps, reported by a session, slurmtrain.progress() or tracking.metrics",
    "samples_per_second": "only run.loader() and run.share() count samples",
    "epoch_seconds": "only run.loader() knows the samples of an epoch",
    "memory_bytes": "ranks record it when they end, if they have a session or call slurmtrain.progress()",
    "utilization": "nodes record it every 15 s while they train, unless tracking.system_metrics is false",
}


# When training stood still, in seconds since 1970, and for how many seconds.
_Stall = tuple[float, float]


# --- figures of runs --------------------------------------------------------------------------------------------------


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

    speedup: float | None = None
    """How many times as fast as the baseline it was."""
    of_ideal: float | None = None
    """The speed-up divided by how many times as many GPUs (or processes on CPUs) it had."""

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

    def to_dict(self) -> dict[str, Any]:
        """A run in what ``compare --performance --json`` prints."""
        facts = asdict(self)
        compared = {name: facts.pop(name) for name in ("speedup", "of_ideal")}
        return {**facts, "hours_per_1000_steps": self.hours_per_1000_steps, **compared}


def rate_of_steps(steps: Sequence[int], times: Sequence[float], stalls: Iterable[_Stall] = ()) -> float | None:
    """How many steps ranks made in a second, from the first finished step to the last; None: they made too few.

    Args:
        steps: The numbers of finished steps, in order, since these ranks were started.
        times: When each was finished, in seconds since 1970.
        stalls: When they stood still for a save, and for how many seconds: that does not count.
    """
    if len(steps) < 2:
        return None
    stalled = sum(seconds for at, seconds in stalls if times[0] <= at < times[-1])
    seconds = times[-1] - times[0] - stalled
    return (steps[-1] - steps[0]) / seconds if seconds > 0 and steps[-1] > steps[0] else None


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
        pairs = (
            (run.samples_per_second, baseline.samples_per_second),
            (run.steps_per_second, baseline.steps_per_second),
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
    measured = {run_id: _measure(workspace, loaded[run_id], notes) for run_id in chosen}
    base = choose_baseline(list(measured.values())) if base_id is None else measured[base_id]
    rows = compare_performance(list(measured.values()), base)
    for name, why in _REASONS.items():
        without = sum(getattr(run, name) is None for run in measured.values())
        if without:
            notes.append(f"no {name.replace('_', ' ')} for {without} of {len(measured)} runs: {why}")
    return PerformanceAnswer(base, rows, notes)


# --- one run --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Start:
    """A start of a run's ranks: in an attempt, after so many restarts inside it, with the ``rows`` of its metrics."""

    attempt: Attempt
    restarts: int
    rows: Sequence[Segment] = ()

    @property
    def step_count(self) -> int:
        """The first and the last step of the ranks."""
        if not self.rows:
            return 0
        first, last = self.rows[0], self.rows[-1]
        return last.block.steps[last.stop - 1] - first.block.steps[first.start]

    @property
    def steps(self) -> list[int]:
        """The finished steps."""
        return [step for row in self.rows for step in row.block.steps[row.start : row.stop]]

    @property
    def times(self) -> list[float]:
        """When they were finished."""
        return [time for row in self.rows for time in row.block.times[row.start : row.stop]]


def _measure(workspace: Workspace, run: Run, notes: list[str]) -> Performance:
    """How fast a run was when its ranks made the most steps without being started again."""
    unknown = Performance(id=run.id, name=run.name, state=run.state)
    directory = workspace.root.run(run.id)
    attempts = {attempt.number: attempt for attempt in run.attempts}
    try:
        rows: dict[tuple[int, int], list[Segment]] = {}
        for segment in read_rows(run, directory):
            began = segment.block.times[segment.start]
            # Metrics do not say after which restart they were logged: their times do.
            restarts = sum(float(restart["at"]) <= began for restart in attempts[segment.attempt].restarts)
            rows.setdefault((segment.attempt, restarts), []).append(segment)
        starts = [_Start(attempts[number], restarts, each) for (number, restarts), each in rows.items()]
        # Without metrics, the newest start is as good as any.
        starts = starts or [_Start(each, len(each.restarts)) for each in run.attempts if each.hosts][-1:]
        if not starts:
            return unknown
        return _of_start(run, directory, max(starts, key=lambda start: start.step_count), unknown)
    except PathError as error:
        notes.append(f"run {run.id}: {error}")
        return unknown


def _of_start(run: Run, directory: RunDir, start: _Start, unknown: Performance) -> Performance:
    attempt, steps, times = start.attempt, start.steps, start.times
    folder = f"{ATTEMPTS}/{attempt.key}/"
    every = journal_files(directory, [])
    journals = [each for each in every if each.metrics_of is None and each.name.startswith(folder)]
    workers = _workers(journals, start)
    processes = sum(len(each.processes) * each.ranks_each for each in workers.values())
    of_ranks = []
    for journal in journals:
        match = _RANK.fullmatch(journal.name.rpartition("/")[2])
        if match and int(match[1] or 0) == start.restarts:
            of_ranks += select(read_events(Path(journal.path), journal.name), RankMeasured)
    measured = [event.payload for event in of_ranks]
    figures = _Figures.read(directory.attempt(attempt.job_id, attempt.restart), workers, times)
    on_gpus = any(each.memory == "gpu" for each in measured) or bool(figures.memory)
    gpus = round(mean_gpus(run.resources) * len(workers)) or (processes if on_gpus else 0)
    stalls = [
        (each.saved_at - (each.seconds or 0.0), each.stall_s)
        for each in run.checkpoints
        if each.attempt == attempt.number and each.stall_s
    ]
    rate = rate_of_steps(steps, times, stalls)
    counted = next((each for each in measured if each.samples and each.steps), None)
    samples = rate * counted.samples / counted.steps if rate and counted else None  # type: ignore[operator]
    epoch = counted.epoch_samples if counted else None
    # Of the rank or GPU that needed the most.
    noted = [(each.peak_bytes, each.memory) for each in measured if each.peak_bytes]
    on_gpu = [each for each in noted if each[1] == "gpu"]
    memory_bytes, memory = max(on_gpu or noted, default=(None, None))
    if not on_gpu and figures.memory:
        memory_bytes, memory = int(max(figures.memory) * _MEGABYTE), "device"
    return replace(
        unknown,
        nodes=len(workers) or None,
        processes=processes or None,
        gpus=gpus,
        steps_per_second=rate,
        samples_per_second=samples,
        epoch_seconds=epoch / samples if epoch and samples else None,
        total_seconds=run.total_steps / rate if rate and run.total_steps else None,
        memory_bytes=memory_bytes,
        memory=memory,
        utilization=fmean(figures.use) if figures.use else None,
    )


def _workers(journals: Iterable[JournalFile], start: _Start) -> dict[int, WorkersStarted]:
    """What the agents of the nodes that trained have started, by node."""
    restarts = start.attempt.restarts
    until = float(restarts[start.restarts]["at"]) if start.restarts < len(restarts) else float("inf")
    members = restarts[start.restarts - 1].get("members") if start.restarts else None
    workers: dict[int, WorkersStarted] = {}
    for journal in journals:
        number = node_of(journal.name)
        if not number or (members is not None and int(number) not in members):
            continue
        for event in select(read_events(Path(journal.path), journal.name), WorkersStarted):
            if event.time < until:
                workers[int(number)] = event.payload
    return workers


@dataclass(frozen=True, slots=True)
class _Figures:
    """What nodes have measured of themselves while they trained. ``memory``: megabytes of each GPU, at each moment."""

    use: Sequence[float]
    memory: Sequence[float]

    @classmethod
    def read(cls, attempt: AttemptDir, nodes: Iterable[int], times: Sequence[float]) -> _Figures:
        """Read the files of these ``nodes``, as far as their lines are between the first and the last of ``times``."""
        first, last = (times[0], times[-1]) if times else (0.0, float("inf"))
        gpus: list[float] = []
        processors: list[float] = []
        memory: list[float] = []
        records: list[Mapping[str, Any]] = []
        for path in map(attempt.system_metrics, nodes):
            with suppress(OSError):
                for piece in read_pieces(JournalFile(path.name, str(path), path.stat().st_size)):
                    records += [record for _, record in piece.reading.records]
        for record in records:
            metrics = record.get("metrics")
            if not isinstance(metrics, dict) or not first <= float(record["t"]) <= last:
                continue
            numbers = {name: float(value) for name, value in metrics.items() if isinstance(value, int | float)}
            gpus += [value for name, value in numbers.items() if _GPU_USE.fullmatch(name)]
            memory += [value for name, value in numbers.items() if _GPU_MEMORY.fullmatch(name)]
            processors += [numbers[_CPU_USE]] if _CPU_USE in numbers else []
        return cls(gpus or processors, memory)
