"""The mounted file systems of this machine, and whether their locks also keep out processes on other machines."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

# A blank, a tab, a newline or a backslash in a path, as /proc writes it: \040.
_OCTAL = re.compile(r"\\([0-7]{3})")
# Mount options with which locks keep out this machine's processes only: nfs(5), and Lustre's mount.lustre(8).
_LOCAL_LOCKS = frozenset({"nolock", "local_lock=all", "local_lock=flock", "local_lock=posix", "localflock"})


@dataclass(frozen=True, slots=True)
class Mount:
    """A mounted file system. ``kind``: such as ``ext4`` or ``nfs4``; ``source``: the device or server."""

    point: str
    kind: str
    source: str
    options: frozenset[str]

    @property
    def has_local_locks(self) -> bool:
        """Whether the mount's own options keep its locks from reaching other machines, which share its files."""
        return bool(self.options & _LOCAL_LOCKS)

    def __str__(self) -> str:
        return f"{self.point} ({self.kind} from {self.source})"


@cache
def mount_of(device: int) -> Mount | None:
    """The file system with this number (``st_dev`` of its files); None if /proc does not list it under that."""
    with contextlib.suppress(OSError):
        lines = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        return find_mount(lines, f"{os.major(device)}:{os.minor(device)}")
    return None


def find_mount(lines: Iterable[str], number: str) -> Mount | None:
    """The mount with this ``number``, as ``major:minor``, in the ``lines`` of a mountinfo file (proc(5))."""
    for line in lines:
        # Optional fields, of any number, end with a dash.
        before, _, after = line.partition(" - ")
        fields, rest = before.split(), after.split()
        if len(fields) >= 6 and len(rest) >= 3 and fields[2] == number:
            point = _OCTAL.sub(lambda match: chr(int(match[1], 8)), fields[4])
            return Mount(point, rest[0], rest[1], frozenset([*fields[5].split(","), *rest[2].split(",")]))
    return None
