"""The figures of one node, under the names that MLflow's own system metrics have (``mlflow/system_metrics``)."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from slurmtrain.runtime.preflight.facts.gpus import open_gpus

_MEGABYTE = 1e6


class Gauges:
    """Measures this node: processors and memory by psutil; the job's GPUs by NVML, where nvidia-ml-py is installed."""

    def __init__(self, environ: Mapping[str, str], nvml: Any | None) -> None:
        """Begin to measure.

        Args:
            environ: The environment of the ranks, which says what GPUs they can see.
            nvml: The module of nvidia-ml-py, or None.
        """
        # Imported here: agents of runs that measure nothing do without it.
        import psutil

        self._psutil = psutil
        self._nvml = nvml
        self._gpus = _gpu_handles(nvml, environ)
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
            figures |= {f"gpu_{index}_{name}": value for name, value in self._read_gpu(handle).items()}
        return figures

    def close(self) -> None:
        """Release the GPUs."""
        if self._gpus:
            with suppress(self._nvml.NVMLError):  # type: ignore[union-attr]
                self._nvml.nvmlShutdown()  # type: ignore[union-attr]

    def _read_gpu(self, handle: Any) -> dict[str, float]:
        """What a GPU has figures for; a part of one (MIG) has no utilization, for example."""
        nvml: Any = self._nvml
        figures: dict[str, float] = {}
        with suppress(nvml.NVMLError):
            memory = nvml.nvmlDeviceGetMemoryInfo(handle)
            figures["memory_usage_megabytes"] = round(memory.used / _MEGABYTE, 1)
            figures["memory_usage_percentage"] = round(100 * memory.used / memory.total, 1)
        with suppress(nvml.NVMLError):
            figures["utilization_percentage"] = float(nvml.nvmlDeviceGetUtilizationRates(handle).gpu)
        with suppress(nvml.NVMLError):
            figures["power_usage_watts"] = nvml.nvmlDeviceGetPowerUsage(handle) / 1000
        return figures


def _gpu_handles(nvml: Any | None, environ: Mapping[str, str]) -> list[Any]:
    """NVML's handles of the GPUs that the ranks can see; none where it does not answer."""
    if nvml is None:
        return []
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return []
    handles: list[Any] = []
    with suppress(nvml.NVMLError):
        handles = open_gpus(nvml, environ.get("CUDA_VISIBLE_DEVICES"))
    if not handles:
        with suppress(nvml.NVMLError):
            nvml.nvmlShutdown()
    return handles
