"""Sums over all runs that never fall, for Prometheus.

Prometheus takes a counter that falls, since runs are deleted or the registry is rebuilt, for one that began again at 0,
and counts all of it once more. What each run has added is therefore kept in a file of the runs root, a line for each
change. The largest value of each sum counts: lines may be repeated, and two processes may write them.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from slurmtrain.errors import PathError
from slurmtrain.model.diagnosis.node_load import ENERGY
from slurmtrain.model.run.accounting import GPU_J, Placement, Tally, merged, place_of, tally
from slurmtrain.model.run.run import Run
from slurmtrain.ops.shared.node_use import load_files, newest_sample
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.registry.queries import IndexRow
from slurmtrain.system.files import describe_os_error, write_atomically
from slurmtrain.system.locks import locked
from slurmtrain.system.owned_files import open_checked, read_checked

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
        lines = [b""]  # ends a line whose writer was killed
        for run_id in run_ids:
            counted = self._runs[run_id]
            sums = [[*place, values] for place, values in counted.sums.items()]
            record = {"run": run_id, "place": list(counted.place), "sums": sums, "scanned": counted.scanned}
            lines.append(json.dumps(record).encode())
        return b"\n".join([*lines, b""])


def energy_of_run(workspace: Workspace, run: Run) -> dict[Placement, float]:
    """The joules that the GPUs of a run have taken in all of its attempts, by where these were; none are left out.

    Args:
        workspace: Where the run is.
        run: The run.
    """
    directory = workspace.root.run(run.id)
    result: dict[Placement, float] = {}
    for attempt in run.attempts:
        # Nodes count up within an attempt, so that the last line has all of it.
        newest = map(newest_sample, load_files(directory.attempt(attempt.job_id, attempt.restart)))
        joules = sum(sum(sample.of_gpus(ENERGY).values()) for sample in newest if sample is not None)
        if joules:
            place = place_of(run, attempt)
            # Runs that share GPUs have each noted all of these.
            result[place] = result.get(place, 0.0) + joules / (attempt.pack if attempt.share_gpu else 1)
    return result
