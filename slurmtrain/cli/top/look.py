"""One look at all runs, for the page: only what may have changed is read again."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from slurmtrain.cli.top.rows import Row, aged, make_row
from slurmtrain.errors import SlurmtrainError
from slurmtrain.ops.shared.observe import Observed, observe
from slurmtrain.ops.shared.views import run_json
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.system.files import describe_os_error

if TYPE_CHECKING:
    from slurmtrain.config import Config
    from slurmtrain.registry.choice.index import IndexRow
    from slurmtrain.registry.choice.listed import Listed

# A registry that failed is tried again after this many seconds; meanwhile the run directories are read instead.
_REGISTRY_AGAIN_S = 60.0
# What was done about a damaged registry is shown for so many seconds.
_NOTE_S = 60.0


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All runs at one time.

    ``rows``: by id, oldest first. ``slurm_at``: when squeue last answered, in seconds since 1970; None: it has not, or
    was not asked. ``problems``: what could not be asked or read, in sentences. ``read``: how many runs were read.
    """

    rows: Mapping[str, Row] = field(default_factory=dict)
    slurm_at: float | None = None
    problems: tuple[str, ...] = ()
    read: int = 0


@dataclass(frozen=True, slots=True)
class _Cached:
    """A run as it was last read."""

    index: IndexRow
    listed: Listed
    row: Row


class Looker:
    """Looks again and again, and asks Slurm no more often than ``slurm_interval`` allows."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._cache: dict[str, _Cached] = {}
        self._last = Snapshot()
        # When each was made.
        self._notes: dict[str, float] = {}
        self._open()

    def look(self) -> Snapshot:
        """All runs as they are now; if that fails, as they were, with the reason. Never raises."""
        self._notes = {note: at for note, at in self._notes.items() if time.monotonic() - at < _NOTE_S}
        try:
            if self._is_registry_due():
                self._open()
            observed = observe(self._workspace)
            read = self._read(observed)
        except Exception as error:  # noqa: BLE001 (a page that shows a bug is of more use than none)
            self._last = replace(self._last, problems=(describe(error), *self._warnings), read=0)
            return self._last
        rows = {run_id: cached.row for run_id, cached in self._cache.items()}
        unreadable = [f"run {run_id} is unreadable: {reason}" for run_id, reason in observed.unreadable.items()]
        problems = (*observed.problems, *unreadable, *self._warnings, *self._notes)
        self._last = Snapshot(rows, self._slurm_at(), problems, read)
        return self._last

    def _is_registry_due(self) -> bool:
        # Before any run is known there may be no registry, and nothing to make one for.
        over = time.monotonic() - self._opened_at > _REGISTRY_AGAIN_S
        return bool(self._cache) and over and self._workspace.store.in_memory

    def _open(self) -> None:
        """Open the registry, maybe again. What the workspace warns about, such as a registry that fails, lasts."""
        self._warnings: list[str] = []
        self._workspace = Workspace(self._config, looks_again=True, warn=self._warnings.append, note=self._note)
        self._opened_at = time.monotonic()

    def _note(self, text: str) -> None:
        self._notes[text] = time.monotonic()

    def _read(self, observed: Observed) -> int:
        """Read the runs that may have changed; returns how many."""
        index = observed.runs.index
        changed = [run_id for run_id, row in index.items() if not (row.settled and self._is_cached(run_id, row))]
        listed = observed.runs.fetch(changed)
        fresh = {run_id: self._take_in(index[run_id], each) for run_id, each in listed.items()}
        cached = {run_id: fresh.get(run_id) or self._cache.get(run_id) for run_id in index}
        self._cache = {run_id: replace(each, row=aged(each.row)) for run_id, each in cached.items() if each is not None}
        return len(changed)

    def _is_cached(self, run_id: str, row: IndexRow) -> bool:
        return run_id in self._cache and self._cache[run_id].index == row

    def _take_in(self, index: IndexRow, listed: Listed) -> _Cached:
        """A run with its row, which stays the same object as long as nothing about the run has changed."""
        before = self._cache.get(listed.id)
        if before is not None and before.listed.row == listed.row and before.listed.live == listed.live:
            return replace(before, index=index)
        return _Cached(index, listed, make_row(run_json(self._workspace, listed)))

    def _slurm_at(self) -> float | None:
        return self._workspace.scheduler.answered_at


def describe(error: BaseException) -> str:
    """An error as a sentence."""
    if isinstance(error, SlurmtrainError):
        return str(error)
    if isinstance(error, OSError):
        return describe_os_error(error)
    return f"{type(error).__name__}: {error}"
