"""Where the files of all runs are, and files that no single run owns. Paths are computed, never accessed."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from slurmtrain.model.run.ids import RUN_ID
from slurmtrain.model.run.layout import SLOTS, SNAPSHOTS, RunDir, SnapshotDir

# What submitit replaces in the paths of its files, by the ids of a job, an array and a task.
_REPLACED = re.compile("%[jtAa]")
# Slurm replaces %x and the like in the paths of logs, and nothing in one with a backslash; a line of a batch script
# ends at a line break, whatever its quotes.
_MEANT_BY_SLURM = re.compile(r"%|\\|[\x00-\x1f\x7f]")


def unusable_in_root(path: Path, executor: str) -> str | None:
    """Why no runs can be started in a runs root, as a sentence; None: they can.

    Args:
        path: The runs root.
        executor: ``slurm`` or ``local``.
    """
    match = (_MEANT_BY_SLURM if executor == "slurm" else _REPLACED).search(str(path))
    if match is None:
        return None
    why = "Slurm gives it a meaning in the paths of logs" if executor == "slurm" else "submitit replaces it"
    return f"the runs root {str(path)!r} cannot be used: {match[0]!r} in its path, since {why}; use another with --runs"


@dataclass(frozen=True, slots=True)
class RunsRoot:
    """The directory that holds all runs."""

    path: Path

    @property
    def mlflow_db(self) -> Path:
        """The database of the MLflow store next to the runs."""
        return self.path / "mlflow.db"

    @property
    def mlflow_uri(self) -> str:
        """What records and messages call the MLflow store next to the runs."""
        return f"sqlite:///{self.mlflow_db}"

    @property
    def mlflow_artifacts(self) -> Path:
        """Where that store keeps its artifacts."""
        return self.path / "mlartifacts"

    @property
    def mlflow_sweeps(self) -> Path:
        """Which MLflow runs are the parents of sweeps."""
        return self.path / ".mlflow-sweeps"

    @property
    def registry(self) -> Path:
        """The database that caches what commands have read about the runs, unless configured elsewhere."""
        return self.path / "registry.db"

    @property
    def scheduler_cache(self) -> Path:
        """Slurm's last answer, shared by commands that poll."""
        return self.path / ".squeue.json"

    @property
    def histories(self) -> Path:
        """What the metrics files of runs hold, in columns: a cache, made by commands that read whole curves."""
        return self.path / ".histories"

    def history(self, run_id: str) -> Path:
        """The history of one run."""
        return self.histories / f"{run_id}.columns"

    @property
    def nodes(self) -> Path:
        """Journals of commands about the cluster's nodes."""
        return self.path / "nodes"

    @property
    def keys(self) -> Path:
        """What was submitted with which idempotency key."""
        return self.path / "keys"

    def submission_key(self, key: str) -> Path:
        """What was submitted with this idempotency key, which may be any text."""
        return self.keys / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"

    @property
    def counters(self) -> Path:
        """What each run, also a deleted one, has added to Prometheus' counters."""
        return self.path / "counters.jsonl"

    @property
    def counters_lock(self) -> Path:
        """Held while these are read and written."""
        return self.path / ".counters.lock"

    def name_lock(self, name: str) -> Path:
        """Held by the command that creates runs of this name, if only one of them may be active at a time."""
        return self.path / f".name-{hashlib.sha256(name.encode()).hexdigest()[:32]}.lock"

    @property
    def tracking_lock(self) -> Path:
        """Held by the command that sends runs to trackers."""
        return self.path / ".mlflow.lock"

    @property
    def watch_lock(self) -> Path:
        """Held by the process that watches these runs, and identifies it."""
        return self.path / ".watch.lock"

    @property
    def settled_check(self) -> Path:
        """Its time is that at which all runs that have settled were last looked at, where there are many."""
        return self.path / ".settled-check"

    @property
    def settled_files_check(self) -> Path:
        """The same for the size of each of their files."""
        return self.path / ".settled-files-check"

    @property
    def snapshots(self) -> Path:
        """The code of the runs, each state of it once, and the hashes of files that have not changed since."""
        return self.path / SNAPSHOTS

    @property
    def snapshots_lock(self) -> Path:
        """Held while it is decided whether a snapshot is needed."""
        return self.snapshots / ".lock"

    def snapshot(self, name: str) -> SnapshotDir:
        """The snapshot of code with this hash."""
        return SnapshotDir(self.snapshots / name)

    def run(self, run_id: str) -> RunDir:
        """The directory of the run with this id."""
        return RunDir(self.path / run_id)

    @property
    def arrays(self) -> Path:
        """The directories of job arrays, by their ids."""
        return self.path / "arrays"

    def array(self, array_id: str) -> ArrayDir:
        """The directory of a job array."""
        return ArrayDir(self.arrays / array_id)

    @property
    def searches(self) -> Path:
        """What searches were submitted with, until all of their runs are."""
        return self.path / "searches"

    def slots(self, host: str) -> Path:
        """What the runs of sweeps on this machine have locked while they run."""
        return self.path / SLOTS / host

    def unborn(self, run_id: str) -> RunDir:
        """Where a run directory is built before it is renamed into place."""
        return RunDir(self.path / f".new-{run_id}")


@dataclass(frozen=True, slots=True)
class ArrayDir:
    """What the elements of a job array share, ``arrays/<id>``: each element is the job of a run."""

    path: Path

    @property
    def id(self) -> str:
        """Its id, with which the name of the job array ends."""
        return self.path.name

    @property
    def submitit(self) -> Path:
        """The batch script and the pickle of all elements."""
        return self.path / "submitit"

    @property
    def elements(self) -> Path:
        """A link for each element to the :class:`SubmissionDir` of its run, named by its index.

        An element that is the job of a pack has a link for each of its runs, ``<index>.<slot>``.
        """
        return self.path / "elements"

    def element(self, index: int, slot: int | None = None) -> Path:
        """The link of an element; ``slot``: which run of its pack, None if it has a single run."""
        return self.elements / (str(index) if slot is None else f"{index}.{slot}")


def is_run_id(name: str) -> bool:
    """Whether an entry of the runs root is a run."""
    return RUN_ID.fullmatch(name) is not None


def run_ids_among(names: Iterable[str]) -> Iterator[str]:
    """The names among these that are ids of runs."""
    return filter(RUN_ID.fullmatch, names)


def is_unborn(name: str) -> bool:
    """Whether an entry of the runs root is a run directory that was never finished."""
    return name.startswith(".new-") and is_run_id(name.removeprefix(".new-"))
