"""How fast a run was and how much it needed, from the files in its directory: the only place that reads these figures.

If its ranks were started several times, the start with the most steps counts, with its own nodes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from statistics import fmean, median_low
from typing import Any

from slurmtrain.errors import PathError
from slurmtrain.history import read_rows
from slurmtrain.model.diagnosis.hang import is_slow
from slurmtrain.model.diagnosis.node_load import GPU_MEMORY, POWER, UTILIZATION, LoadSample, joules
from slurmtrain.model.experiment.prices import mean_gpus
from slurmtrain.model.metrics.curves import Segment
from slurmtrain.model.metrics.step_figures import quantile
from slurmtrain.model.metrics.step_times import error_of_rate, last_of_looks, rate_of_steps, times_of_steps
from slurmtrain.model.run.events.agent_events import WorkersStarted
from slurmtrain.model.run.events.base import select
from slurmtrain.model.run.events.rank_events import RankMeasured
from slurmtrain.model.run.layout import ATTEMPTS, RunDir, node_of
from slurmtrain.model.run.run import Attempt, Run
from slurmtrain.ops.shared.node_use import load_files, read_load
from slurmtrain.runtime.job.run_reader import read_events
from slurmtrain.system.journal_files import JournalFile, journal_files

# The unit of the memory that nodes note (runtime/agent/gauges).
_MEGABYTE = 1e6
_KWH = 3.6e6
_RANK = re.compile(r"rank-(\d+)(?:\.(\d+))?\.jsonl")
_OF_SCRIPT = re.compile(r"script(?:\.\d+)?\.jsonl")
# The output of scripts is read four times a second, and has no times of its own: of so many seconds they are good.
_READ_S = 2.0
# Lines that were read at once are stored within less, looks are further apart.
_LOOKS_APART_S = 0.1
_CPU_USE = "cpu_utilization_percentage"
# So many of what a node has noted in an attempt are enough for means; energy is counted by the GPUs.
_SAMPLES = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFigures:
    """How fast a rank was; None for an unknown value."""

    rank: int
    node: str | None
    """The host that it was on."""
    step_p50_s: float | None = None
    step_p95_s: float | None = None
    own_p50_s: float | None = None
    """Of the median step, what the rank does not wait for others in: until the end of the forward pass."""
    data_wait_share: float | None = None
    communication_share: float | None = None
    peak_memory_bytes: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """A rank in the ``measures`` of a run."""
        return {each.name: getattr(self, each.name) for each in fields(self)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Measures:
    """How fast a run was, and the resources that it needed; None for an unknown value. Shares are from 0 to 1."""

    nodes: int | None = None
    processes: int | None = None
    """How many processes trained."""
    gpus: int = 0
    """How many GPUs they had together; 0: they trained on CPUs."""
    steps_per_second: float | None = None
    rate_error: float | None = None
    """The standard error of ``steps_per_second``, as a part of it."""
    step_p50_s: float | None = None
    """Seconds of the median step."""
    step_p95_s: float | None = None
    """Seconds that 95 % of steps did not exceed."""
    samples_per_second: float | None = None
    tokens_per_second: float | None = None
    epoch_seconds: float | None = None
    """How long an epoch takes."""
    total_seconds: float | None = None
    """How long all steps of the run take."""
    data_wait_share: float | None = None
    """The part of steps while ranks waited for data, on average."""
    communication_share: float | None = None
    """The part of steps while ranks communicated or waited for each other and did nothing else, on average."""
    memory_bytes: int | None = None
    """The most memory that was used at once, of what ``memory`` says."""
    memory: str | None = None
    """``gpu``: what torch had allocated on a GPU; ``device``: all of a GPU; ``process``: what was resident of one."""
    utilization: float | None = None
    """How busy the GPUs were while it trained, else the processors of its nodes, in percent."""
    gpu_utilization: float | None = None
    """The same of GPUs alone."""
    gpu_power_w: float | None = None
    """The power of a GPU while it trained, on average, in watts."""
    energy_kwh: float | None = None
    """The energy of all GPUs in all attempts."""
    mfu: float | None = None
    """The part of what its devices could compute that its model needed (model FLOPs utilization)."""
    ranks: Sequence[RankFigures] = ()
    """The ranks that have noted their figures."""

    def to_dict(self) -> dict[str, Any]:
        """``measures`` of a run in JSON."""
        facts = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "ranks"}
        facts["peak_memory_bytes"] = facts.pop("memory_bytes")
        return {**facts, "slow_ranks": self.slow_ranks, "ranks": [rank.to_dict() for rank in self.ranks]}

    @property
    def slow_ranks(self) -> list[int]:
        """The ranks that others wait for in the median step: stragglers, by their own time."""
        owns = {rank.rank: rank.own_p50_s for rank in self.ranks if rank.own_p50_s is not None}
        # With two ranks, the slow one must not be its own yardstick.
        return [rank for rank, own_s in owns.items() if is_slow(own_s, median_low(owns.values()))]


def measure_run(run: Run, directory: RunDir) -> Measures:
    """The figures of a run.

    Args:
        run: The run, with its attempts.
        directory: Its directory.

    Raises:
        RunUnreadable: A journal or metrics file cannot be read.
    """
    attempts = {attempt.number: attempt for attempt in run.attempts}
    rows: dict[tuple[int, int], list[Segment]] = {}
    # What is guessed of a script's output may be the number of its lines.
    counts_lines = run.metrics_from is not None and run.step is None
    for segment in [] if counts_lines else read_rows(run, directory):
        began = segment.block.times[segment.start]
        # Metrics do not say after which restart they were logged: their times do.
        restarts = sum(float(restart["at"]) <= began for restart in attempts[segment.attempt].restarts)
        rows.setdefault((segment.attempt, restarts), []).append(segment)
    starts = [_Start(attempts[number], restarts, each) for (number, restarts), each in rows.items()]
    # Without metrics, the newest start is as good as any.
    starts = starts or [_Start(each, len(each.restarts)) for each in run.attempts if each.hosts][-1:]
    if not starts:
        return Measures()
    return _of_start(run, directory, max(starts, key=lambda start: start.step_count))


def measures_json(directory: RunDir, run: Run) -> dict[str, Any]:
    """How fast a run was; with nulls if its files cannot be read, which other fields say.

    Args:
        directory: Its directory.
        run: The run.
    """
    with suppress(PathError):
        return measure_run(run, directory).to_dict()
    return Measures().to_dict()


# --- one start of the ranks -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Start:
    """A start of a run's ranks: in an attempt, after so many restarts inside it, with the ``rows`` of its metrics."""

    attempt: Attempt
    restarts: int
    rows: Sequence[Segment] = ()

    @property
    def step_count(self) -> int:
        """How many steps the ranks made."""
        steps, _ = self.ends
        return steps[-1] - steps[0] if steps else 0

    @property
    def ends(self) -> tuple[list[int], list[float]]:
        """The first and the last finished step, and when they were finished; without steps, nothing."""
        places = [(row.block, place) for row in self.rows for place in (row.start, row.stop - 1)]
        chosen = [places[0], places[-1]] if places else []
        return [block.steps[at] for block, at in chosen], [block.times[at] for block, at in chosen]

    @property
    def steps(self) -> list[int]:
        """The finished steps."""
        return [step for row in self.rows for step in row.block.steps[row.start : row.stop]]

    @property
    def times(self) -> list[float]:
        """When they were finished."""
        return [time for row in self.rows for time in row.block.times[row.start : row.stop]]


