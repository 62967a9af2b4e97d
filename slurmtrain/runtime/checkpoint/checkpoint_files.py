"""The files of checkpoints: a directory is a checkpoint once it has a manifest, and never before.

    checkpoints/step-<n>/__<r>_0.distcp   what rank r has written, in the format of torch.distributed.checkpoint
                         .metadata        where each tensor, or part of one, is; also in that format
                         MANIFEST.json    written last: sizes and hashes of the other files
    checkpoints/damaged-step-<n>/         a checkpoint that could not be restored, renamed

A checkpoint is built in a temporary directory that belongs to its attempt, and then renamed into place. This module is
used inside and outside jobs, and by processes that must not import torch.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slurmtrain.errors import CheckpointError, PathError, UntrustedPath
from slurmtrain.model.experiment.checkpoint import KeepSpec
from slurmtrain.model.run.layout import (
    MANIFEST,
    RunDir,
    checkpoint_name,
    checkpoint_step,
    damaged_name,
    damaged_step,
    is_trash,
    staged_step,
    staging_name,
    trash_name,
)
from slurmtrain.system.files import FILE_MODE, fsync, fsync_directory, make_directory, read_json, write_json
from slurmtrain.system.owned_files import check_owner, open_readable

if TYPE_CHECKING:
    import xxhash

# Of the manifest: a version of slurmtrain reads no other one, older or newer.
SCHEMA = 2
# Bytes that are read and hashed at a time: a file may be larger than the memory.
_CHUNK = 1 << 22


def new_hasher() -> xxhash.xxh3_128:
    """XXH3-128: as fast as memory; it detects faulty disks, but does not protect against forgery."""
    # Late: agents look for checkpoints, but hash none.
    import xxhash

    return xxhash.xxh3_128()


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a published checkpoint consists of, and how it was made.

    ``files`` maps names to sizes in bytes and XXH3-128 hashes in hex. ``seconds``: from the start of the save until it
    was published; ``stall_s``: how long training was stalled. ``mesh``: the device meshes that its tensors were sharded
    over.
    """

    step: int
    world_size: int
    saved_at: float
    seconds: float
    stall_s: float
    plan_hash: str | None
    attempt: str
    why: str
    files: Mapping[str, tuple[int, str]]
    mesh: Sequence[Mapping[str, Any]] = ()
    versions: Mapping[str, str] = field(default_factory=dict)
    params: Mapping[str, Any] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    objects: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        """The total size of all files except the manifest."""
        return sum(size for size, _ in self.files.values())

    def to_json(self) -> dict[str, Any]:
        """The content of the file, including its own hash."""
        files = {name: {"bytes": size, "xxh3_128": digest} for name, (size, digest) in self.files.items()}
        plain = {"schema": SCHEMA, **asdict(self), "files": files}
        return {**plain, "xxh3_128": _digest(plain)}

    def describe(self, directory: Path) -> dict[str, Any]:
        """The fields of events that describe this checkpoint."""
        return {
            "step": self.step,
            "path": relative_path(directory),
            "bytes": self.bytes,
            "seconds": round(self.seconds, 6),
            "stall_s": round(self.stall_s, 6),
            "saved_at": self.saved_at,
            "why": self.why,
            "metrics": dict(self.metrics),
            "attempt": self.attempt,
        }


def relative_path(directory: Path) -> str:
    """A checkpoint's path relative to its run's directory."""
    return f"{directory.parent.name}/{directory.name}"


