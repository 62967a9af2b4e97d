"""A memory limit of the kernel's for processes of this machine, as a job of Slurm has one."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

_MEMORY = Path("/sys/fs/cgroup/memory")
# It stops by itself in case that nothing stops it before.
HUNGRY = "data = []\nfor _ in range(200):\n    data.append(b'x' * (8 << 20))\n"
"""A script that takes 1.6 GB."""


@contextlib.contextmanager
def little_memory(limit_mib: int) -> Iterator[Sequence[str]]:
    """Yield the words before a command that let it, and all that it starts, have so much memory together.

    The process of the test stays outside: the kernel could choose it.
    """
    before = _own_group()
    if before is None or not os.access(_MEMORY, os.W_OK):
        pytest.skip("needs root, and the memory controller of cgroups, version 1")
    group = _MEMORY / f"slurmtrain-test-{os.getpid()}"
    group.mkdir()
    (group / "memory.limit_in_bytes").write_text(str(limit_mib << 20))
    try:
        yield ["sh", "-c", f'echo $$ > {group / "cgroup.procs"} && exec "$@"', "sh"]
    finally:
        while left := (group / "cgroup.procs").read_text().split():
            for pid in left:
                # It may have ended by then.
                with contextlib.suppress(ProcessLookupError):
                    (before / "cgroup.procs").write_text(pid)
        group.rmdir()


def _own_group() -> Path | None:
    """The cgroup that limits the memory of this process; None: it is not one of version 1."""
    lines = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    paths = [_MEMORY / path.lstrip("/") for _, controllers, path in lines if controllers == "memory"]
    return next((path for path in paths if path.is_dir()), None)
