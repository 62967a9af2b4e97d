"""The files of published checkpoints: a directory is a checkpoint once it has a manifest, and never before.

    checkpoints/step-<n>/state.pt        what is the same on all ranks, written by rank 0
                         rank-<r>.pt     what each rank has of its own
                         MANIFEST.json   written last: sizes and hashes of the others

A checkpoint is built in a temporary directory that belongs to its attempt, and renamed into place.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import xxhash

from slurmtrain.errors import CheckpointError, PlaceError
from slurmtrain.model.layout import MANIFEST, checkpoint_name, checkpoint_step, staging_name, trash_name
from slurmtrain.system.files import FILE_MODE, fsync_directory, make_directory, read_json, remove_tree, write_json

SCHEMA = 1
_CHUNK = 1 << 22


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a published checkpoint consists of. ``files`` maps names to their size in bytes and XXH3-128 in hex."""

    step: int
    world_size: int
    saved_at: float
    seconds: float
    plan_hash: str | None
    files: Mapping[str, tuple[int, str]]

    @property
    def bytes(self) -> int:
        return sum(size for size, _ in self.files.values())

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "step": self.step,
            "world_size": self.world_size,
            "saved_at": self.saved_at,
            "seconds": round(self.seconds, 6),
            "plan_hash": self.plan_hash,
            "files": {name: {"bytes": size, "xxh3_128": digest} for name, (size, digest) in self.files.items()},
        }

    def describe(self, directory: Path) -> dict[str, Any]:
        """The fields of events that name this checkpoint."""
        return {
            "step": self.step,
            "path": f"{directory.parent.name}/{directory.name}",
            "bytes": self.bytes,
            "seconds": round(self.seconds, 6),
            "saved_at": self.saved_at,
        }


def read_manifest(directory: Path) -> Manifest:
    """The manifest of a published checkpoint. Raises CheckpointError where there is none that can be read."""
    try:
        data = read_json(directory / MANIFEST)
    except PlaceError as error:
        raise CheckpointError(str(error)) from error
    if data is None:
        raise CheckpointError(f"{directory} has no {MANIFEST}: it was never published")
    if data.get("schema") != SCHEMA:
        raise CheckpointError(f"{directory / MANIFEST} has schema {data.get('schema')!r}, this version reads {SCHEMA}")
    try:
        return Manifest(
            step=int(data["step"]),
            world_size=int(data["world_size"]),
            saved_at=float(data["saved_at"]),
            seconds=float(data["seconds"]),
            plan_hash=data["plan_hash"],
            files={name: (int(file["bytes"]), str(file["xxh3_128"])) for name, file in data["files"].items()},
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{directory / MANIFEST} is not a manifest ({error!r})") from error


def published(checkpoints: Path) -> list[Path]:
    """Directories that have a manifest, newest step first."""
    found = []
    with contextlib.suppress(OSError):
        for entry in os.scandir(checkpoints):
            step = checkpoint_step(entry.name)
            if step is not None and (checkpoints / entry.name / MANIFEST).exists():
                found.append((step, checkpoints / entry.name))
    return [path for _, path in sorted(found, reverse=True)]


def newest_published(checkpoints: Path) -> Path | None:
    """The newest published checkpoint, not yet verified."""
    return next(iter(published(checkpoints)), None)


def verify(directory: Path, manifest: Manifest, names: Iterator[str]) -> None:
    """Check size and hash of these files. Raises CheckpointError that names the first file that differs."""
    for name in names:
        size, digest = manifest.files[name]
        path = directory / name
        try:
            actual = path.stat().st_size
            if actual != size:
                raise CheckpointError(f"{path} has {actual} bytes, its manifest says {size}")
            if _hash(path) != digest:
                raise CheckpointError(f"{path} is not what was written: its hash differs from the manifest's")
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error


def _hash(path: Path) -> str:
    hasher = xxhash.xxh3_128()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            hasher.update(chunk)
    return hasher.hexdigest()


class HashingFile:
    """A file that is being written, hashed as it goes, and durable once closed."""

    def __init__(self, path: Path) -> None:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, FILE_MODE)
        self._file: BinaryIO = os.fdopen(handle, "wb")
        self._hasher = xxhash.xxh3_128()
        self._size = 0
        self.failure: OSError | None = None

    def write(self, data: Any) -> int:
        self._hasher.update(data)
        try:
            written = self._file.write(data)
        except OSError as error:
            self.failure = error
            raise
        self._size += written
        return written

    def flush(self) -> None:
        self._file.flush()

    def __enter__(self) -> HashingFile:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            if kind is None:
                self._file.flush()
                os.fsync(self._file.fileno())
        finally:
            with contextlib.suppress(OSError):
                self._file.close()

    @property
    def result(self) -> tuple[int, str]:
        """Size in bytes and hash of what was written."""
        return self._size, self._hasher.hexdigest()


class Staging:
    """A checkpoint that is being built by the ranks of one attempt."""

    def __init__(self, checkpoints: Path, attempt: str, step: int) -> None:
        self._checkpoints = checkpoints
        self._step = step
        self.path = checkpoints / staging_name(attempt, step)

    def open(self, name: str) -> HashingFile:
        """A file of the checkpoint to write to. Raises OSError or PlaceError."""
        make_directory(self.path)
        return HashingFile(self.path / name)

    def publish(
        self, files: Mapping[str, tuple[int, str]], *, world_size: int, plan_hash: str | None, began: float
    ) -> tuple[Path, Manifest]:
        """Write the manifest and rename into place. ``began``: when the save began, monotonic. Raises OSError."""
        manifest = Manifest(
            step=self._step,
            world_size=world_size,
            saved_at=time.time(),
            seconds=time.monotonic() - began,
            plan_hash=plan_hash,
            files=dict(files),
        )
        write_json(self.path / MANIFEST, manifest.to_json())
        target = self._checkpoints / checkpoint_name(self._step)
        if target.exists():
            remove_tree(target, self._checkpoints / trash_name(target.name))
        self.path.rename(target)
        fsync_directory(self._checkpoints)
        return target, manifest

    def discard(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)


def sweep(checkpoints: Path, attempt: str) -> None:
    """Remove what earlier attempts left half-built or half-deleted; this attempt's own staging is kept."""
    with contextlib.suppress(OSError):
        for entry in list(os.scandir(checkpoints)):
            if entry.name.startswith(".") and not entry.name.startswith(f".{attempt}-") and entry.is_dir():
                shutil.rmtree(entry.path, ignore_errors=True)


def prune(checkpoints: Path, keep: int) -> list[Path]:
    """Delete all but the ``keep`` newest; returns what was deleted."""
    gone = published(checkpoints)[max(1, keep) :]
    for path in gone:
        remove_tree(path, checkpoints / trash_name(path.name))
    return gone
