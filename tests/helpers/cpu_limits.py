"""Processes that get only a part of a CPU, by cgroups, which take root."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

_MOUNT = Path("/sys/fs/cgroup")
# Short, so that a step of a training has many periods.
_PERIOD_US = 10_000


class CpuLimit:
    """A cgroup with the threads of processes that share a part of a CPU."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def set(self, part: float) -> None:
        """Let its processes use this ``part`` of a CPU together from now on."""
        quota = round(part * _PERIOD_US)
        if (self._path / "cpu.max").exists():
            (self._path / "cpu.max").write_text(f"{quota} {_PERIOD_US}")
        else:
            (self._path / "cpu.cfs_period_us").write_text(str(_PERIOD_US))
            (self._path / "cpu.cfs_quota_us").write_text(str(quota))

    def add(self, pid: int) -> None:
        """Let it have a process, with all of its threads."""
        (self._path / "cgroup.procs").write_text(str(pid))


@contextlib.contextmanager
def cpu_limit() -> Iterator[CpuLimit]:
    """A limit, which ends with the context, for processes that still run, too."""
    # Version 1 has a hierarchy for each controller; version 2, where this one may have to be enabled, has one for all.
    parent = next((path for path in (_MOUNT / "cpu", _MOUNT / "cpu,cpuacct") if path.is_dir()), _MOUNT)
    if (parent / "cgroup.subtree_control").exists():
        (parent / "cgroup.subtree_control").write_text("+cpu")
    own = parent / f"slurmtrain-test-{os.getpid()}"
    own.mkdir()
    try:
        yield CpuLimit(own)
    finally:
        for pid in (own / "cgroup.procs").read_text().split():
            # It may have ended meanwhile.
            with contextlib.suppress(ProcessLookupError):
                (parent / "cgroup.procs").write_text(pid)
        own.rmdir()
