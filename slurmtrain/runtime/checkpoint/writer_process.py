"""The process that writes a rank's part of checkpoints: ``python -m ...writer_process HANDLE SOCKET``.

It shares memory (HANDLE) with its rank, receives one JSON object per line over SOCKET, and answers each with another.
It does not import torch, so it starts at once and costs next to nothing. It ignores signals that are meant for the
rank, since the last checkpoint is written after them, and ends when the rank closes its end of the socket.
"""

from __future__ import annotations

import base64
import contextlib
import json
import mmap
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from slurmtrain.errors import SlurmtrainError
from slurmtrain.model.experiment.checkpoint import BestSpec, KeepSpec
from slurmtrain.model.run.layout import AttemptDir
from slurmtrain.runtime.checkpoint import checkpoint_files
from slurmtrain.runtime.job import lease
from slurmtrain.system.directories import without_aliases
from slurmtrain.system.files import FILE_MODE, describe_os_error, make_directory
from slurmtrain.system.inherited import PRIVATE

# Small enough for the processor's cache: each chunk is hashed, then written while still cached.
_CHUNK = 1 << 20
# Signals that Slurm sends to all processes of a step, and a terminal to its own processes.
IGNORED = frozenset((signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP))
# The process's name, as in /proc/PID/comm, while it publishes a checkpoint, which is lost if it is killed.
PUBLISHING = "ckpt-publish"
_NAME = "ckpt-writer"
FENCED = "another attempt has taken over this run; nothing was published"
DELETED = "the run's directory was deleted; nothing was published"


def begin_helper() -> None:
    """Begin as a process that completes its work for a rank or an agent after signals to all processes of the job."""
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    # It was started with these signals blocked.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, IGNORED)
    os.umask(PRIVATE)


def serve_rank(arguments: list[str]) -> None:
    """Execute orders until the rank closes its end; ``arguments`` are the two file descriptors."""
    begin_helper()
    _call_oneself(_NAME)
    memory = _Memory(int(arguments[0]))
    verbs: dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
        "populate": memory.populate,
        "write": memory.write,
        "publish": publish,
        "prune": prune_as_ordered,
    }
    # The rank may be killed before it reads an answer: then nobody is left to be told of an error.
    with socket.socket(fileno=int(arguments[1])) as rank, contextlib.suppress(BrokenPipeError, ConnectionError):
        for line in rank.makefile("rb"):
            order = json.loads(line)
            try:
                outcome = verbs[order["do"]](order)
            except OSError as error:
                outcome = {"error": describe_os_error(error)}
            except SlurmtrainError as error:
                outcome = {"error": without_aliases(str(error))}
            answer = {"did": order["do"], "number": order["number"], **outcome}
            rank.sendall(json.dumps(answer).encode() + b"\n")


class _Memory:
    """The memory that is shared with the rank, which enlarges it at times."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    def populate(self, order: Mapping[str, Any]) -> dict[str, Any]:
        """Have the kernel provide all pages now: faulting in a page on first use costs more than copying it."""
        os.posix_fallocate(self._handle, 0, int(order["bytes"]))
        return {}

    def write(self, order: Mapping[str, Any]) -> dict[str, Any]:
        """Write the first ``bytes`` of the memory to a file, durably. Returns their hash."""
        size, path = int(order["bytes"]), Path(order["path"])
        make_directory(path.parent)
        began = time.monotonic()
        with mmap.mmap(self._handle, size, prot=mmap.PROT_READ) as memory:
            digest = _write_hashed(path, memory)
        return {"bytes": size, "xxh3_128": digest, "seconds": time.monotonic() - began}


def _write_hashed(path: Path, content: mmap.mmap | bytes) -> str:
    """Write a file, durably; returns its hash."""
    hasher = checkpoint_files.new_hasher()
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, FILE_MODE)
    try:
        with memoryview(content) as view:
            for start in range(0, len(view), _CHUNK):
                with view[start : start + _CHUNK] as chunk:
                    hasher.update(chunk)
                    written = 0
                    while written < len(chunk):
                        with chunk[written:] as rest:
                            written += os.write(handle, rest)
        # Before the answer: the manifest is written once all ranks have answered, and vouches for the content.
        os.fsync(handle)
    finally:
        os.close(handle)
    return hasher.hexdigest()


def publish(order: Mapping[str, Any]) -> dict[str, Any]:
    """Publish what all ranks have written as a checkpoint, if this attempt still holds the run's lease."""
    attempt = AttemptDir(Path(order["attempt"]), int(order.get("round", 0)))
    staging = checkpoint_files.Staging(attempt.run.checkpoints, attempt.owner, int(order["step"]))
    if not lease.holds(attempt):
        staging.discard()
        return {"fenced": FENCED if attempt.run.lease.exists() else DELETED}
    _call_oneself(PUBLISHING)
    try:
        names = {name: (int(size), str(digest)) for name, (size, digest) in order["files"].items()}
        name, content = order["index"]
        index = base64.b64decode(content)
        names[name] = len(index), _write_hashed(staging.path / name, index)
        # ``began`` is the rank's: all processes of a machine read the same monotonic clock.
        manifest = checkpoint_files.Manifest(
            **order["manifest"], files=names, saved_at=time.time(), seconds=time.monotonic() - order["began"]
        )
        return {"saved": manifest.describe(staging.publish(manifest))}
    finally:
        _call_oneself(_NAME)


def prune_as_ordered(order: Mapping[str, Any]) -> dict[str, Any]:
    """If this attempt holds the lease, delete what the policy does not keep, and finish interrupted deletions.

    ``missing`` in the order: stop once this many bytes have been freed.
    """
    attempt = AttemptDir(Path(order["attempt"]))
    if not lease.holds(attempt):
        return {"pruned": []}
    checkpoints = attempt.run.checkpoints
    checkpoint_files.empty_trash(checkpoints)
    missing = order.get("missing")
    pruned = []
    for checkpoint in checkpoint_files.disposable_checkpoints(checkpoints, keep_of(order["keep"])):
        if missing is not None and missing <= 0:
            break
        with contextlib.suppress(FileNotFoundError):
            checkpoint_files.delete_checkpoint(checkpoint.path)
            path = checkpoint_files.relative_path(checkpoint.path)
            pruned.append({"path": path, "step": checkpoint.step, "why": checkpoint.why})
            missing = None if missing is None else missing - checkpoint.bytes
    return {"pruned": pruned}


def keep_of(plain: Mapping[str, Any]) -> KeepSpec:
    """The policy from its JSON form on the socket."""
    best = plain["best"]
    return KeepSpec(last=plain["last"], every_steps=plain["every_steps"], best=BestSpec(**best) if best else None)


def _call_oneself(name: str) -> None:
    """Change the name of this process, of at most 15 characters."""
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_text(name, encoding="utf-8")


if __name__ == "__main__":
    serve_rank(sys.argv[1:])
