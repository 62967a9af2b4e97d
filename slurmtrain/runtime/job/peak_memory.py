"""The most memory that this process has used at once."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

# The peak of the resident set size, in kB (proc_pid_status(5)). The peak in getrusage(2) begins with the parent's.
_PEAK = re.compile(r"^VmHWM:\s*(\d+) kB$", re.MULTILINE)


def peak_memory() -> tuple[int | None, str]:
    """Bytes, and of what: ``gpu``, what torch had allocated on one of its GPUs; else ``process``, what was resident.

    The bytes are None where the system does not tell.
    """
    # A process that has not imported torch has used no GPU through it.
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        return max(map(torch.cuda.max_memory_allocated, range(torch.cuda.device_count()))), "gpu"
    try:
        status = Path("/proc/self/status").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None, "process"
    peak = _PEAK.search(status)
    return (int(peak[1]) * 1024 if peak else None), "process"