def read_manifest(directory: Path) -> Manifest:
    """The manifest of a published checkpoint. Raises CheckpointError if it is missing or cannot be read."""
    try:
        # Whoever can write to it: nobody else can enter the run's directory, and users copy checkpoints with any umask.
        data = read_json(directory / MANIFEST, check=check_owner)
    except PathError as error:
        raise CheckpointError(str(error)) from error
    if data is None:
        raise CheckpointError(f"{directory} has no {MANIFEST}: it was never published")
    schema = data.get("schema")
    if schema != SCHEMA:
        newer = isinstance(schema, int) and schema > SCHEMA
        why = "a newer slurmtrain wrote it" if newer else "it is not slurmtrain's"
        raise CheckpointError(f"{directory / MANIFEST} has schema {schema!r}, but this version reads {SCHEMA}: {why}")
    digest = data.pop("xxh3_128", None)
    if digest != _digest(data) or checkpoint_step(directory.name) not in (None, data.get("step")):
        raise CheckpointError(f"{directory / MANIFEST} has changed since it was written")
    try:
        # Its hash says that the values are what was written.
        listed = {name: (int(file["bytes"]), str(file["xxh3_128"])) for name, file in data["files"].items()}
        for name in listed:
            # It would lead out of the directory.
            if Path(name).name != name or name == MANIFEST:
                raise ValueError(f"{name!r} is not the name of a checkpoint file")
        values = {each.name: data[each.name] for each in fields(Manifest) if each.name != "files"}
        return Manifest(**values, files=listed)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{directory / MANIFEST} is not a manifest ({error!r})") from error


def _digest(plain: Mapping[str, Any]) -> str:
    """The hash of the manifest itself, whose hashes protect everything else."""
    hasher = new_hasher()
    hasher.update(json.dumps(plain, sort_keys=True).encode())
    return hasher.hexdigest()


def published(checkpoints: Path) -> list[Path]:
    """Directories that have a manifest and are not somebody else's, newest step first."""
    checkpoints_by_step = []
    with contextlib.suppress(OSError):
        for entry in os.scandir(checkpoints):
            step = checkpoint_step(entry.name)
            if step is not None:
                with contextlib.suppress(OSError, UntrustedPath):
                    check_owner((checkpoints / entry.name / MANIFEST).stat(), checkpoints / entry.name)
                    checkpoints_by_step.append((step, checkpoints / entry.name))
    return [path for _, path in sorted(checkpoints_by_step, reverse=True)]


def newest_published(checkpoints: Path) -> Path | None:
    """The newest published checkpoint, not yet verified."""
    return next(iter(published(checkpoints)), None)


def damaged(checkpoints: Path) -> list[Path]:
    """Checkpoints that were renamed because they could not be restored."""
    with contextlib.suppress(OSError):
        return sorted(checkpoints / e.name for e in os.scandir(checkpoints) if damaged_step(e.name) is not None)
    return []


def bytes_of(directory: Path) -> int:
    """How many bytes a checkpoint takes, from its manifest, or else from the sizes of its files."""
    with contextlib.suppress(CheckpointError):
        return read_manifest(directory).bytes
    with contextlib.suppress(OSError):
        return sum(entry.stat().st_size for entry in os.scandir(directory) if entry.is_file())
    return 0


# --- verifying --------------------------------------------------------------------------------------------------------


def verify_files(directory: Path, manifest: Manifest, names: Iterable[str], *, hashes: bool = True) -> None:
    """Check the sizes, and with ``hashes`` the contents, of the files called ``names`` in the ``directory``.

    ``manifest``: the expected sizes and hashes. Raises CheckpointError naming the first file that differs, is missing,
    or cannot be read.
    """
    for name in names:
        size, digest = manifest.files[name]
        path = directory / name
        try:
            actual = path.stat().st_size
            if actual != size:
                raise CheckpointError(f"{path} has {actual} bytes, but its manifest says {size}")
            if hashes and hash_file(path) != digest:
                raise CheckpointError(f"{path} has changed since it was written: its hash differs from the manifest's")
        except FileNotFoundError as error:
            raise CheckpointError(f"{path} is missing") from error
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error


def hash_file(path: Path) -> str:
    """The hash of a whole file, in hex. Raises OSError."""
    hasher = new_hasher()
    with open_readable(path) as file:
        while chunk := file.read(_CHUNK):
            hasher.update(chunk)
    return hasher.hexdigest()


