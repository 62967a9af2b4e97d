"""Where the files of all runs are, and files that no single run owns. Paths are computed, never accessed."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from slurmtrain.model.run.layout import SLOTS, SNAPSHOTS, FixedPath, RunDir, SnapshotDir

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

    mlflow_db = FixedPath("mlflow.db")
    """The database of the MLflow store next to the runs."""

    @property
    def mlflow_uri(self) -> str:
        """What records and messages call the MLflow store next to the runs."""
        return f"sqlite:///{self.mlflow_db}"

    mlflow_artifacts = FixedPath("mlartifacts")
    """Where that store keeps its artifacts."""
    mlflow_sweeps = FixedPath(".mlflow-sweeps")
    """Which MLflow runs are the parents of sweeps."""
    registry = FixedPath("registry.db")
    """The database that caches what commands have read about the runs, unless configured elsewhere."""
    scheduler_cache = FixedPath(".squeue.json")
    """Slurm's last answer, shared by commands that poll."""
    histories = FixedPath(".histories")
    """What the metrics files of runs hold, in columns: a cache, made by commands that read whole curves."""

    def history(self, run_id: str) -> Path:
        """The history of one run."""
        return self.histories / f"{run_id}.columns"

    nodes = FixedPath("nodes")
    """Journals of commands about the cluster's nodes."""
    keys = FixedPath("keys")
    """What was submitted with which idempotency key."""

    def submission_key(self, key: str) -> Path:
        """What was submitted with this idempotency key, which may be any text."""
        return self.keys / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"

    counters = FixedPath("counters.jsonl")
    """What each run, also a deleted one, has added to Prometheus' counters."""
    counters_lock = FixedPath(".counters.lock")
    """Held while these are read and written."""

    def name_lock(self, name: str) -> Path:
        """Held by the command that creates runs of this name, if only one of them may be active at a time."""
        return self.path / f".name-{hashlib.sha256(name.encode()).hexdigest()[:32]}.lock"

    tracking_lock = FixedPath(".mlflow.lock")
    """Held by the command that sends runs to trackers."""
    watch_lock = FixedPath(".watch.lock")
    """Held by the process that watches these runs, and identifies it."""
    settled_check = FixedPath(".settled-check")
    """Its time is that at which all runs that have settled were last looked at, where there are many."""
    settled_files_check = FixedPath(".settled-files-check")
    """The same for the size of each of their files."""
    snapshots = FixedPath(SNAPSHOTS)
    """The code of the runs, each state of it once, and the hashes of files that have not changed since."""

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

    arrays = FixedPath("arrays")
    """The directories of job arrays, by their ids."""

    def array(self, array_id: str) -> ArrayDir:
        """The directory of a job array."""
        return ArrayDir(self.arrays / array_id)

    searches = FixedPath("searches")
    """What searches were submitted with, until all of their runs are."""

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

    submitit = FixedPath("submitit")
    """The batch script and the pickle of all elements."""
    elements = FixedPath("elements")
    """A link for each element to the :class:`SubmissionDir` of its run, named by its index.

    An element that is the job of a pack has a link for each of its runs, ``<index>.<slot>``.
    """

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


# Crockford's base 32 in lower case: no i, l, o or u, which are easily misread.
ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"
EPOCH_MS = 1_577_836_800_000  # 2020-01-01T00:00:00Z
_TIME_DIGITS = 8  # 40 bits of milliseconds: until 2054
_RANDOM_DIGITS = 2
RUN_ID = re.compile(f"[{ALPHABET}]{{{_TIME_DIGITS + _RANDOM_DIGITS}}}")


def base32(value: int, digits: int) -> str:
    """``value`` in Crockford's base 32, with leading zeros."""
    return "".join(ALPHABET[value >> (5 * place) & 31] for place in reversed(range(digits)))


def run_id(now_ms: int, random_bits: int) -> str:
    """An id that sorts by ``now_ms`` (milliseconds since 1970); ``random_bits`` distinguish ids of one millisecond.

    Uniqueness is not guaranteed: the code that creates the run directory tries another id if it already exists.
    """
    return base32(max(0, now_ms - EPOCH_MS), _TIME_DIGITS) + base32(random_bits, _RANDOM_DIGITS)


def created_ms(name: str) -> int:
    """The time in a run's id, in milliseconds since 1970. Raises ValueError for other names."""
    value = 0
    for digit in name[:_TIME_DIGITS]:
        value = value << 5 | ALPHABET.index(digit)
    return value + EPOCH_MS
