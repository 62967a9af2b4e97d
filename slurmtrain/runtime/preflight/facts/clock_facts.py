"""What keeps this node's clock synchronised: this asks the kernel and chrony, and never sets anything."""

from __future__ import annotations

import ctypes
import math
import os
import shutil
import subprocess
from collections.abc import Sequence
from typing import Any

from slurmtrain.runtime.environment.variables import environment_of_tools

# ``disciplined`` (None: unknown), ``source`` (adjtimex, chrony, none), ``description`` (a phrase with
# figures) and ``bound_ms`` (the largest error of the clock against true time, or None).
Discipline = dict[str, Any]

# adjtimex(2): its result for a clock that is not synchronised.
_TIME_ERROR = 5
# NTP_PHASE_LIMIT of the kernel: its bound of the error grows by 500 ppm up to this when nothing keeps the clock.
_UNKNOWN_US = 16_000_000
# The reference of chronyd's directive "local".
_OWN_CLOCK = "7F7F0101"
_SYSTEM_PATHS = ("/usr/bin", "/usr/sbin", "/bin", "/sbin")
_CHRONY_FIELDS = 14


def read_discipline(timeout_s: float = 2.0) -> Discipline:
    """What synchronises this node's clock, by the kernel or, if that does not call it synchronised, by chrony.

    systemd-timesyncd and ntpd tell the kernel themselves. chronyd without ``rtcsync`` does not: it sets the bound of
    the clock's error, and leaves the flag alone. So a flag and a bound that contradict each other mean a clock that a
    program keeps. chrony has ``timeout_s`` seconds. Raises nothing.
    """
    kernel = ask_kernel()
    if kernel is not None and kernel["disciplined"]:
        return kernel
    # -n: names of servers are not looked up, which may take seconds.
    by_chrony = read_chrony(_output(("chronyc", "-n", "-c", "tracking"), timeout_s))
    if by_chrony is not None:
        return by_chrony
    if kernel is None:
        return _discipline(None, "none", "no time service answers")
    return {**kernel, "disciplined": True} if kernel["disciplined"] is None else kernel


def _discipline(disciplined: bool | None, source: str, description: str, bound_ms: float | None = None) -> Discipline:
    return {"disciplined": disciplined, "source": source, "description": description, "bound_ms": bound_ms}


# --- the kernel -------------------------------------------------------------------------------------------------


class Timex(ctypes.Structure):
    """``struct timex`` of adjtimex(2) on 64-bit Linux, 208 bytes."""

    _fields_ = (
        ("modes", ctypes.c_uint),
        *((name, ctypes.c_long) for name in ("offset", "freq", "maxerror", "esterror")),
        ("status", ctypes.c_int),
        *((name, ctypes.c_long) for name in ("constant", "precision", "tolerance", "seconds", "fraction")),
        *((name, ctypes.c_long) for name in ("tick", "ppsfreq", "jitter")),
        ("shift", ctypes.c_int),
        *((name, ctypes.c_long) for name in ("stabil", "jitcnt", "calcnt", "errcnt", "stbcnt")),
        ("tai", ctypes.c_int),
        ("reserved", ctypes.c_int * 11),
    )


def ask_kernel() -> Discipline | None:
    """The kernel's answer; None if asking is not allowed, as in some containers, or this is not 64-bit Linux."""
    try:
        adjtimex = ctypes.CDLL(None).adjtimex
    except (OSError, AttributeError):
        return None
    if ctypes.sizeof(ctypes.c_long) != 8:
        return None
    # No mode: the call sets nothing.
    timex = Timex(modes=0)
    state = int(adjtimex(ctypes.byref(timex)))
    return read_kernel(state, timex.maxerror)


def read_kernel(state: int, maxerror_us: int) -> Discipline | None:
    """Interpret what adjtimex(2) returned, -1 being an error, and its bound of the clock's error in microseconds.

    ``disciplined`` is None if flag and bound contradict each other.
    """
    if state < 0:
        return None
    if maxerror_us >= _UNKNOWN_US:
        return _discipline(False, "adjtimex", "not synchronised, by the kernel")
    bound_ms = maxerror_us / 1e3
    error = f"{_at_most(bound_ms)} by the kernel"
    if state == _TIME_ERROR:
        return _discipline(None, "adjtimex", f"{error}, which does not report it as synchronised", bound_ms)
    return _discipline(True, "adjtimex", error, bound_ms)


# --- chrony -----------------------------------------------------------------------------------------------------


def read_chrony(text: str) -> Discipline | None:
    """The answer of ``chronyc -c tracking``, fourteen fields with commas between them, in seconds (chronyc(1)).

    The error is at most the sum of the remaining correction, the root dispersion and half of the root delay.
    """
    fields = next((line.split(",") for line in text.splitlines() if line.count(",") == _CHRONY_FIELDS - 1), None)
    if fields is None:
        return None
    if fields[13] == "Not synchronised":
        return _discipline(False, "chrony", "chrony follows no source")
    if fields[0] == _OWN_CLOCK:
        return _discipline(False, "chrony", "chrony follows only this clock itself")
    try:
        correction, delay, dispersion = (float(fields[index]) for index in (4, 10, 11))
    except ValueError:
        return None
    bound_ms = (abs(correction) + dispersion + delay / 2) * 1e3
    if not math.isfinite(bound_ms):
        return None
    return _discipline(True, "chrony", f"{_at_most(bound_ms)}, chrony follows {fields[1] or fields[0]}", bound_ms)


def _at_most(milliseconds: float) -> str:
    return (
        f"error at most {milliseconds:.3g} ms" if milliseconds < 999.5 else f"error at most {milliseconds / 1e3:.1f} s"
    )


def _output(command: Sequence[str], timeout_s: float) -> str:
    """What a command prints; empty if it is not installed, fails or takes too long."""
    environ = environment_of_tools()
    # Time services live in sbin directories, which are rarely on the PATH of a job.
    program = shutil.which(command[0], path=os.pathsep.join([environ["PATH"], *_SYSTEM_PATHS]))
    if program is None:
        return ""
    try:
        completed = subprocess.run(
            [program, *command[1:]],
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            errors="replace",
            timeout=timeout_s,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return completed.stdout if completed.returncode == 0 else ""