def set_aside(directory: Path) -> Path:
    """Rename a damaged checkpoint so that it is never used again. Returns its new path. Raises OSError."""
    step = checkpoint_step(directory.name)
    assert step is not None
    number = 0
    # The same step may have been damaged before, in an earlier attempt.
    while (aside := directory.with_name(damaged_name(step, number))).exists():
        number += 1
    directory.rename(aside)
    fsync_directory(directory.parent)
    return aside


# --- publishing -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Staging:
    """Where the ranks of one attempt build a checkpoint."""

    checkpoints: Path
    attempt: str
    step: int

    @property
    def path(self) -> Path:
        """The temporary directory."""
        return self.checkpoints / staging_name(self.attempt, self.step)

    def publish(self, manifest: Manifest) -> Path:
        """Write the manifest and rename the directory into place. Returns its new path. Raises OSError.

        The other files must already be durable. A directory with a manifest is complete: if this process is killed
        after writing it, :func:`sweep` publishes the checkpoint.
        """
        # The names of the other files must be durable before the manifest, which says that they are there.
        fsync_directory(self.path)
        write_json(self.path / MANIFEST, manifest.to_json())
        target = self.checkpoints / checkpoint_name(self.step)
        # A run restarted from the beginning reaches the same step again. A directory can only replace an empty one.
        replaced = _to_trash(target) if target.exists() else None
        renamed = False
        try:
            self.path.rename(target)
            renamed = True
            fsync_directory(self.checkpoints)
        except OSError:
            with contextlib.suppress(OSError):
                # Otherwise the target, if any, comes from another attempt, whose sweep renamed it into place.
                if renamed:
                    target.rename(self.path)
                if replaced is not None:
                    replaced.rename(target)
            raise
        if replaced is not None:
            shutil.rmtree(replaced, ignore_errors=True)
        return target

    def discard(self) -> None:
        """Remove what has been written so far."""
        shutil.rmtree(self.path, ignore_errors=True)

    def finish(self) -> Path:
        """Finish publishing after the publisher was killed. Returns the path of the published checkpoint, if any.

        A complete checkpoint is renamed into place; an incomplete one is removed.
        """
        _finish_staged(self.path)
        return self.checkpoints / checkpoint_name(self.step)


# --- deleting ---------------------------------------------------------------------------------------------------------


def delete_checkpoint(directory: Path) -> None:
    """Delete a checkpoint so that it is either whole or gone.

    Raises OSError; FileNotFoundError if another process has already deleted it.
    """
    trash = _to_trash(directory)
    # Before anything in it goes: after a crash of the machine it is then either whole or trash by its name.
    fsync_directory(directory.parent)
    shutil.rmtree(trash, ignore_errors=True)


def _to_trash(directory: Path) -> Path:
    trash = directory.with_name(trash_name(directory.name))
    # A kill may have left trash of this name, and a directory can only replace an empty one.
    shutil.rmtree(trash, ignore_errors=True)
    directory.rename(trash)
    return trash


def empty_trash(checkpoints: Path) -> None:
    """Finish deletions that were interrupted by a kill."""
    with contextlib.suppress(OSError):
        for entry in list(os.scandir(checkpoints)):
            if is_trash(entry.name):
                shutil.rmtree(entry.path, ignore_errors=True)


def sweep(checkpoints: Path, attempt: str) -> None:
    """Remove what earlier attempts left half-built or half-deleted, and rename complete checkpoints into place.

    What this ``attempt`` is building is left alone.
    """
    with contextlib.suppress(OSError):
        for entry in list(os.scandir(checkpoints)):
            if entry.name.startswith(".") and not entry.name.startswith(f".{attempt}-") and entry.is_dir():
                _finish_staged(checkpoints / entry.name)


