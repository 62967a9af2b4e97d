"""What a node, its GPUs and a run's processes on it use: figures that :class:`~.monitor.Sampler` notes."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from slurmtrain.model.diagnosis.node_load import ENERGY, read_sample
from slurmtrain.runtime.preflight.facts.gpus import open_gpus
from slurmtrain.system.process import ResourceUse, descend, read_table, use_of

_MEGABYTE = 1e6
# More than a line of sixteen GPUs.
_TAIL_BYTES = 8192
_CGROUPS = Path("/sys/fs/cgroup")
# The part of Slurm's cgroups (version 2) that has one task: runs that share a job are tasks of their own.
_OF_TASK = re.compile(r"0::(/\S+/job_\d+/step_\w+/user/task_\w+)$", re.MULTILINE)
# Memory that the kernel cannot take back, other than pages of files that are merely cached (cgroup-v2, memory.stat).
_HELD = frozenset({"anon", "shmem", "slab_unreclaimable", "kernel_stack", "pagetables", "sock"})


class Gauges:
    """Measures this node: processors and memory by psutil; the job's GPUs by NVML, where nvidia-ml-py is installed.

    Figures of the node have the names of MLflow's own system metrics (``mlflow/system_metrics``); ``job_`` figures are
    of the run's own processes on it.
    """

    def __init__(self, environ: Mapping[str, str], nvml: Any | None, notes: Path | None = None) -> None:
        """Begin to measure.

        Args:
            environ: The environment of the ranks, which says what GPUs they can see.
            nvml: The module of nvidia-ml-py, or None.
            notes: What was noted of this node in the same attempt: energy is counted on from there.
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
        before = counted_energy(notes) if notes is not None and self._gpus else {}
        self._energy = [EnergyMeter(nvml, handle, before.get(index, 0.0)) for index, handle in enumerate(self._gpus)]
        self._own = OwnUse(os.getpid())
        # The first call only starts the measurement.
        psutil.cpu_percent()

    def read(self) -> dict[str, float]:
        """The figures now, by name: percentages, megabytes (10^6 bytes), watts, joules and CPU cores.

        CPU use is since the last call, energy since the attempt began.
        """
        memory = self._psutil.virtual_memory()
        figures = {
            "cpu_utilization_percentage": float(self._psutil.cpu_percent()),
            "system_memory_usage_megabytes": round(memory.used / _MEGABYTE, 1),
            "system_memory_usage_percentage": float(memory.percent),
            **self._own.read(),
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
            power_w = None
            with suppress(nvml.NVMLError):
                power_w = figures[f"{of_gpu}power_usage_watts"] = nvml.nvmlDeviceGetPowerUsage(handle) / 1000
            if (joules := self._energy[index].read(power_w)) is not None:
                figures[f"{of_gpu}energy_joules"] = round(joules, 1)
        return figures

    def close(self) -> None:
        """Release the GPUs."""
        if self._gpus:
            with suppress(self._nvml.NVMLError):
                self._nvml.nvmlShutdown()


class EnergyMeter:
    """The energy that a GPU has taken since this began: by its own counter, or else summed from its power."""

    def __init__(self, nvml: Any, handle: Any, before: float = 0.0) -> None:
        """Begin to measure the GPU with this ``handle`` of ``nvml``; ``before``: what counts already, in joules."""
        self._nvml = nvml
        self._handle = handle
        self._joules = before
        self._counted = self._count()
        self._last: tuple[float, float] | None = None

    def read(self, power_w: float | None) -> float | None:
        """Joules since this began; None if the GPU tells neither its energy nor its power.

        Args:
            power_w: Its power now, in watts; None: unknown.
        """
        now, counted = time.monotonic(), self._count()
        if counted is not None and self._counted is not None:
            # A counter that fell began again at 0, with the driver.
            self._joules += counted - self._counted if counted >= self._counted else counted
        elif power_w is not None and self._last is not None:
            at, before_w = self._last
            self._joules += (before_w + power_w) / 2 * (now - at)
        self._counted = counted
        self._last = None if power_w is None else (now, power_w)
        return None if counted is None and power_w is None else self._joules

    def _count(self) -> float | None:
        """Joules since the driver was loaded; None on GPUs without a counter (before Volta)."""
        with suppress(self._nvml.NVMLError, AttributeError):
            return float(self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle)) / 1000
        return None


def counted_energy(notes: Path) -> dict[int, float]:
    """The joules of each GPU by the last line of a node's ``notes``: the ranks have been started before."""
    from slurmtrain.system.journal_files import last_records

    samples = (read_sample(record) for record in reversed(last_records(notes, _TAIL_BYTES)))
    return next((sample.of_gpus(ENERGY) for sample in samples if sample is not None), {})


class OwnUse:
    """Memory and CPU time of the processes of one run on this node: a process and all of its descendants.

    Memory is what the kernel would have to find for them: as it counts in Slurm's cgroup for the task, if there is one,
    else what processes have for themselves, and the largest part that one of them shares, such as libraries.
    """

    def __init__(self, pid: int, cgroup: Path | None = None) -> None:
        """Begin to measure.

        Args:
            pid: The process, whose own CPU time is left out: an agent only watches.
            cgroup: The cgroup that has just these processes; None: the one of Slurm's task, if there is one.
        """
        self._pid = pid
        self._cgroup = cgroup or _cgroup_of_task()
        self._at = time.monotonic()
        self._cpu_s = {each: use.cpu_s for each, use in self._read().items()}

    def read(self) -> dict[str, float]:
        """Megabytes now, and the CPU cores that were busy on average since the last call."""
        uses, now = self._read(), time.monotonic()
        # A new process has had all of its time since then.
        busy_s = sum(max(0.0, use.cpu_s - self._cpu_s.get(pid, 0.0)) for pid, use in uses.items() if pid != self._pid)
        took_s, self._at = now - self._at, now
        self._cpu_s = {pid: use.cpu_s for pid, use in uses.items()}
        held = self._held()
        if held is None:
            shared = max((use.shared_bytes for use in uses.values()), default=0)
            held = shared + sum(use.own_bytes for use in uses.values())
        figures = {"job_memory_usage_megabytes": round(held / _MEGABYTE, 1)}
        return {**figures, "job_cpu_cores": round(busy_s / took_s, 3)} if took_s > 0 else figures

    def _read(self) -> dict[int, ResourceUse]:
        pids = [self._pid, *(entry.pid for entry in descend(read_table(), self._pid) if not entry.ended)]
        uses = {pid: use_of(pid) for pid in pids}
        return {pid: use for pid, use in uses.items() if use is not None}

    def _held(self) -> int | None:
        """Bytes by the cgroup; None without one, or if it does not count memory."""
        if self._cgroup is None:
            return None
        with suppress(OSError, ValueError):
            pairs = (line.split() for line in (self._cgroup / "memory.stat").read_text(encoding="ascii").splitlines())
            amounts = {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[0] in _HELD}
            if "anon" in amounts:
                return sum(amounts.values())
        return None


def _cgroup_of_task() -> Path | None:
    """Slurm's cgroup with this task alone, where this process is in one that counts memory."""
    with suppress(OSError):
        if match := _OF_TASK.search(Path("/proc/self/cgroup").read_text(encoding="utf-8")):
            folder = _CGROUPS / match[1].lstrip("/")
            return folder if (folder / "memory.stat").exists() else None
    return None
