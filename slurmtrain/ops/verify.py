"""Comparing the files of checkpoints with their manifests."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from slurmtrain.errors import CheckpointError
from slurmtrain.model.run.events.checkpoint_events import CheckpointRejected, CheckpointVerified
from slurmtrain.model.run.layout import MANIFEST, checkpoint_step, damaged_step
from slurmtrain.model.run.run import Run
from slurmtrain.ops.shared.observe import observe_run
from slurmtrain.ops.shared.readable_checkpoints import choose_checkpoints, choose_own, find_own
from slurmtrain.ops.shared.views import SCHEMA
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.runtime.checkpoint import checkpoint_files
from slurmtrain.runtime.checkpoint.external import ExternalCheckpoint, find_damage
from slurmtrain.runtime.checkpoint.untrusted_files import list_tree
from slurmtrain.system.files import describe_os_error

# Files are hashed in parallel: one reader gets little from a parallel file system. But login nodes are shared.
_THREADS = min(4, os.cpu_count() or 1)
_CHANGED = "it was deleted, renamed or saved again in the meantime"

ShowProgress = Callable[[int, int], None]
"""Called with the number of bytes compared so far, and the total."""


@dataclass(frozen=True, slots=True)
class Checked:
    """The result for one checkpoint.

    ``result``: ``good``; ``bad``; ``aside``: a run found it damaged earlier, and moved it aside; ``gone``: it was
    deleted, renamed or saved again in the meantime. ``reason`` explains all but good ones.
    """

    path: Path
    step: int | None
    bytes: int
    result: str
    reason: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """CHECKED of the JSON that ``verify`` prints."""
        return {"step": self.step, **asdict(self), "path": str(self.path)}


@dataclass(frozen=True, slots=True)
class Verified:
    """The results for a run's checkpoints, the oldest first. ``hashes``: whether the files were read."""

    run: Run
    hashes: bool
    checked: Sequence[Checked]
    problems: Sequence[str] = ()

    @property
    def bad(self) -> list[Checked]:
        """The checkpoints that differ from their records."""
        return [checked for checked in self.checked if checked.result == "bad"]

    @property
    def all_good(self) -> bool:
        """Whether all that are in place match what was written, and there is at least one."""
        return self.newest is not None and not self.bad

    @property
    def newest(self) -> Checked | None:
        """What the run would continue from, considering only the compared checkpoints; None if none is good."""
        return next((checked for checked in reversed(self.checked) if checked.result == "good"), None)

    @property
    def newest_good(self) -> int | None:
        """Its step; None if none is good, or the step is unknown."""
        return None if self.newest is None else self.newest.step

    def to_dict(self) -> dict[str, Any]:
        """What ``verify --json`` prints."""
        return {
            "schema": SCHEMA,
            "run_id": self.run.id,
            "hashes": self.hashes,
            "checkpoints": [checked.to_dict() for checked in self.checked],
            "newest_good": self.newest_good,
        }


def verify(
    workspace: Workspace,
    run_id: str,
    *,
    step: int | None = None,
    hashes: bool = True,
    show: ShowProgress = lambda *_: None,
) -> Verified:
    """Compare the files of a run's checkpoints with their manifests, and journal the results.

    Checkpoints that a script saved by itself are checked by their formats: whether they are complete and, with
    ``hashes``, the checksums of archives. Nothing is renamed: a run that continues from its checkpoints moves damaged
    ones aside itself.

    Args:
        workspace: where the run is.
        run_id: the run.
        step: the step of the only checkpoint to check; None for all.
        hashes: read the files; otherwise only their sizes are compared.
        show: called with the progress.

    Raises:
        NoCheckpoint: there is none.
    """
    run = observe_run(workspace, run_id, ask_slurm=False)
    directory = workspace.root.run(run_id)
    own = find_own(directory, run)
    results: list[Checked] = []
    problems: list[str] = []
    with _Verifier(hashes, show) as verifier:
        # All are begun before the first result is waited for, so that the threads always have work.
        if own is not None:
            chosen = reversed(choose_own(run, own, step, to="verify"))
            pending = {str(each.path): verifier.begin_own(each) for each in chosen}
        else:
            paths = choose_checkpoints(workspace, run, step, to="verify")
            pending = {checkpoint_files.relative_path(path): verifier.begin(path) for path in paths}
            rejected = workspace.store.events(run.id, CheckpointRejected)
            for place in checkpoint_files.damaged(directory.checkpoints) if step is None else ():
                # With the reason that was journaled when it was moved aside.
                moved = [each for each in rejected if each.payload.aside == checkpoint_files.relative_path(place)]
                newest = max(moved, key=lambda event: event.order, default=None)
                reason, of_step = newest.payload.reason if newest else None, damaged_step(place.name)
                results.append(Checked(place, of_step, checkpoint_files.bytes_of(place), "aside", reason))
        with workspace.journal(directory, "verify") as journal:
            for path, result in pending.items():
                checked = result()
                results.append(checked)
                # A checkpoint does not count as verified if only its sizes were compared.
                if checked.result != "bad" and not (checked.result == "good" and hashes):
                    continue
                try:
                    journal.write(CheckpointVerified(path=path, step=checked.step, reason=checked.reason))
                except OSError as error:
                    where = journal.path.parent
                    problems = [f"the results cannot be recorded in {where}: {describe_os_error(error)}"]
    if own is None:
        results.sort(key=lambda checked: (checked.step or 0, checked.path.name))
    return Verified(run, hashes, results, problems)


