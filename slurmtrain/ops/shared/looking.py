"""Looking at all runs again and again, for pages that stay open: only what may have changed is read each time."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Generic, TypeVar

from slurmtrain.errors import SlurmtrainError
from slurmtrain.ops.shared.observe import Observed, observe
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.system.files import describe_os_error

if TYPE_CHECKING:
    from slurmtrain.config import Config
    from slurmtrain.registry.queries import IndexRow
    from slurmtrain.registry.rows import Listed

T = TypeVar("T")
Make = Callable[[Workspace, "Listed", "IndexRow"], T]
"""A function that makes what a page keeps of a run."""

# A registry that failed is tried again after this many seconds; meanwhile the run directories are read instead.
_REGISTRY_AGAIN_S = 60.0
# What was done about a damaged registry is shown for so many seconds.
_NOTE_S = 60.0


@dataclass(frozen=True, slots=True)
class Look(Generic[T]):
    """All runs at one time.

    ``runs``: what the page keeps of each, by id, oldest first; the same object as long as nothing about the run has
    changed. ``slurm_at``: when squeue last answered, in seconds since 1970; None: it has not, or was not asked.
    ``problems``: what could not be asked or read, in sentences. ``read``: the ids of the runs that were read, and
    ``index`` what is known of all. ``observed``: the observation; None: there was none, or it failed.
    """

    runs: Mapping[str, T] = field(default_factory=dict)
    slurm_at: float | None = None
    problems: tuple[str, ...] = ()
    read: Sequence[str] = ()
    index: Mapping[str, IndexRow] = field(default_factory=dict)
    observed: Observed | None = None


@dataclass(frozen=True, slots=True)
class _KeptRun(Generic[T]):
    """A run as it was last read."""

    index: IndexRow
    listed: Listed
    made: T


class Looker(Generic[T]):
    """Looks again and again, and asks Slurm no more often than ``slurm_interval`` allows.

    All looks are to be made in one thread: a registry is not shared between threads.
    """

    def __init__(self, config: Config, make: Make[T], patience_s: float | None = None) -> None:
        """Nothing has been looked at.

        Args:
            config: The runs root.
            make: Makes what is kept of a run, each time that it has changed.
            patience_s: How long Slurm may take to answer; None: as long as needed.
        """
        self._patience_s = patience_s
        self._config = config
        self._make = make
        self._kept: dict[str, _KeptRun[T]] = {}
        self._last: Look[T] = Look()
        # When each was made.
        self._notes: dict[str, float] = {}
        self._open()

    def look(self) -> Look[T]:
        """All runs as they are now; if that fails, as they were, with the reason. Never raises."""
        self._notes = {note: at for note, at in self._notes.items() if time.monotonic() - at < _NOTE_S}
        try:
            # Before any run is known there may be no registry, and nothing to make one for.
            over = time.monotonic() - self._opened_at > _REGISTRY_AGAIN_S
            if self._kept and over and self.workspace.store.in_memory:
                self.workspace.close()
                self._open()
            observed = observe(self.workspace)
            read = self._read_changed(observed)
        except Exception as error:  # noqa: BLE001 (a page that shows a bug is of more use than none)
            problems = (describe_exception(error), *self._warnings)
            self._last = replace(self._last, problems=problems, read=(), observed=None)
            return self._last
        runs = {run_id: kept.made for run_id, kept in self._kept.items()}
        unreadable = [f"run {run_id} is unreadable: {reason}" for run_id, reason in observed.unreadable.items()]
        problems = (*observed.problems, *unreadable, *self._warnings, *self._notes)
        answered_at = self.workspace.scheduler.answered_at
        self._last = Look(runs, answered_at, problems, read, observed.runs.index, observed)
        return self._last

    def _open(self) -> None:
        """Open the registry, maybe again. What the workspace warns about, such as a registry that fails, lasts."""
        self._warnings: list[str] = []
        self.workspace = Workspace(self._config, looks_again=True, warn=self._warnings.append, note=self._note)
        self.workspace.patience_s = self._patience_s
        self._opened_at = time.monotonic()

    def _note(self, text: str) -> None:
        self._notes[text] = time.monotonic()

    def _read_changed(self, observed: Observed) -> list[str]:
        """Read the runs that may have changed; returns their ids."""
        index, kept = observed.runs.index, self._kept
        due = [
            run_id
            for run_id, row in index.items()
            if not (row.settled and run_id in kept and kept[run_id].index == row)
        ]
        for run_id, listed in observed.runs.fetch(due).items():
            before = kept.get(run_id)
            if before is not None and before.listed.row == listed.row and before.listed.live == listed.live:
                kept[run_id] = replace(before, index=index[run_id])
            else:
                kept[run_id] = _KeptRun(index[run_id], listed, self._make(self.workspace, listed, index[run_id]))
        self._kept = {run_id: kept[run_id] for run_id in index if run_id in kept}
        return due


def describe_exception(error: BaseException) -> str:
    """An error as a sentence."""
    if isinstance(error, SlurmtrainError):
        return str(error)
    if isinstance(error, OSError):
        return describe_os_error(error)
    return f"{type(error).__name__}: {error}"
