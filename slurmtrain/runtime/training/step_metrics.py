"""What rank 0 logs in a step: collected until the step is finished, then written as one line."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slurmtrain.runtime.job.metrics import MetricsFile, as_number, check_numbers

_log = logging.getLogger("slurmtrain")
# Outside a job metrics go to Python's log, at most this often.
_LOG_EVERY_S = 1.0


class StepMetrics:
    """The metrics of the current step, and the latest values of all."""

    def __init__(self) -> None:
        self.latest: dict[str, Any] = {}
        """The latest value of each metric, by name."""
        self.pending: dict[str, Any] = {}
        """What has been logged since the last line."""
        self._file: MetricsFile | None = None
        self._logged_at = 0.0

    def open(self, path: Path) -> None:
        """Write to this file from now on. Raises OSError."""
        self._file = MetricsFile(path)

    def add(self, metrics: Mapping[str, Any]) -> None:
        """Add what a script has logged, by name. Raises TypeError for a value that is no number and no tensor."""
        check_numbers(metrics)
        self.pending.update(metrics)

    def write(self, step: int) -> None:
        """Write a line for a finished ``step`` with what was added since the last one. Raises OSError, TypeError."""
        pending, self.pending = self.pending, {}
        self.latest.update(pending)
        if self._file is not None:
            self._file.write(step, pending)
        elif pending and time.monotonic() - self._logged_at >= _LOG_EVERY_S:
            self._logged_at = time.monotonic()
            text = " ".join(f"{name}={as_number(name, value):.6g}" for name, value in pending.items())
            _log.info("step %d %s", step, text)

    def close(self) -> None:
        """Close the file, if there is one."""
        if self._file is not None:
            self._file.close()
