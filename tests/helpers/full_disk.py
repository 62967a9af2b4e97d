"""A small file system that can be filled to the byte."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

_PAGE = 4096
# Tests change their PATH.
_SYSTEM = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}


class SmallDisk:
    """A mounted file system in memory (tmpfs)."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._filler = path / ".filler"
        self._crowd = path / ".crowd"

    def leave(self, size: int) -> None:
        """Fill it until this many bytes are left."""
        self._filler.unlink(missing_ok=True)
        with self._filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(b"x" * _PAGE)
        os.truncate(self._filler, max(0, self._filler.stat().st_size - size))

    def leave_files(self, number: int) -> None:
        """Fill it until this many further files can be created."""
        self._crowd.mkdir(exist_ok=True)
        for name in range(os.statvfs(self.path).f_ffree - number):
            (self._crowd / str(name)).touch()

    def free(self) -> None:
        """Make room again."""
        self._filler.unlink(missing_ok=True)
        shutil.rmtree(self._crowd, ignore_errors=True)


@contextlib.contextmanager
def small_disk(path: Path, size: str = "8m", *, inodes: int = 4096) -> Iterator[SmallDisk]:
    """Mount a small disk at a new directory, or skip the test where that is not allowed."""
    path.mkdir(parents=True)
    options = f"size={size},nr_inodes={inodes},mode=755"
    mounted = subprocess.run(
        ["/usr/bin/env", "mount", "-t", "tmpfs", "-o", options, "none", str(path)],
        env=_SYSTEM,
        capture_output=True,
        text=True,
    )
    if mounted.returncode != 0:
        pytest.skip(f"needs the right to mount a small file system: {mounted.stderr.strip()}")
    try:
        yield SmallDisk(path)
    finally:
        subprocess.run(["/usr/bin/env", "umount", "--lazy", str(path)], env=_SYSTEM, check=True)
