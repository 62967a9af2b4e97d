"""Checkpoints of scripts that bring their own: which is the newest complete one that a pattern matches."""

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
    """A complete checkpoint of a user's script. ``step`` is the last number in its name, if it has one."""

    path: Path
    step: int | None
    bytes: int
    saved_at: float

    def to_dict(self) -> dict[str, Any]:
        """As it is journaled."""
        return {"path": str(self.path), "step": self.step, "bytes": self.bytes, "saved_at": self.saved_at}


def absolute(pattern: str, workdir: str, run: RunDir) -> str:
    """The ``pattern`` of a spec, relative to ``workdir``, as an absolute one.

    ``{run_dir}`` and ``{checkpoint_dir}`` become those of ``run``.
    """
    filled = pattern.replace("{run_dir}", glob.escape(str(run.path)))
    filled = filled.replace("{checkpoint_dir}", glob.escape(str(run.checkpoints)))
    return os.path.join(glob.escape(workdir), os.path.expanduser(filled))  # noqa: PTH111, PTH118 (a pattern, not a path)


def newest(pattern: str, since: float | None = None) -> ExternalCheckpoint | None:
    """The newest complete checkpoint that the glob ``pattern`` (absolute) matches, none older than ``since``.

    Newest is the highest last number of the names where all have one (``ckpt-10.pt`` over ``ckpt-9.pt``), since clocks
    of nodes differ; the latest modification otherwise.
    """
    matches = glob.glob(pattern, recursive=True)  # noqa: PTH207 (pathlib takes no absolute patterns)
    checkpoints = [
        candidate
        for path in matches
        if (candidate := _look_at(Path(path))) and (since is None or candidate.saved_at >= since)
    ]
    if all(candidate.step is not None for candidate in checkpoints):
        return max(checkpoints, key=lambda candidate: (candidate.step or 0, candidate.saved_at), default=None)
    return max(checkpoints, key=lambda candidate: candidate.saved_at)


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
    """Whether a checkpoint was written to its end, as far as its format tells.

    ``torch.save`` writes a zip archive, whose directory comes last; safetensors says in its header how long it is;
    torch.distributed.checkpoint writes ``.metadata`` last. Anything else counts as complete when it is not empty.
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
    """The file's length by its header: eight bytes of its length, JSON with offsets, then the data."""
    length = int.from_bytes(start, "little")
    with contextlib.suppress(ValueError, TypeError, LookupError, AttributeError):
        header = json.loads(rest[:length])
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
        return 8 + length + max(ends, default=0)
    return None
