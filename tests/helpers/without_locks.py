"""Run a program as on a file system without locks: ``python without_locks.py ENOLCK PROGRAM ARGUMENT...``.

The kernel itself refuses the program, and all that it starts, every lock on a file: flock(2), and the locks of fcntl(2)
that SQLite uses. A seccomp filter does that (seccomp(2)), for which no privileges are needed.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
import sys

# Numbers of flock(2) and fcntl(2), and the architecture as seccomp names it (linux/audit.h), by machine.
_MACHINES = {"x86_64": (73, 72, 0xC000003E), "aarch64": (32, 25, 0xC00000B7)}
# F_GETLK, F_SETLK, F_SETLKW, and the same of open file descriptions (F_OFD_GETLK and so on).
_LOCKING = (5, 6, 7, 36, 37, 38)
_LOAD, _EQUAL, _RETURN = 0x20, 0x15, 0x06
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
# Offsets in struct seccomp_data: the number of the system call, the architecture, the low half of the second argument.
_NUMBER, _ARCHITECTURE, _COMMAND = 0, 4, 24
_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 38, 22, 2


def is_supported() -> bool:
    """Whether this machine's system calls are known here."""
    return platform.machine() in _MACHINES


def refuse_locks(error: int) -> None:
    """Have every lock of this process, and of all that it starts, fail with an ``error``. This cannot be undone."""
    flock, fcntl, architecture = _MACHINES[platform.machine()]
    refuse = (_RETURN, 0, 0, _ERRNO | error)
    allow = (_RETURN, 0, 0, _ALLOW)
    # A comparison skips as many instructions as its second number says if it fails, and as its first if it holds.
    commands = [(_EQUAL, len(_LOCKING) - index, 0, command) for index, command in enumerate(_LOCKING)]
    instructions = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUAL, 1, 0, architecture),
        allow,
        (_LOAD, 0, 0, _NUMBER),
        (_EQUAL, len(commands) + 4, 0, flock),
        (_EQUAL, 1, 0, fcntl),
        allow,
        (_LOAD, 0, 0, _COMMAND),
        *commands,
        allow,
        refuse,
    ]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *each) for each in instructions))
    program = struct.pack("HxxxxxxP", len(instructions), ctypes.addressof(code))
    libc = ctypes.CDLL(None, use_errno=True)
    for arguments in ((_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), (_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, program, 0, 0)):
        if libc.prctl(*arguments) != 0:
            raise OSError(ctypes.get_errno(), "prctl")


if __name__ == "__main__":
    refuse_locks(getattr(errno, sys.argv[1]))
    os.execvp(sys.argv[2], sys.argv[2:])
