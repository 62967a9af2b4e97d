"""Notes that a node takes while its ranks train: how busy it is, and how long logs were at what time.

Both are lines of JSON, in files of their own. Nothing depends on these notes: what cannot be measured or written is
left out.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from slurmtrain.runtime.preflight.facts.gpus import open_gpus
from slurmtrain.system.files import FILE_MODE

_EVERY_S = 15.0
# So many lines are as far apart; the next as many are twice as far. A month has about 7,500 lines, or 2 MB.
_EQUAL = 1000
# A driver or file system that hangs must not keep the agent from ending.
_END_S = 1.0
# Twenty thousand lines a week, if the logs grow all the time.
_LOGS_EVERY_S = 30.0
_MEGABYTE = 1e6


def _append_note(path: Path, note: Mapping[str, Any]) -> None:
    """Append a ``note`` with the time in seconds since 1970, if that is possible."""
    line = json.dumps({"t": round(time.time(), 3), **note}) + "\n"
    with suppress(OSError):
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, FILE_MODE)
        try:
            os.write(handle, line.encode())
        finally:
            os.close(handle)


class LogSizes:
    """Notes that logs of a node have grown, by which ``logs --since`` finds lines: logs have no times of their own."""

    def __init__(self, notes: Path, logs: Mapping[str, Path], every_s: float = _LOGS_EVERY_S) -> None:
        """Note the sizes of ``logs``, by name, in the file ``notes``, at most every ``every_s`` seconds."""
        self._notes = notes
        self._logs = logs
        self._every_s = every_s
        self._due = time.monotonic() + every_s
        self._sizes: dict[str, int] = {}

    def note(self) -> None:
        """Append a line if it is time to, and something has grown. Call it repeatedly."""
        if time.monotonic() < self._due:
            return
        self._due = time.monotonic() + self._every_s
        grown = {}
        for name, path in self._logs.items():
            with suppress(OSError):
                size = path.stat().st_size
                if size != self._sizes.get(name, 0):
                    grown[name] = size
        if grown:
            self._sizes |= grown
            _append_note(self._notes, {"sizes": grown})


class Sampler:
    """Measures in a thread of its own, since a driver may take long to answer; use it as a context.

    A line has the figures as ``metrics``, and finished steps as ``step`` from the first heartbeat of a rank on.
    """

    def __init__(
        self, path: Path, gauges: Callable[[], Gauges], step: Callable[[], int | None], every_s: float = _EVERY_S
    ) -> None:
        """Prepare to measure.

        Args:
            path: The file to append to, in a folder that exists.
            gauges: Makes what measures, in the thread.
            step: Returns how many steps are finished; None if that is unknown.
            every_s: How often to measure, in seconds.
        """
        self._path = path
        self._gauges = gauges
        self._step = step
        self._every_s = every_s
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="system metrics", daemon=True)

    def __enter__(self) -> Sampler:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join(_END_S)

    def _run(self) -> None:
        # Libraries of drivers raise anything, and no figure is worth a traceback among the agent's output.
        with suppress(Exception):
            gauges = self._gauges()
            try:
                self._measure(gauges)
            finally:
                gauges.close()

    def _measure(self, gauges: Gauges) -> None:
        every_s, lines, at = self._every_s, 0, {}
        while not self._ended.wait(every_s):
            metrics = gauges.read()
            # Ranks that are about to be started have no heartbeat yet: a step never goes back to unknown.
            if (step := self._step()) is not None:
                at = {"step": step}
            _append_note(self._path, {**at, "metrics": metrics})
            lines += 1
            if lines % _EQUAL == 0:
                every_s *= 2


class Gauges:
    """Measures this node: processors and memory by psutil; the job's GPUs by NVML, where nvidia-ml-py is installed.

    The figures have the names of MLflow's own system metrics (``mlflow/system_metrics``).
    """

    def __init__(self, environ: Mapping[str, str], nvml: Any | None) -> None:
        """Begin to measure.

        Args:
            environ: The environment of the ranks, which says what GPUs they can see.
            nvml: The module of nvidia-ml-py, or None.
        """
        # Imported here: agents of runs that measure nothing do without it.
        import psutil

        self._psutil = psutil
        self._nvml: Any = nvml
        # The GPUs that the ranks can see; none where NVML does not answer.
        self._gpus: list[Any] = []
        if nvml is not None:
            with suppress(nvml.NVMLError):
                nvml.nvmlInit()
                with suppress(nvml.NVMLError):
                    self._gpus = open_gpus(nvml, environ.get("CUDA_VISIBLE_DEVICES"))
                if not self._gpus:
                    nvml.nvmlShutdown()
        # The first call only starts the measurement.
        psutil.cpu_percent()

    def read(self) -> dict[str, float]:
        """The figures now, by name: percentages, megabytes (10^6 bytes) and watts. CPU use is since the last call."""
        memory = self._psutil.virtual_memory()
        figures = {
            "cpu_utilization_percentage": float(self._psutil.cpu_percent()),
            "system_memory_usage_megabytes": round(memory.used / _MEGABYTE, 1),
            "system_memory_usage_percentage": float(memory.percent),
        }
        for index, handle in enumerate(self._gpus):
            # A part of one (MIG) has no utilization, for example.
            of_gpu, nvml = f"gpu_{index}_", self._nvml
            with suppress(nvml.NVMLError):
                memory = nvml.nvmlDeviceGetMemoryInfo(handle)
                figures[f"{of_gpu}memory_usage_megabytes"] = round(memory.used / _MEGABYTE, 1)
                figures[f"{of_gpu}memory_usage_percentage"] = round(100 * memory.used / memory.total, 1)
            with suppress(nvml.NVMLError):
                figures[f"{of_gpu}utilization_percentage"] = float(nvml.nvmlDeviceGetUtilizationRates(handle).gpu)
            with suppress(nvml.NVMLError):
                figures[f"{of_gpu}power_usage_watts"] = nvml.nvmlDeviceGetPowerUsage(handle) / 1000
        return figures

    def close(self) -> None:
        """Release the GPUs."""
        if self._gpus:
            with suppress(self._nvml.NVMLError):
                self._nvml.nvmlShutdown()
