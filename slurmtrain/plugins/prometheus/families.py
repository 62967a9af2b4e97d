"""Collecting the state of all runs in Prometheus' terms: as ``status`` does, it observes, and starts and ends nothing.

Names follow https://prometheus.io/docs/practices/naming: base units, ``_total`` for counters, ``_ratio`` for shares.
Points in time are exported as such, since an age would be wrong by the time it is scraped; a query subtracts them from
``time()``.

Prometheus takes a counter that falls, since runs are deleted or the registry is rebuilt, for one that began again at 0,
and counts all of it once more. What each run has added is therefore kept in a file of the runs root, a line for each
change. The largest value of each sum counts: lines may be repeated, and two processes may write them.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from slurmtrain.errors import PathError
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
    merged,
    place_of,
    tally,
)
from slurmtrain.model.run.run import CAUSES, RUN_STATES, Checkpoint
from slurmtrain.ops.shared.observe import observe
from slurmtrain.ops.shared.views import SCHEMA, RunRecord
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.plugins.prometheus.gpu_load import energy_of_run, gpus_now
from slurmtrain.registry.queries import IndexRow
from slurmtrain.system.files import describe_os_error, write_atomically
from slurmtrain.system.locks import locked
from slurmtrain.system.owned_files import open_checked, read_checked
from slurmtrain.version import __version__

# So many runs are read at a time: enough for few statements, and little memory.
_BATCH = 1000
# The file is written anew if it has this many lines for each run, and some more.
_LINES_PER_RUN = 3
_SPARE_LINES = 1000


@dataclass(slots=True)
class _Counted:
    """What one run has added, where its newest attempt is or was, and the state of its folders at that time.

    ``scanned``: as :attr:`IndexRow.scanned`; None: the run may still change.
    """

    place: Placement
    sums: Tally = field(default_factory=dict)
    scanned: tuple[int, int] | None = None


class Counters:
    """The sums, and the place of each run."""

    def __init__(self) -> None:
        self._runs: dict[str, _Counted] = {}
        self._totals: Tally = {}
        self._lines = 0
        self._is_loaded = False
        # Runs whose newest sums are not in the file yet.
        self._unkept: dict[str, None] = {}

    @property
    def totals(self) -> Tally:
        """The sums over all runs, by place."""
        return self._totals

    def place_of(self, run_id: str) -> Placement:
        """Where the newest attempt of a run is or was."""
        counted = self._runs.get(run_id)
        return counted.place if counted else Placement("", "")

    def update(self, workspace: Workspace, index: Mapping[str, IndexRow]) -> str:
        """Count what is new, and keep it. Runs that have ended and were counted are not read again.

        Args:
            workspace: Where the runs are.
            index: All of them, as observed.

        Returns:
            Why it could not be kept, as a sentence; empty if it was.
        """
        if not index and not workspace.root.counters.exists():
            # Nothing is made in a directory that may never have held runs.
            return ""
        try:
            with locked(workspace.root.counters_lock):
                if not self._is_loaded:
                    self._load(workspace)
                self._count(workspace, index)
                self._keep(workspace)
        except (OSError, PathError) as error:
            why = describe_os_error(error) if isinstance(error, OSError) else str(error)
            # Nothing could be read: the sums of the present runs, which may fall later, are better than none.
            if not self._is_loaded:
                self._count(workspace, index)
            return f"counters cannot be kept, and may fall later: {why}"
        return ""

    def _load(self, workspace: Workspace) -> None:
        for line in self._read(workspace):
            self._take(line)
        self._is_loaded = True

    def _read(self, workspace: Workspace) -> Iterator[dict[str, Any]]:
        try:
            content = read_checked(workspace.root.counters)
        except FileNotFoundError:
            return
        for line in content.split(b"\n"):
            try:
                record = json.loads(line)
            except ValueError:
                continue  # the last one, whose writer was killed
            if isinstance(record, dict):
                self._lines += 1
                yield record

    def _take(self, record: Mapping[str, Any]) -> None:
        """Take in a line of the file."""
        try:
            place = Placement(*map(str, record["place"]))
            sums = {
                Placement(str(executor), str(partition)): {str(name): float(value) for name, value in values.items()}
                for executor, partition, values in record["sums"]
            }
            # NaN, infinity and what is less than 0 would spoil all other sums.
            if not all(math.isfinite(amount) and amount >= 0 for each in sums.values() for amount in each.values()):
                return
            scanned = tuple(map(int, record["scanned"])) if record.get("scanned") else None
            self._set(str(record["run"]), place, sums, scanned if scanned and len(scanned) == 2 else None)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
            return  # nothing that this version has written

    def _set(self, run_id: str, place: Placement, sums: Tally, scanned: Any) -> bool:
        """Take in what a run has added so far; returns whether that is new."""
        before = self._runs.get(run_id) or _Counted(place)
        now = merged(before.sums, sums)
        is_new = (before.place, before.sums, before.scanned) != (place, now, scanned) or run_id not in self._runs
        # By differences, so that not all runs have to be added up each time.
        for where, values in now.items():
            totals, old = self._totals.setdefault(where, {}), before.sums.get(where, {})
            for name, value in values.items():
                totals[name] = totals.get(name, 0.0) + value - old.get(name, 0.0)
        self._runs[run_id] = _Counted(place, now, scanned)
        return is_new

    def _count(self, workspace: Workspace, index: Mapping[str, IndexRow]) -> None:
        """Read the runs that may have added something."""
        due = []
        for run_id, row in index.items():
            counted = self._runs.get(run_id)
            is_counted = row.settled and counted is not None and counted.scanned == row.scanned
            if not row.unreadable and not is_counted:
                due.append(run_id)
        for begin in range(0, len(due), _BATCH):
            batch = due[begin : begin + _BATCH]
            for run_id, run in workspace.store.load_all(batch).items():
                place = place_of(run, run.newest)
                scanned = index[run_id].scanned if index[run_id].settled else None
                sums = tally(run)
                for where, joules in energy_of_run(workspace, run).items():
                    sums.setdefault(where, {})[GPU_J] = joules
                if self._set(run_id, place, sums, scanned):
                    self._unkept[run_id] = None

    def _keep(self, workspace: Workspace) -> None:
        """Write what is new to the file. Raises OSError, PathError."""
        if not self._unkept:
            return
        if self._lines + len(self._unkept) > _LINES_PER_RUN * len(self._runs) + _SPARE_LINES:
            for record in self._read(workspace):
                self._take(record)  # what another process has counted
            write_atomically(workspace.root.counters, self._lines_of(self._runs))
            self._lines = len(self._runs)
            self._unkept.clear()
            return
        handle = open_checked(workspace.root.counters, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        with os.fdopen(handle, "ab") as file:
            file.write(self._lines_of(self._unkept))
        self._lines += len(self._unkept)
        self._unkept.clear()

    def _lines_of(self, run_ids: Iterable[str]) -> bytes:
        # An empty line before them ends one whose writer was killed.
        return b"\n" + b"".join(json.dumps(self._record(run_id)).encode() + b"\n" for run_id in run_ids)

    def _record(self, run_id: str) -> dict[str, Any]:
        counted = self._runs[run_id]
        sums = [[*place, values] for place, values in counted.sums.items()]
        return {"run": run_id, "place": list(counted.place), "sums": sums, "scanned": counted.scanned}


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
    yield "gpu_energy_joules_total", COUNTER, "Energy that GPUs have taken while they had ranks", _PLACE
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
    yield "run_idle_timestamp_seconds", GAUGE, "Since when it has been idle; absent if it is not", _RUN
    yield "run_gpu_utilization_ratio", GAUGE, "How busy its GPUs were when nodes last looked, on average", _RUN
    yield "run_gpu_memory_bytes", GAUGE, "Memory in use on all of its GPUs together", _RUN
    yield "run_gpu_power_watts", GAUGE, "Power of all of its GPUs together", _RUN


LABELS = frozenset(label for _, _, _, labels in _declared_families() for label in labels)
"""The names of all labels."""


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
