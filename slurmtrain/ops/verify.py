"""Looking whether checkpoints are what was written."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurmtrain.errors import CheckpointError
from slurmtrain.model.run.events.checkpoint import CheckpointVerified
from slurmtrain.model.run.layout import MANIFEST, checkpoint_step, damaged_step
from slurmtrain.model.run.run import Run
from slurmtrain.ops.shared.checkpoints import choose_checkpoints
from slurmtrain.ops.shared.observe import observe_run
from slurmtrain.ops.shared.views import SCHEMA
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.runtime.checkpoint import files
from slurmtrain.system.files import describe_os_error

# Files are hashed side by side: one reader gets little out of a parallel file system. Login nodes are shared, though.
_THREADS = min(4, os.cpu_count() or 1)

Tell = Callable[[int, int], None]
"""Is told how many bytes of how many were looked at."""


@dataclass(frozen=True, slots=True)
class Checked:
    """What was found of one checkpoint.

    ``result``: ``good``; ``bad``; ``aside``: a run has found it damaged before, and put it aside; ``gone``: it was
    deleted, renamed or saved anew while it was looked at. ``reason`` says more of all but good ones.
    """

    path: Path
    step: int
    bytes: int
    result: str
    reason: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """CHECKED of the JSON that ``verify`` prints."""
        return {
            "step": self.step,
            "path": str(self.path),
            "bytes": self.bytes,
            "result": self.result,
            "reason": self.reason,
        }


@dataclass(frozen=True, slots=True)
class Verified:
    """What was found of a run's checkpoints, by step. ``hashes``: whether the files were read, not just their sizes."""

    run: Run
    hashes: bool
    checked: Sequence[Checked]
    problems: Sequence[str] = ()

    @property
    def bad(self) -> list[Checked]:
        return [one for one in self.checked if one.result == "bad"]

    @property
    def all_good(self) -> bool:
        """Whether all that are at their place are what was written, and there is one."""
        return self.newest_good is not None and not self.bad

    @property
    def newest_good(self) -> int | None:
        """The step that a run would go on from, as far as was looked."""
        return max((one.step for one in self.checked if one.result == "good"), default=None)

    def to_dict(self) -> dict[str, Any]:
        """What ``verify --json`` prints."""
        return {
            "schema": SCHEMA,
            "run_id": self.run.id,
            "hashes": self.hashes,
            "checkpoints": [one.to_dict() for one in self.checked],
            "newest_good": self.newest_good,
        }


def verify(
    workspace: Workspace, run_id: str, *, step: int | None = None, hashes: bool = True, tell: Tell = lambda *_: None
) -> Verified:
    """Hold the files of a run's checkpoints, or of the one of a step, against their manifests, and journal the results.

    Nothing is renamed: a run that goes on from its checkpoints puts damaged ones aside itself. Raises NoCheckpoint, and
    NotAvailable for a run whose script brings its own.
    """
    run = observe_run(workspace, run_id, ask_slurm=False)
    directory = workspace.root.run(run_id)
    paths = choose_checkpoints(workspace, run, step, to="verify")
    found = [_aside(workspace, run, path) for path in files.damaged(directory.checkpoints)] if step is None else []
    problems: list[str] = []
    with workspace.journal(directory, "verify") as journal, _Looking(hashes, tell) as looking:
        for look in [looking.begin(path) for path in paths]:
            checked = look.result()
            found.append(checked)
            # Sizes that are right do not make a checkpoint a verified one.
            if checked.result == "bad" or (checked.result == "good" and hashes):
                try:
                    path = files.relative_path(checked.path)
                    journal.write(CheckpointVerified(path=path, step=checked.step, reason=checked.reason))
                except OSError as error:
                    problems = [f"the results cannot be noted in {journal.path.parent}: {describe_os_error(error)}"]
    return Verified(run, hashes, sorted(found, key=lambda one: (one.step, one.path.name)), problems)


def check(path: Path, tell: Tell) -> Checked:
    """Hold the files of one checkpoint against its manifest."""
    with _Looking(True, tell) as looking:
        return looking.begin(path).result()


class _Looking:
    """Looks at the files of checkpoints, several at a time."""

    def __init__(self, hashes: bool, tell: Tell) -> None:
        self._hashes = hashes
        self._tell = tell
        self._done = self._all = 0
        self._pool = ThreadPoolExecutor(_THREADS)

    def __enter__(self) -> _Looking:
        return self

    def __exit__(self, *_: object) -> None:
        # Who has interrupted this does not want to wait for the files that nobody has begun to read.
        self._pool.shutdown(cancel_futures=True)

    def begin(self, path: Path) -> _Look:
        """Begin to look at a checkpoint."""
        try:
            manifest = files.read_manifest(path)
        except CheckpointError as error:
            return _Look(path, None, [str(error)])
        self._all += manifest.bytes
        # The largest first, so that none is begun when the others are done.
        names = sorted(manifest.files, key=lambda name: -manifest.files[name][0])
        futures = [self._pool.submit(self._check, path, manifest, name) for name in names]
        return _Look(path, manifest, [], futures, self._went_on)

    def _check(self, path: Path, manifest: files.Manifest, name: str) -> tuple[int, str]:
        try:
            files.verify(path, manifest, [name], hashes=self._hashes)
        except CheckpointError as error:
            return manifest.files[name][0], str(error)
        return manifest.files[name][0], ""

    def _went_on(self, size: int) -> None:
        self._done += size
        self._tell(self._done, self._all)


@dataclass(slots=True)
class _Look:
    """A look at one checkpoint. ``futures``: of its files, (bytes, what is wrong)."""

    path: Path
    manifest: files.Manifest | None
    wrong: list[str]
    futures: Sequence[Future[tuple[int, str]]] = ()
    went_on: Callable[[int], None] = lambda _: None

    def result(self) -> Checked:
        """Wait until all files were looked at, and sum up."""
        for future in self.futures:
            size, problem = future.result()
            self.wrong += [problem] if problem else []
            self.went_on(size)
        step = checkpoint_step(self.path.name)
        assert step is not None
        size = self.manifest.bytes if self.manifest else files.bytes_of(self.path)
        if not self.wrong:
            return Checked(self.path, step, size, "good")
        if self._is_another():
            return Checked(self.path, step, size, "gone", "it was deleted, renamed or saved anew meanwhile")
        return Checked(self.path, step, size, "bad", "; ".join(self.wrong))

    def _is_another(self) -> bool:
        """Whether what is at this path now is not what was looked at: a run that trains deletes checkpoints."""
        if not (self.path / MANIFEST).exists():
            return True
        try:
            return self.manifest is not None and files.read_manifest(self.path) != self.manifest
        except CheckpointError:
            return False


def _aside(workspace: Workspace, run: Run, path: Path) -> Checked:
    """One that was put aside, with the reason that was journaled then."""
    step = damaged_step(path.name)
    assert step is not None
    told = [e for e in workspace.store.events(run.id, "rejected") if e.data.get("aside") == files.relative_path(path)]
    newest = max(told, key=lambda event: event.order, default=None)
    return Checked(path, step, files.bytes_of(path), "aside", str(newest.data.get("reason")) if newest else None)
