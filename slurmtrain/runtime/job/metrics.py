"""Rank 0's metrics: one line for each finished step, in one write, so that a kill loses no finished step."""

from __future__ import annotations

import json
import logging
import math
import os
import re
import sys
import time
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from slurmtrain.system.journal import open_appending

_PLAIN = frozenset((int, float))
# Outside a job metrics go to Python's log, at most this often.
_LOG_EVERY_S = 1.0
_log = logging.getLogger("slurmtrain")


class MetricsFile:
    """Appends to ``metrics.jsonl``. A line costs microseconds: no fsync, no network.

    Training has evicted everything from the processor's caches when a line is written, so what counts is how much code
    that touches: formatting a cached template takes half the time of assembling a line from its parts.
    """

    def __init__(self, path: Path) -> None:
        self._handle = open_appending(path)

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Append one line: ``step`` finished steps, and the ``metrics`` logged since the previous line.

        Raises OSError, and TypeError if a metric is not a number.
        """
        values = metrics.values()
        try:
            # Python formats these numbers as JSON does. A sum is finite only if all of its terms are.
            plain = _PLAIN.issuperset(map(type, values)) and math.isfinite(sum(values))
        except OverflowError:
            plain = False
        if plain:
            line = _template(tuple(metrics)) % (time.time(), step, *values)
        else:
            texts = [json.dumps(plain_number(name, value)).encode() for name, value in metrics.items()]
            line = _template(tuple(metrics), b"%b") % (time.time(), step, *texts)
        os.write(self._handle, line)

    def close(self) -> None:
        """Close the file; nothing can be written after that."""
        os.close(self._handle)


class StepMetrics:
    """The metrics of the current step, collected until it is finished, then written as one line."""

    def __init__(self) -> None:
        self.latest: dict[str, Any] = {}
        """The latest value of each metric, by name."""
        self.pending: dict[str, Any] = {}
        """What has been logged since the last line."""
        self._file: MetricsFile | None = None
        self._logged_at = 0.0

    def open(self, path: Path) -> None:
        """Write to this file from now on, if there is none yet. Raises OSError."""
        if self._file is None:
            self._file = MetricsFile(path)

    def add(self, metrics: Mapping[str, Any]) -> None:
        """Add what a script has logged, by name. Raises TypeError for a value that is no number and no tensor.

        Tensors are read only when the step is finished, so as not to wait for a GPU earlier.
        """
        if not _PLAIN.issuperset(map(type, metrics.values())):
            for name, value in metrics.items():
                if not hasattr(value, "item"):
                    plain_number(name, value)
        self.pending.update(metrics)

    def write(self, step: int) -> None:
        """Write a line for a finished ``step`` with what was added since the last one. Raises OSError, TypeError."""
        # Emptied first: a value that turns out not to be a number must not fail the next line as well.
        pending, self.pending = self.pending, {}
        self.latest.update(pending)
        if self._file is not None:
            self._file.write(step, pending)
        elif pending and time.monotonic() - self._logged_at >= _LOG_EVERY_S:
            self._logged_at = time.monotonic()
            text = " ".join(f"{name}={plain_number(name, value):.6g}" for name, value in pending.items())
            _log.info("step %d %s", step, text)

    def close(self) -> None:
        """Close the file, if there is one."""
        if self._file is not None:
            self._file.close()


def plain_number(name: str, value: Any) -> float | int:
    """The metric called ``name`` as a plain number; one-element tensors and NumPy values are read.

    Raises TypeError if ``value`` is not one number.
    """
    if type(value) in _PLAIN:
        number: float | int = value
        return number
    try:
        return float(value.item() if hasattr(value, "item") else value)
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"the metric {name!r} must be one number, not {type(value).__name__}") from None


# Scripts log the same few sets of names repeatedly; the bound is for scripts that keep inventing names.
@lru_cache(maxsize=64)
def _template(names: tuple[str, ...], value: bytes = b"%a") -> bytes:
    """A line with placeholders for the time, the step and a value for each of the ``names``."""
    pairs = b",".join(json.dumps(name).encode().replace(b"%", b"%%") + b":" + value for name in names)
    return b'{"t":%.4f,"step":%d' + (b',"metrics":{' + pairs + b"}" if names else b"") + b"}\n"


# --- the most memory that this process has used at once ---------------------------------------------------------------
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
