"""Comparing the files of checkpoints with their manifests."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
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
from slurmtrain.runtime.checkpoint.formats.untrusted_files import list_tree
from slurmtrain.system.files import describe_os_error
from slurmtrain.system.journal import Journal

# Files are hashed in parallel: one reader gets little from a parallel file system. But login nodes are shared.
_THREADS = min(4, os.cpu_count() or 1)

ShowProgress = Callable[[int, int], None]
"""Called with the number of bytes compared so far, and the total."""


@dataclass(frozen=True, slots=True)
class Checked:
    """The result for one checkpoint.

    ``result``: ``good``; ``bad``; ``aside``: a run found it damaged earlier, and moved it aside; ``gone``: it was
    deleted, renamed or saved again meanwhile. ``reason`` explains all but good ones.
    """

    path: Path
    step: int | None
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
    if own is not None:
        chosen = choose_own(run, own, step, to="verify")
        return _verify_own(workspace, run, list(reversed(chosen)), hashes=hashes, show=show)
    paths = choose_checkpoints(workspace, run, step, to="verify")
    results = (
        [_aside(workspace, run, path) for path in checkpoint_files.damaged(directory.checkpoints)]
        if step is None
        else []
    )
    problems: list[str] = []
    with workspace.journal(directory, "verify") as journal, _Verifier(hashes, show) as verifier:
        # All are begun before the first result is waited for, so that the threads always have work.
        for pending in [verifier.begin(path) for path in paths]:
            checked = pending()
            results.append(checked)
            problems = _note(journal, checked, checkpoint_files.relative_path(checked.path), hashes=hashes) or problems
    return Verified(run, hashes, sorted(results, key=lambda checked: (checked.step or 0, checked.path.name)), problems)


def _note(journal: Journal, checked: Checked, path: str, *, hashes: bool) -> list[str]:
    """Journal the result for the checkpoint at ``path``; returns the problem with that, if there is one."""
    # A checkpoint does not count as verified if only its sizes were compared.
    if checked.result == "bad" or (checked.result == "good" and hashes):
        try:
            journal.write(CheckpointVerified(path=path, step=checked.step, reason=checked.reason))
        except OSError as error:
            return [f"the results cannot be journaled in {journal.path.parent}: {describe_os_error(error)}"]
    return []


def _verify_own(
    workspace: Workspace, run: Run, own: Sequence[ExternalCheckpoint], *, hashes: bool, show: ShowProgress
) -> Verified:
    """Verify checkpoints that a script saved by itself, the oldest first."""
    results: list[Checked] = []
    problems: list[str] = []
    total_bytes, compared_bytes = sum(each.bytes for each in own), 0
    with workspace.journal(workspace.root.run(run.id), "verify") as journal:
        for each in own:
            checked = _check_own(each, hashes=hashes)
            results.append(checked)
            problems = _note(journal, checked, str(each.path), hashes=hashes) or problems
            compared_bytes += each.bytes
            show(compared_bytes, total_bytes)
    return Verified(run, hashes, results, problems)


def _check_own(checkpoint: ExternalCheckpoint, *, hashes: bool) -> Checked:
    path, step, size = checkpoint.path, checkpoint.step, checkpoint.bytes
    try:
        reason = checkpoint.problem or ("; ".join(find_damage(list_tree(path))) if hashes else "")
    except FileNotFoundError:
        return Checked(path, step, size, "gone", "it was deleted, renamed or saved again meanwhile")
    except OSError as error:
        reason = f"it cannot be read: {describe_os_error(error)}"
    return Checked(path, step, size, "bad", reason) if reason else Checked(path, step, size, "good")


def verify_checkpoint(path: Path, show: ShowProgress) -> Checked:
    """Compare the files of one checkpoint with the sizes and hashes of its manifest; ``show`` gets the progress."""
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
            return partial(_summarize, path, None, [str(error)])
        self._total_bytes += manifest.bytes
        # The largest first, so that no thread starts on one after the others have ended.
        names = sorted(manifest.files, key=lambda name: -manifest.files[name][0])
        futures = [self._pool.submit(self._check, path, manifest, name) for name in names]

        def result() -> Checked:
            problems = []
            for future in futures:
                size, problem = future.result()
                problems += [problem] if problem else []
                self._compared_bytes += size
                self._show(self._compared_bytes, self._total_bytes)
            return _summarize(path, manifest, problems)

        return result

    def _check(self, path: Path, manifest: checkpoint_files.Manifest, name: str) -> tuple[int, str]:
        try:
            checkpoint_files.verify_files(path, manifest, [name], hashes=self._hashes)
        except CheckpointError as error:
            return manifest.files[name][0], str(error)
        return manifest.files[name][0], ""


def _summarize(path: Path, manifest: checkpoint_files.Manifest | None, problems: Sequence[str]) -> Checked:
    """The result for a checkpoint whose files were compared. ``manifest``: None if it cannot be read."""
    step = checkpoint_step(path.name)
    assert step is not None
    size = manifest.bytes if manifest else checkpoint_files.bytes_of(path)
    if not problems:
        return Checked(path, step, size, "good")
    if _is_another(path, manifest):
        return Checked(path, step, size, "gone", "it was deleted, renamed or saved again meanwhile")
    return Checked(path, step, size, "bad", "; ".join(problems))


def _is_another(path: Path, manifest: checkpoint_files.Manifest | None) -> bool:
    """Whether the path now has another checkpoint, or none: a training run deletes and replaces them."""
    if not (path / MANIFEST).exists():
        return True
    try:
        return manifest is not None and checkpoint_files.read_manifest(path) != manifest
    except CheckpointError:
        return False


def _aside(workspace: Workspace, run: Run, path: Path) -> Checked:
    """The result for a checkpoint that was moved aside, with the reason that was journaled then."""
    step = damaged_step(path.name)
    assert step is not None
    rejected = workspace.store.events(run.id, CheckpointRejected)
    moved = [event for event in rejected if event.payload.aside == checkpoint_files.relative_path(path)]
    newest = max(moved, key=lambda event: event.order, default=None)
    return Checked(path, step, checkpoint_files.bytes_of(path), "aside", newest.payload.reason if newest else None)