def _finish_staged(left: Path) -> None:
    step = staged_step(left.name)
    if step is not None and (left / MANIFEST).exists():
        target = left.with_name(checkpoint_name(step))
        with contextlib.suppress(OSError):
            # Fails if that step is already published, which is just as good: a directory only replaces an empty one.
            left.rename(target)
            fsync_directory(left.parent)
            return
    shutil.rmtree(left, ignore_errors=True)


@dataclass(frozen=True, slots=True)
class Disposable:
    """A checkpoint that may be deleted, and why."""

    path: Path
    step: int
    bytes: int
    why: str


def disposable_checkpoints(checkpoints: Path, keep: KeepSpec) -> list[Disposable]:
    """Checkpoints that may be deleted, least needed first: damaged ones, then the ones that ``keep`` does not retain.

    A checkpoint whose manifest cannot be read counts as having no metrics. Damaged checkpoints are kept until there is
    a newer checkpoint.
    """
    # Late: agents look for checkpoints, but prune none, and these know events of commands.
    from slurmtrain.model.experiment.checkpoint import Saved, disposable_steps

    paths = published(checkpoints)
    if not paths:
        return []
    saved = []
    for path in paths:
        metrics: Mapping[str, float] = {}
        with contextlib.suppress(CheckpointError):
            metrics = read_manifest(path).metrics
        saved.append(Saved(_step_in_path(path), metrics))
    by_step = {_step_in_path(path): path for path in paths}
    newest = max(by_step)
    gone = [
        Disposable(path, step, bytes_of(path), "damaged")
        for path in damaged(checkpoints)
        if (step := damaged_step(path.name)) is not None and step < newest
    ]
    return gone + [
        Disposable(by_step[step], step, bytes_of(by_step[step]), "the policy does not keep it")
        for step in disposable_steps(saved, keep)
    ]


def _step_in_path(path: Path) -> int:
    step = checkpoint_step(path.name)
    assert step is not None
    return step


# --- the checkpoint that a run begins with, which another run has saved -----------------------------------------------
# Files of slurmtrain's checkpoints never change, so the run's own copy consists of hard links: they take no space, and
# the other run's pruning or deletion leaves them alone. Scripts may overwrite their checkpoints' files: these are
# copied.


def start_point(run: RunDir) -> Path | None:
    """The checkpoint of slurmtrain's format that a run begins with; None if there is none."""
    return next(iter(published(run.start)), None)


def link_checkpoint(source: Path, run: RunDir) -> None:
    """Let a run begin with a checkpoint of slurmtrain's format. Its sizes are checked now, its hashes when it is read.

    Args:
        source: the published checkpoint of another run, which may be pruned meanwhile.
        run: a run that has not begun.

    Raises:
        CheckpointError: it is damaged.
        FileNotFoundError: it has been pruned.
        OSError: it cannot be linked or copied.
    """
    manifest = read_manifest(source)
    verify_files(source, manifest, manifest.files, hashes=False)
    place = make_directory(make_directory(run.start, private=True) / source.name, private=True)
    # The manifest last: without it there is no checkpoint.
    for name in (*sorted(manifest.files), MANIFEST):
        _link(source / name, place / name)
    fsync_directory(place)
    fsync_directory(run.start)


def copy_checkpoint(source: Path, run: RunDir) -> None:
    """Let a run begin with a checkpoint that a script has written.

    Args:
        source: a file or directory.
        run: a run that has not begun.

    Raises OSError.
    """
    place = make_directory(run.start, private=True) / source.name
    if source.is_dir():
        shutil.copytree(source, place, symlinks=True)
    else:
        shutil.copy2(source, place)
    fsync_directory(run.start)


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target, follow_symlinks=False)
    except FileNotFoundError:
        raise
    except OSError:
        # Another file system, one without hard links, or somebody else's file (proc(5), protected_hardlinks).
        handle = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE)
        with source.open("rb") as file, os.fdopen(handle, "wb") as copy:
            shutil.copyfileobj(file, copy)
            copy.flush()
            fsync(copy.fileno())
