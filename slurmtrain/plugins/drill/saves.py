"""The checkpoints that a run's script saves itself, as seen from outside while it trains."""

from __future__ import annotations

import contextlib
import glob
import os
from collections.abc import Collection, Iterable, Iterator, Sequence
from operator import attrgetter
from pathlib import Path

from slurmtrain.model.run.file_names import staged_step
from slurmtrain.plugins.drill.facts import OwnCheckpoint
from slurmtrain.runtime.checkpoint.external import Search, find_checkpoints
from slurmtrain.runtime.checkpoint.formats.lookup import OTHER

# How much of a directory of checkpoints is looked at, in search of a save that has begun.
_DEPTH = 3
_ENTRIES = 5000
# Names that scripts give to unfinished files begin or end like this.
_TEMPORARY_START = (".", "tmp", "_tmp")
_TEMPORARY_END = (".tmp", ".temp", ".part", ".partial", ".incomplete", "~")

# Sizes in bytes and times of change in ns, by path.
_Listing = dict[str, tuple[int, int]]


class OwnCheckpoints:
    """All complete checkpoints that have been there at any look: a script may delete its older ones."""

    def __init__(self, search: Search | None) -> None:
        """``search``: where they are; None: there are no checkpoints of its own."""
        self._search = search
        self._saves: dict[tuple[str, float], OwnCheckpoint] = {}

    @property
    def saves(self) -> list[OwnCheckpoint]:
        """The checkpoints seen so far, the oldest first; a path that was saved to repeatedly is there repeatedly."""
        # Times of files are as coarse as the kernel's ticks: of two saves within a tick the higher step is newer.
        return sorted(self._saves.values(), key=lambda save: (save.saved_at, -1 if save.step is None else save.step))

    def look(self) -> None:
        """Take note of what is there now."""
        if self._search is None:
            return
        for checkpoint in filter(attrgetter("complete"), find_checkpoints(self._search)):
            save = OwnCheckpoint(str(checkpoint.path), checkpoint.step, checkpoint.saved_at, checkpoint.format)
            self._saves[save.path, save.saved_at] = save

    def incomplete(self) -> list[str]:
        """What is there now and is not complete, each with the reason, as phrases."""
        if self._search is None:
            return []
        return [
            f"{each.path.name} is not complete: {each.problem}"
            for each in find_checkpoints(self._search)
            if each.problem
        ]


class SaveWatch:
    """Notices that a save is under way, in the directory of a run's checkpoints."""

    def __init__(self, search: Search | None, checkpoints: Path) -> None:
        """``search``: where the script's own checkpoints are, if any; ``checkpoints``: the directory of the run's."""
        self._search = search
        self._base = checkpoints if search is None else _fixed_part(search.pattern)
        self._before = self._list()

    def half_written(self, pids: Iterable[int] = ()) -> list[str]:
        """Checkpoints, and what has a temporary name, that have changed since the last call and are not complete.

        A checkpoint is not complete while one of the processes ``pids``, on this machine, has a file of it open for
        writing.
        """
        now = self._list()
        changed = [path for path, entry in now.items() if self._before.get(path) != entry]
        self._before = now
        if not changed:
            return []
        unfinished = {*filter(_is_temporary, now), *self._unfinished(_written_by(pids))}
        return sorted(path for path in unfinished if any(_is_within(each, path) for each in changed))

    def still_half_written(self, paths: Sequence[str]) -> list[str]:
        """The ``paths``, half-written when their writers were killed, that had not been finished before."""
        # Nothing in a file of an unknown format says that there was more to come.
        unfinished = self._unfinished(paths, only_unknown=True)
        return [path for path in paths if Path(path).exists() and (_is_temporary(path) or path in unfinished)]

    def _unfinished(self, written: Collection[str], *, only_unknown: bool = False) -> list[str]:
        """The script's checkpoints that are not complete, or with a file that is in ``written``.

        ``only_unknown``: the latter only if their format is unknown.
        """
        return [
            str(each.path)
            for each in (find_checkpoints(self._search) if self._search is not None else ())
            if not each.complete
            or (
                (each.format == OTHER.NAME or not only_unknown)
                and any(_is_within(path, str(each.path)) for path in written)
            )
        ]

    def _list(self) -> _Listing:
        return dict(_walk(str(self._base), _DEPTH, [_ENTRIES]))


def _fixed_part(pattern: str) -> Path:
    """The directory that everything which matches an absolute ``pattern`` is below."""
    parts = Path(pattern).parts
    magic = next((index for index, part in enumerate(parts) if glob.has_magic(part)), len(parts) - 1)
    return Path(*parts[:magic])


def _walk(directory: str, depth: int, left: list[int]) -> Iterator[tuple[str, tuple[int, int]]]:
    """Files and directories below ``directory``; ``left``: how many more entries to look at."""
    with contextlib.suppress(OSError), os.scandir(directory) as entries:
        for entry in entries:
            left[0] -= 1
            if left[0] < 0:
                return
            with contextlib.suppress(OSError):
                status = entry.stat(follow_symlinks=False)
                yield entry.path, (status.st_size, status.st_mtime_ns)
                if depth > 1 and entry.is_dir(follow_symlinks=False):
                    yield from _walk(entry.path, depth - 1, left)


def _is_temporary(path: str) -> bool:
    name = path.rpartition("/")[2]
    return staged_step(name) is not None or name.startswith(_TEMPORARY_START) or name.endswith(_TEMPORARY_END)


def _written_by(pids: Iterable[int]) -> set[str]:
    """Files that these processes have open for writing."""
    # Imported here, since it takes 15 ms and most commands do not need it.
    import psutil

    paths = set()
    for pid in pids:
        with contextlib.suppress(psutil.Error, OSError):
            paths |= {file.path for file in psutil.Process(pid).open_files() if file.mode != "r"}
    return paths


def _is_within(path: str, directory: str) -> bool:
    return path == directory or path.startswith(f"{directory}/")