def verify_checkpoint(path: Path, show: ShowProgress) -> Checked:
    """Compare the files of one checkpoint with the sizes and hashes of its manifest; ``show`` gets the progress."""
    # With hashes: 'export' must not hand on a damaged model.
    with _Verifier(True, show) as verifier:
        return verifier.begin(path)()


class _Verifier:
    """Compares the files of checkpoints, several at a time."""

    def __init__(self, hashes: bool, show: ShowProgress) -> None:
        self._hashes = hashes
        self._show = show
        self._compared_bytes = self._total_bytes = 0
        self._pool = ThreadPoolExecutor(_THREADS)

    def __enter__(self) -> _Verifier:
        return self

    def __exit__(self, *_: object) -> None:
        # After Ctrl-C, do not wait for files that no thread has begun to read.
        self._pool.shutdown(cancel_futures=True)

    def begin(self, path: Path) -> Callable[[], Checked]:
        """Start comparing a checkpoint's files; returns a function that waits until all are compared."""
        try:
            manifest = checkpoint_files.read_manifest(path)
        except CheckpointError as error:
            return partial(_result_of, path, None, [str(error)])
        self._total_bytes += manifest.bytes
        # The largest first, so that no thread starts on one after the others have ended.
        names = sorted(manifest.files, key=lambda name: -manifest.files[name][0])
        futures = [self._pool.submit(self._check, path, manifest, name) for name in names]

        def result() -> Checked:
            problems = []
            for future in futures:
                size, problem = future.result()
                problems += [problem] if problem else []
                self._note(size)
            return _result_of(path, manifest, problems)

        return result

    def begin_own(self, checkpoint: ExternalCheckpoint) -> Callable[[], Checked]:
        """As :meth:`begin`, for a checkpoint that a script saved by itself."""
        path, step, size = checkpoint.path, checkpoint.step, checkpoint.bytes
        self._total_bytes += size

        def result() -> Checked:
            try:
                reason = checkpoint.problem or ("; ".join(find_damage(list_tree(path))) if self._hashes else "")
            except FileNotFoundError:
                return Checked(path, step, size, "gone", _CHANGED)
            except OSError as error:
                reason = f"it cannot be read: {describe_os_error(error)}"
            finally:
                self._note(size)
            return Checked(path, step, size, "bad" if reason else "good", reason or None)

        return result

    def _note(self, size: int) -> None:
        """So many more bytes are compared."""
        self._compared_bytes += size
        self._show(self._compared_bytes, self._total_bytes)

    def _check(self, path: Path, manifest: checkpoint_files.Manifest, name: str) -> tuple[int, str]:
        try:
            checkpoint_files.verify_files(path, manifest, [name], hashes=self._hashes)
        except CheckpointError as error:
            return manifest.files[name][0], str(error)
        return manifest.files[name][0], ""


def _result_of(path: Path, manifest: checkpoint_files.Manifest | None, problems: Sequence[str]) -> Checked:
    """The result for a checkpoint whose files were compared. ``manifest``: None if it cannot be read."""
    step = checkpoint_step(path.name)
    assert step is not None
    size = manifest.bytes if manifest else checkpoint_files.bytes_of(path)
    if not problems:
        return Checked(path, step, size, "good")
    # A training run deletes and replaces checkpoints: there may be another one now, or none.
    is_gone = not (path / MANIFEST).exists()
    with contextlib.suppress(CheckpointError):
        is_gone = is_gone or (manifest is not None and checkpoint_files.read_manifest(path) != manifest)
    return (
        Checked(path, step, size, "gone", _CHANGED)
        if is_gone
        else Checked(path, step, size, "bad", "; ".join(problems))
    )
