"""What a node's kernel knows about why a rank died: out-of-memory kills and GPU errors. Nothing here raises.

The state is read before the ranks start and again after they have ended: the difference is what counts.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurmtrain.model.interruption.exit_report import KernelEvidence
from slurmtrain.runtime.preflight.facts.gpus import KERNEL_LOG, find_xids, read_kernel_log

_ROOT = Path("/")
# "No limit" of version 1 is the largest number of whole pages (PAGE_COUNTER_MAX); no machine has as much as this.
_NO_LIMIT = 1 << 60
# The most digits that a 64-bit number has.
_DIGITS = 20
_RECORD = re.compile(r"\d+,(\d{1,20}),\d+,[^;\n]*;")


@dataclass(frozen=True, slots=True)
class KernelState:
    """What the kernel has recorded so far: its out-of-memory counts, and the number of the newest record in its log."""

    memory: MemoryEvents
    record: int | None

    @classmethod
    def now(cls) -> KernelState:
        """The current state."""
        return cls(memory_events(), last_record())

    def changes(self) -> KernelEvidence:
        """What the kernel has recorded since this state was read."""
        memory = memory_events().since(self.memory)
        return KernelEvidence(
            oom_kills=memory.kills or 0, own=memory.own, memory_limit=memory.limit_bytes, xids=xids(self.record)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEvents:
    """Processes killed for lack of memory, and the memory limit in bytes (None: no known limit).

    ``kills`` counts kills in this process's own cgroup, and so in its job. If the kernel does not count these, it is
    the count of the whole machine (``own`` is False), and None if there is neither.
    """

    kills: int | None = None
    limit_bytes: int | None = None
    own: bool = True

    def since(self, before: MemoryEvents) -> MemoryEvents:
        """The kills since ``before``: ``kills`` is 0 if that cannot be known."""
        comparable = self.own == before.own and self.kills is not None and before.kills is not None
        kills = max(0, (self.kills or 0) - (before.kills or 0)) if comparable else 0
        return MemoryEvents(kills=kills, limit_bytes=self.limit_bytes, own=self.own)


def memory_events(root: Path = _ROOT) -> MemoryEvents:
    """What the kernel counts now for the cgroup of this process. ``root`` replaces ``/`` in tests."""
    cgroup = _memory_cgroup(root)
    if cgroup is not None:
        folders, names = cgroup
        kills = _count(folders[0] / names.events, "oom_kill")
        limits = [limit for folder in folders if (limit := _number(folder / names.limit)) is not None]
        limit = min(limits, default=_NO_LIMIT)
        if kills is not None:
            return MemoryEvents(kills=kills, limit_bytes=limit if limit < _NO_LIMIT else None)
    return MemoryEvents(kills=_count(root / "proc/vmstat", "oom_kill"), own=False)


def last_record(log: Path = KERNEL_LOG) -> int | None:
    """The number of the newest record in the kernel ``log``, which :func:`xids` takes; None if it is not readable."""
    numbers = [number for number, _ in _records(log)]
    return max(numbers, default=None)


def xids(after: int | None, log: Path = KERNEL_LOG) -> list[dict[str, Any]]:
    """The GPU errors that the driver logged after this record, as :func:`~..preflight.facts.gpus.find_xids` has them.

    These include the errors of all GPUs of the node: ``bus`` tells which are the job's. Empty if ``after`` is None.
    """
    if after is None:
        return []
    return find_xids("\n".join(text for number, text in _records(log) if number > after), set())


def _records(log: Path) -> Iterator[tuple[int, str]]:
    """Number and text of each record: ``priority,number,microseconds,flags;text`` (ABI/testing/dev-kmsg).

    Records are compared by number, since the log's clock drifts from all others.
    """
    text = ""
    with suppress(OSError):
        text = read_kernel_log(log)
    for line in text.split("\n"):
        head = _RECORD.match(line)
        if head is not None:
            yield int(head[1]), line[head.end() :]


# --- cgroups ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Names:
    """Files of a memory cgroup."""

    events: str
    limit: str


# Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst in the kernel's sources.
_V1 = _Names("memory.oom_control", "memory.limit_in_bytes")
_V2 = _Names("memory.events", "memory.max")


def _memory_cgroup(root: Path) -> tuple[list[Path], _Names] | None:
    """The directories of this process's memory cgroup and its ancestors, innermost first; None if it has none.

    The limits of all of them apply. Slurm creates one each for a job, a step and a task.
    """
    mounts = _mounts(_read(root / "proc/self/mountinfo"))
    # Version 1 first: if both are mounted, version 2 ("0::") usually has no memory controller.
    for line in sorted(_read(root / "proc/self/cgroup").splitlines(), key=lambda line: line.startswith("0::")):
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if "memory" in controllers.split(","):
            kind, names = "memory", _V1
        elif line.startswith("0::"):
            kind, names = "cgroup2", _V2
        else:
            continue
        if kind in mounts:
            return _folders(root, *mounts[kind], path), names
    return None


def _mounts(mountinfo: str) -> dict[str, tuple[str, str]]:
    """Root and mount point of version 2 (``cgroup2``) and of version 1's ``memory`` (proc_pid_mountinfo(5))."""
    mounts: dict[str, tuple[str, str]] = {}
    for line in mountinfo.splitlines():
        mount, _, filesystem = line.partition(" - ")
        fields, (kind, *others) = mount.split(" "), filesystem.split(" ")
        if len(fields) < 5:
            continue
        if kind == "cgroup2":
            mounts.setdefault("cgroup2", (fields[3], fields[4]))
        elif kind == "cgroup" and others and "memory" in others[-1].split(","):
            mounts.setdefault("memory", (fields[3], fields[4]))
    return mounts


def _folders(root: Path, mounted: str, point: str, path: str) -> list[Path]:
    """The directories from the cgroup up to where the hierarchy is mounted.

    In a container the mounted part begins at the container's own cgroup, or ``path`` leads out of it: then only the
    mount point itself is visible.
    """
    inside = path.removeprefix(mounted) if mounted != "/" and path.startswith(mounted) else path
    parts = [part for part in inside.split("/") if part]
    top = root / point.lstrip("/")
    innermost = top.joinpath(*parts)
    if ".." in parts or not os.path.isdir(innermost):  # noqa: PTH112 (raises nothing, whatever the name)
        return [top]
    return [top.joinpath(*parts[:depth]) for depth in range(len(parts), -1, -1)]


def _read(path: Path) -> str:
    with suppress(OSError, ValueError):
        return path.read_text(encoding="utf-8", errors="replace")
    return ""


def _count(path: Path, name: str) -> int | None:
    """The number of this name in a file of names and numbers."""
    for line in _read(path).splitlines():
        key, _, value = line.partition(" ")
        if key == name:
            return _whole(value)
    return None


def _number(path: Path) -> int | None:
    """The number in a file; None for ``max``, or if there is no file."""
    return _whole(_read(path).strip())


def _whole(text: str) -> int | None:
    """The text as a number of at most 64 bits, as the kernel writes them; None if it is not one."""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= _DIGITS else None