def _of_start(run: Run, directory: RunDir, start: _Start) -> Measures:
    attempt = start.attempt
    folder = f"{ATTEMPTS}/{attempt.key}/"
    every = journal_files(directory, [])
    journals = [each for each in every if each.metrics_of is None and each.name.startswith(folder)]
    workers = _workers(journals, start)
    processes = sum(len(each.processes) * each.ranks_each for each in workers.values())
    by_rank = _noted_by_ranks(journals, start)
    measured = list(by_rank.values())
    figures = _NodeFigures.read(run, directory, start, workers)
    on_gpus = any(each.memory == "gpu" for each in measured) or bool(figures.memory)
    gpus = round(mean_gpus(run.resources) * len(workers)) or (processes if on_gpus else 0)
    pace = _pace(run, start, by_rank.get(0, RankMeasured()), _READ_S if _are_read(journals) else 0.0)
    rate = pace.steps_per_second
    counted = next((each for each in measured if each.samples and each.steps), RankMeasured())
    samples = rate * counted.samples / counted.steps if rate and counted.samples and counted.steps else None
    hosts = {rank: attempt.hosts.get(str(node)) for node, each in workers.items() for rank in _ranks_of(each)}
    memory_bytes, memory = _most_memory(measured, figures.memory)
    return replace(
        pace,
        nodes=len(workers) or None,
        processes=processes or None,
        gpus=gpus,
        samples_per_second=samples,
        tokens_per_second=samples * counted.tokens_per_sample if samples and counted.tokens_per_sample else None,
        epoch_seconds=counted.epoch_samples / samples if counted.epoch_samples and samples else None,
        data_wait_share=_mean(each.data_wait_share for each in measured),
        communication_share=_mean(each.communication_share for each in measured),
        memory_bytes=memory_bytes,
        memory=memory,
        utilization=_mean(figures.gpu_use or figures.cpu_use),
        gpu_utilization=_mean(figures.gpu_use),
        gpu_power_w=_mean(figures.power),
        energy_kwh=None if figures.joules is None else figures.joules / _KWH,
        mfu=_mfu(measured, samples, max(processes, gpus)),
        ranks=[_rank_figures(rank, hosts.get(rank), each) for rank, each in sorted(by_rank.items())],
    )


