"""Checkpoints of scripts that write their own: finding the newest complete one that a pattern matches."""

from __future__ import annotations

import contextlib
import glob
import json
import os
import re
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurmtrain.model.run.layout import RunDir

_UNFINISHED = (".tmp", ".part", ".partial", ".incomplete", "~")
_NUMBER = re.compile(r"\d+")
_SAFETENSORS_HEADER_LIMIT = 100 * 2**20


@dataclass(frozen=True, slots=True)
class ExternalCheckpoint:
    """A complete checkpoint of a user's script. ``step`` is the last number in its name, if any."""

    path: Path
    step: int | None
    bytes: int
    saved_at: float

    def to_dict(self) -> dict[str, Any]:
        """The fields that are journaled."""
        return {"path": str(self.path), "step": self.step, "bytes": self.bytes, "saved_at": self.saved_at}


def absolute(pattern: str, workdir: str, run: RunDir) -> str:
    """The ``pattern`` of a spec, which is relative to ``workdir``, as an absolute pattern.

    ``{run_dir}`` and ``{checkpoint_dir}`` are replaced by the directories of ``run``.
    """
    filled = pattern.replace("{run_dir}", glob.escape(str(run.path)))
    filled = filled.replace("{checkpoint_dir}", glob.escape(str(run.checkpoints)))
    return os.path.join(glob.escape(workdir), os.path.expanduser(filled))  # noqa: PTH111, PTH118 (a pattern, not a path)


def newest(pattern: str, since: float | None = None) -> ExternalCheckpoint | None:
    """The newest complete checkpoint that the absolute glob ``pattern`` matches; ignores those older than ``since``.

    If all names contain numbers, the newest is the one with the highest last number (``ckpt-10.pt`` over
    ``ckpt-9.pt``), since clocks of nodes differ; otherwise it is the one that was modified last.
    """
    checkpoints = [candidate for candidate in complete(pattern) if since is None or candidate.saved_at >= since]
    if all(candidate.step is not None for candidate in checkpoints):
        return max(checkpoints, key=lambda candidate: (candidate.step or 0, candidate.saved_at), default=None)
    return max(checkpoints, key=lambda candidate: candidate.saved_at)


def complete(pattern: str) -> list[ExternalCheckpoint]:
    """All complete checkpoints that the absolute glob ``pattern`` matches, in no order."""
    matches = glob.glob(pattern, recursive=True)  # noqa: PTH207 (pathlib takes no absolute patterns)
    return [candidate for path in matches if (candidate := _look_at(Path(path)))]


def _look_at(path: Path) -> ExternalCheckpoint | None:
    try:
        status = path.stat()
        if path.name.endswith(_UNFINISHED) or not is_complete(path):
            return None
        size = status.st_size if path.is_file() else sum(p.stat().st_size for p in path.rglob("*") if p.is_file())
    except OSError:
        return None
    numbers = _NUMBER.findall(path.stem)
    return ExternalCheckpoint(path, int(numbers[-1]) if numbers else None, size, status.st_mtime)


def is_complete(path: Path) -> bool:
    """Whether a checkpoint was written to the end, as far as its format shows.

    ``torch.save`` writes a zip archive, whose directory comes last; a safetensors header gives the file's length;
    torch.distributed.checkpoint writes ``.metadata`` last. Anything else counts as complete if it is not empty.
    Raises OSError.
    """
    if path.is_dir():
        names = os.listdir(path)
        shards = any(name.endswith(".distcp") for name in names)
        return bool(names) and (not shards or ".metadata" in names)
    with path.open("rb") as file:
        start = file.read(8)
        if start.startswith(b"PK"):
            return zipfile.is_zipfile(file)
        if path.suffix == ".safetensors":
            return _safetensors_length(start, file.read(_SAFETENSORS_HEADER_LIMIT)) == path.stat().st_size
        return bool(start)


def _safetensors_length(start: bytes, rest: bytes) -> int | None:
    """The file's length according to its header: eight bytes for the header's length, JSON with offsets, the data."""
    length = int.from_bytes(start, "little")
    with contextlib.suppress(ValueError, TypeError, LookupError, AttributeError):
        header = json.loads(rest[:length])
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
        return 8 + length + max(ends, default=0)
    return None
