"""How much a file system can still take."""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass
from pathlib import Path

# The error numbers of a write for which there is no room: on the file system, or in a quota.
FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


@dataclass(frozen=True, slots=True)
class DiskSpace:
    """What a file system has left, or what somebody needs of it.

    ``inodes``: how many files and directories; None: as many as fit.
    """

    bytes: int
    inodes: int | None

    def shortage(self, needed: DiskSpace) -> str:
        """What is missing for what is ``needed``, as a phrase; empty if there is enough."""
        if self.bytes < needed.bytes:
            return f"{self.bytes // 1024} KiB are left of the {needed.bytes // 1024} KiB"
        if self.inodes is not None and needed.inodes is not None and self.inodes < needed.inodes:
            return f"{self.inodes} inodes are left of the {needed.inodes}"
        return ""


def space_left(path: Path) -> DiskSpace:
    """What the file system of an existing file or directory has left for users other than root (statvfs(3)).

    It includes quotas of projects and directories where the file system reports them there, as XFS and many servers of
    network file systems do, but not quotas of users. Raises OSError.
    """
    filesystem = os.statvfs(path)
    # File systems without a fixed number of inodes, such as btrfs, have 0 here.
    inodes = filesystem.f_favail if filesystem.f_files else None
    return DiskSpace(filesystem.f_bavail * filesystem.f_frsize, inodes)