def steps_are_read(directory: RunDir) -> bool:
    """Whether a process of its own has read when steps were finished: no time of a single step is exact then.

    ``directory``: of the run. Raises RunUnreadable.
    """
    return _are_read(journal_files(directory, []))


def _are_read(journals: Iterable[JournalFile]) -> bool:
    return any(_OF_SCRIPT.fullmatch(each.name.rpartition("/")[2]) for each in journals)


def _pace(run: Run, start: _Start, first: RankMeasured, least_s: float) -> Measures:
    """How fast the steps of a start were, and nothing else.

    ``first``: what rank 0 has noted. ``least_s``: of how many seconds the times of steps are good.
    """
    steps, times = start.steps, start.times
    if least_s:
        steps, times = last_of_looks(steps, times, _LOOKS_APART_S)
    if times and times[-1] - times[0] < least_s:
        steps, times = [], []
    stalls = [
        (each.saved_at - (each.seconds or 0.0), each.stall_s)
        for each in run.checkpoints
        if each.attempt == start.attempt.number and each.stall_s
    ]
    rate = rate_of_steps(steps, times, stalls, (first.profiled_steps or 0, first.profiled_s or 0.0))
    # A rank has measured steps alone; of others it is only known when they were finished.
    took = times_of_steps(steps, times, stalls, least_s) if first.step_p50_s is None else []
    return Measures(
        steps_per_second=rate,
        rate_error=error_of_rate(steps, times, stalls) if rate else None,
        step_p50_s=first.step_p50_s if first.step_p50_s is not None else quantile(took, 0.5),
        step_p95_s=first.step_p95_s if first.step_p50_s is not None else quantile(took, 0.95),
        total_seconds=run.total_steps / rate if rate and run.total_steps else None,
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


def _ranks_of(workers: WorkersStarted) -> Iterable[int]:
    if workers.first_rank is not None:
        return range(workers.first_rank, workers.first_rank + workers.ranks_each)
    return map(int, workers.processes) if workers.ranks_each == 1 else ()


def _noted_by_ranks(journals: Iterable[JournalFile], start: _Start) -> dict[int, RankMeasured]:
    """What each rank has noted of itself last."""
    noted = {}
    for journal in journals:
        match = _RANK.fullmatch(journal.name.rpartition("/")[2])
        if match and int(match[2] or 0) == start.restarts:
            for event in select(read_events(Path(journal.path), journal.name), RankMeasured):
                noted[int(match[1])] = event.payload
    return noted


def _rank_figures(rank: int, host: str | None, noted: RankMeasured) -> RankFigures:
    return RankFigures(
        rank=rank,
        node=host,
        step_p50_s=noted.step_p50_s,
        step_p95_s=noted.step_p95_s,
        own_p50_s=noted.own_p50_s,
        data_wait_share=noted.data_wait_share,
        communication_share=noted.communication_share,
        peak_memory_bytes=noted.peak_bytes,
    )


def _most_memory(measured: Iterable[RankMeasured], of_gpus: Sequence[float]) -> tuple[int | None, str | None]:
    """The memory of the rank or GPU that needed the most, and its kind; ``of_gpus``: as nodes have noted it."""
    noted = [(each.peak_bytes, each.memory) for each in measured if each.peak_bytes]
    on_gpu = [each for each in noted if each[1] == "gpu"]
    if not on_gpu and of_gpus:
        return int(max(of_gpus) * _MEGABYTE), "device"
    return max(on_gpu or noted, default=(None, None))


def _mfu(measured: Sequence[RankMeasured], samples_per_second: float | None, devices: int) -> float | None:
    """The part of what these ``devices`` could compute that the model needed; None if one rank's is not known."""
    needed = next((each.flops_per_sample for each in measured if each.flops_per_sample), None)
    peaks = [each.peak_flops for each in measured if each.peak_flops]
    if not samples_per_second or needed is None or not peaks or len(peaks) < len(measured):
        return None
    return samples_per_second * needed / (fmean(peaks) * devices)


def _mean(values: Iterable[float | None]) -> float | None:
    numbers = [value for value in values if value is not None]
    return fmean(numbers) if numbers else None


# --- what nodes have noted --------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _NodeFigures:
    """What nodes have measured of themselves while they trained, at each moment, and the energy of all attempts.

    ``memory``: megabytes of GPUs. ``joules``: of all GPUs; None: no node has noted any.
    """

    gpu_use: list[float] = field(default_factory=list)
    cpu_use: list[float] = field(default_factory=list)
    memory: list[float] = field(default_factory=list)
    power: list[float] = field(default_factory=list)
    joules: float | None = None

    @classmethod
    def read(cls, run: Run, directory: RunDir, start: _Start, nodes: Collection[int]) -> _NodeFigures:
        """Read the files of all nodes; of the ``nodes`` that made the start, while they made their steps."""
        figures, (_, times) = cls(), start.ends
        first, last = times or (0.0, math.inf)
        for attempt in run.attempts:
            of_attempt = directory.attempt(attempt.job_id, attempt.restart)
            counted = {of_attempt.system_metrics(node) for node in nodes} if attempt is start.attempt else set()
            for path in load_files(of_attempt):
                samples = list(read_load(path, _SAMPLES))
                if (energy := joules(samples)) is not None:
                    figures.joules = (figures.joules or 0.0) + energy
                if path in counted:
                    figures.add(sample for sample in samples if first <= sample.time <= last)
        return figures

    def add(self, samples: Iterable[LoadSample]) -> None:
        """Add what a node has measured."""
        for sample in samples:
            self.gpu_use += sample.of_gpus(UTILIZATION).values()
            self.memory += sample.of_gpus(GPU_MEMORY).values()
            self.power += sample.of_gpus(POWER).values()
            self.cpu_use += [sample.figures[_CPU_USE]] if _CPU_USE in sample.figures else []
