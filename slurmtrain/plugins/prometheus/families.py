"""Collecting the state of all runs in Prometheus' terms: as ``status`` does, it observes, and starts and ends nothing.

Names follow https://prometheus.io/docs/practices/naming: base units, ``_total`` for counters, ``_ratio`` for shares.
Points in time are exported as such, since an age would be wrong by the time it is scraped; a query subtracts them from
``time()``.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from slurmtrain.model.diagnosis.node_load import GPU_MEMORY, POWER, UTILIZATION
from slurmtrain.model.run.accounting import (
    ATTEMPTS,
    GPU_J,
    GPU_S,
    INTERRUPTED,
    LOST_STEPS,
    NODE_S,
    PLANNED,
    QUEUE_S,
    QUEUED,
    UNPRODUCTIVE,
    Placement,
    Tally,
)
from slurmtrain.model.run.run import CAUSES, RUN_STATES, Checkpoint
from slurmtrain.ops.shared.node_use import newest_load_files, newest_sample
from slurmtrain.ops.shared.observe import observe
from slurmtrain.ops.shared.views import SCHEMA, RunRecord
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.plugins.prometheus.counters import Counters
from slurmtrain.version import __version__

_MEGABYTE = 1e6
PREFIX = "slurmtrain_"
GAUGE, COUNTER, SUMMARY = "gauge", "counter", "summary"


@dataclass(frozen=True, slots=True)
class Family:
    """Metrics of one name. ``help``: a sentence without a full stop; ``kind``: gauge, counter or summary.

    ``samples``: values by label; of a summary, the count and the sum.
    """

    name: str
    kind: str
    help: str
    labels: tuple[str, ...] = ()
    samples: dict[tuple[str, ...], tuple[float, ...]] = field(default_factory=dict)

    def add(self, *values: float, **labels: str) -> None:
        """Add a sample: its ``values``, and a value for each of the ``labels``."""
        self.samples[tuple(labels[name] for name in self.labels)] = values

    @property
    def exported(self) -> tuple[str, ...]:
        """The names of its series, as queries have them."""
        return (f"{self.name}_count", f"{self.name}_sum") if self.kind == SUMMARY else (self.name,)


_PLACE = ("executor", "partition")
_RUN = ("run", "name")
_KINDS = "by kind (docs/goodput.md)"


class Families:
    """All families, with the samples that were added to them."""

    def __init__(self) -> None:
        """There are no samples yet."""
        self._families: dict[str, Family] = {}
        for name, kind, help_text, labels in _declared_families():
            self._families[name] = Family(PREFIX + name, kind, help_text, labels)

    def __iter__(self) -> Iterator[Family]:
        return iter(self._families.values())

    def __getitem__(self, name: str) -> Family:
        return self._families[name]

    def add_states(self, counts: Mapping[tuple[str, Placement], int]) -> None:
        """Add the numbers of runs by state and place: all states of each place, so that none vanishes."""
        for place in {place for _, place in counts}:
            for state in RUN_STATES:
                self["runs"].add(counts.get((state, place), 0), state=state, **place._asdict())

    def add_totals(self, totals: Tally) -> None:
        """Add the sums over all runs."""
        for place, sums in totals.items():
            at = place._asdict()
            self["attempts_total"].add(sums.get(ATTEMPTS, 0.0), **at)
            self["lost_steps_total"].add(sums.get(LOST_STEPS, 0.0), **at)
            self["queue_seconds"].add(sums.get(QUEUED, 0.0), sums.get(QUEUE_S, 0.0), **at)
            if GPU_J in sums:
                self["gpu_energy_joules_total"].add(sums[GPU_J], **at)
            for resource, name in (("node", NODE_S), ("gpu", GPU_S)):
                self[f"{resource}_seconds_total"].add(sums.get(name, 0.0), **at)
                for kind in UNPRODUCTIVE:
                    spent = sums.get(f"{name}:{kind}", 0.0)
                    self[f"{resource}_unproductive_seconds_total"].add(spent, kind=kind, **at)
            counts = {name.removeprefix(INTERRUPTED): n for name, n in sums.items() if name.startswith(INTERRUPTED)}
            # Also causes without any: an increase is only noticed in a series that existed before.
            for cause in dict.fromkeys([*(each for each in CAUSES if each not in PLANNED), *counts]):
                self["interruptions_total"].add(counts.get(cause, 0.0), cause=cause, **at)

    def add_run(self, record: RunRecord, place: Placement) -> None:
        """Add the series of one run that has not ended.

        Args:
            record: The run.
            place: Where its newest attempt is.
        """
        listed = record.listed
        at = {"run": listed.id, "name": listed.name}
        self["run_info"].add(1.0, **at, state=listed.state, sweep=listed.sweep or "", **place._asdict())
        row: Mapping[str, Any] = listed.row
        checkpoint: Checkpoint | None = listed.checkpoint
        values = {
            "run_attempts": listed.attempt,
            "run_steps": row["step"],
            "run_target_steps": row["total_steps"],
            "run_lost_steps": row["lost_steps"],
            "run_goodput_ratio": row["goodput"],
            "run_submitted_timestamp_seconds": row["submitted_at"],
            "run_started_timestamp_seconds": row["started_at"],
            "run_checkpoint_timestamp_seconds": checkpoint.saved_at if checkpoint else None,
            "run_checkpoint_steps": checkpoint.step if checkpoint else None,
            "run_idle_timestamp_seconds": record.idleness.since if record.idleness else None,
            **(gpus_now(record) if listed.state == "running" else {}),
        }
        for name, value in values.items():
            if value is not None:
                self[name].add(float(value), **at)


def _declared_families() -> Iterator[tuple[str, str, str, tuple[str, ...]]]:
    """Name, kind, help and labels of each family."""
    yield "build_info", GAUGE, "Always 1; the version of slurmtrain", ("version",)
    yield "runs", GAUGE, "Runs in the registry, by state", (*_PLACE, "state")
    yield "attempts_total", COUNTER, "Attempts that were submitted", _PLACE
    yield (
        "interruptions_total",
        COUNTER,
        "Ends and restarts of attempts that were not planned, by cause",
        (*_PLACE, "cause"),
    )
    yield "queue_seconds", SUMMARY, "Time in the queue of attempts that have started", _PLACE
    yield "lost_steps_total", COUNTER, "Steps that were trained, discarded by an interruption and trained again", _PLACE
    yield "node_seconds_total", COUNTER, "Time on nodes, times their number", _PLACE
    yield "gpu_seconds_total", COUNTER, "Time on GPUs, times their number", _PLACE
    yield (
        "node_unproductive_seconds_total",
        COUNTER,
        f"The part of node_seconds that trained nothing that was kept, {_KINDS}",
        (*_PLACE, "kind"),
    )
    yield (
        "gpu_unproductive_seconds_total",
        COUNTER,
        f"The part of gpu_seconds that trained nothing that was kept, {_KINDS}",
        (*_PLACE, "kind"),
    )
    yield "gpu_energy_joules_total", COUNTER, "Energy used by GPUs while ranks ran on them", _PLACE
    yield "tracker_unsent_runs", GAUGE, "Runs with facts that a tracker lacks", ()
    yield "tracker_failing_runs", GAUGE, "Runs that a tracker refused the last time", ("tracker",)
    yield "tracker_sent_timestamp_seconds", GAUGE, "When something was last sent to a tracker", ()
    yield "scheduler_up", GAUGE, "Whether Slurm answered the last question; absent if it was not asked", ()
    yield "collection_timestamp_seconds", GAUGE, "When these metrics were collected", ()
    yield "collection_duration_seconds", GAUGE, "How long that took", ()
    yield "run_info", GAUGE, "Always 1; a run that has not ended", (*_RUN, "state", *_PLACE, "sweep")
    yield "run_attempts", GAUGE, "Its attempts so far", _RUN
    yield "run_steps", GAUGE, "Its finished steps", _RUN
    yield "run_target_steps", GAUGE, "How many steps it is to do", _RUN
    yield "run_lost_steps", GAUGE, "Its steps that were trained again", _RUN
    yield "run_goodput_ratio", GAUGE, "The share of its time on nodes that trained what was kept", _RUN
    yield "run_submitted_timestamp_seconds", GAUGE, "When it was submitted", _RUN
    yield "run_started_timestamp_seconds", GAUGE, "When it first started on nodes", _RUN
    yield "run_checkpoint_timestamp_seconds", GAUGE, "When its newest checkpoint was saved", _RUN
    yield "run_checkpoint_steps", GAUGE, "The step of that checkpoint", _RUN
    yield "run_idle_timestamp_seconds", GAUGE, "Time since which it has been idle; absent if it is not", _RUN
    yield "run_gpu_utilization_ratio", GAUGE, "Mean utilization of its GPUs in the newest sample", _RUN
    yield "run_gpu_memory_bytes", GAUGE, "Memory in use on all of its GPUs together", _RUN
    yield "run_gpu_power_watts", GAUGE, "Power of all of its GPUs together", _RUN


LABELS = frozenset(label for _, _, _, labels in _declared_families() for label in labels)
"""The names of all labels."""


def gpus_now(record: RunRecord) -> dict[str, float | None]:
    """The series of a run that runs, by name; None where its nodes have no figures.

    Args:
        record: The run.
    """
    newest = map(newest_sample, newest_load_files(record.directory, record.listed.job_id))
    samples = [sample for sample in newest if sample is not None]
    use, memory, power = (
        [value for sample in samples for value in sample.of_gpus(figure).values()]
        for figure in (UTILIZATION, GPU_MEMORY, POWER)
    )
    return {
        "run_gpu_utilization_ratio": fmean(use) / 100 if use else None,
        "run_gpu_memory_bytes": sum(memory) * _MEGABYTE if memory else None,
        "run_gpu_power_watts": sum(power) if power else None,
    }


# Of so many of the newest runs it is looked up what trackers lack, and of all that may still change.
_RECENT = 1000


@dataclass(frozen=True, slots=True)
class Collection:
    """What was collected, and ``notes``: what the user should know."""

    families: tuple[Family, ...]
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """What ``metrics --json`` prints."""
        metrics = []
        for family in self.families:
            parts = ("count", "sum") if family.kind == SUMMARY else ("value",)
            samples = [
                {"labels": dict(zip(family.labels, labels, strict=True)), **dict(zip(parts, values, strict=True))}
                for labels, values in family.samples.items()
            ]
            metrics.append({"name": family.name, "type": family.kind, "help": family.help, "samples": samples})
        return {"schema": SCHEMA, "metrics": metrics}


def collect(workspace: Workspace, counters: Counters, *, per_run: bool) -> Collection:
    """Collect everything.

    Args:
        workspace: Where the runs are.
        counters: The sums of earlier collections of this process; they are brought up to date.
        per_run: Include the series of single runs that have not ended.

    Raises:
        SlurmtrainError: The runs cannot be read.
    """
    began = time.monotonic()
    families = Families()
    families["build_info"].add(1.0, version=__version__)
    observed = observe(workspace)
    index = observed.runs.index
    # First, since it finds the places by which runs are counted below.
    problem = counters.update(workspace, index)
    families.add_states(Counter((row.state, counters.place_of(run_id)) for run_id, row in index.items()))
    families.add_totals(counters.totals)
    if index and not workspace.store.in_memory:  # what was sent is only in the file
        recent = set(list(index)[-_RECENT:]) | {run_id for run_id, row in index.items() if not row.settled}
        behind = sum(listed.mirrored is False for listed in observed.runs.fetch(recent).values())
        families["tracker_unsent_runs"].add(behind)
        # A tracker with no failing run has 0, so that an alert ends.
        failing: dict[str, int] = {}
        for sent in workspace.store.sent(recent).values():
            for tracker, each in sent.items():
                failing[tracker] = failing.get(tracker, 0) + bool(each.problem)
        for tracker, count in failing.items():
            families["tracker_failing_runs"].add(count, tracker=tracker)
        # It takes a lock to send something, which writes to its file.
        with contextlib.suppress(OSError):
            families["tracker_sent_timestamp_seconds"].add(workspace.root.tracking_lock.stat().st_mtime)
    # Where Slurm was not asked, nothing is known of it.
    if observed.problems or workspace.scheduler.answered_at is not None:
        families["scheduler_up"].add(float(not observed.problems))
    # Runs that have ended have no series of their own: there would be more with each run.
    if per_run:
        for listed in observed.runs.fetch([run_id for run_id, row in index.items() if not row.ended]).values():
            families.add_run(RunRecord(workspace, listed), counters.place_of(listed.id))
    families["collection_timestamp_seconds"].add(time.time())
    families["collection_duration_seconds"].add(time.monotonic() - began)
    return Collection(tuple(families), (*observed.warnings(), *filter(None, [problem])))
