"""What an attempt really has on this node: software, machine, variables. Noted once, while its ranks start."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import subprocess
import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from slurmtrain.model.experiment.plan import REDACTED, Plan
from slurmtrain.model.experiment.values import is_secret_variable
from slurmtrain.model.run.events.agent_events import EnvironmentNoted
from slurmtrain.model.run.layout import RunDir
from slurmtrain.model.urls import redact
from slurmtrain.runtime.code.packages import package_directories, read_software
from slurmtrain.runtime.environment.variables import SETUP_PYTHON, environment_of_tools
from slurmtrain.runtime.job.torch_private import cuda_of
from slurmtrain.runtime.preflight.facts import gpus
from slurmtrain.runtime.preflight.facts.cpus import read_field
from slurmtrain.system.files import make_new_directory, write_atomically
from slurmtrain.system.journal import Journal

# What libraries for training and for linear algebra go by; the network's addresses and interfaces differ on each node.
_PREFIXES = (
    "NCCL_", "CUDA_", "CUBLAS_", "CUDNN_", "TORCH_", "TORCHINDUCTOR_", "PYTORCH_", "OMP_", "MKL_", "OPENBLAS_", "KMP_",
    "GLOO_", "UCX_", "FI_", "PYTHON", "LD_LIBRARY_PATH", "LD_PRELOAD", "XLA_", "HSA_", "ROCR_", "HIP_",
)  # fmt: skip
_OF_A_NODE = frozenset({"NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"})
_MOST_CHARACTERS = 2000
_SLURM_TIMEOUT_S = 10.0
# The wheels of cuDNN that torch needs.
_CUDNN = re.compile(r"nvidia-cudnn-cu\d+")


@dataclass(frozen=True, slots=True)
class NotedNode:
    """A node whose environment is noted: of the run, its number, the plan, and the environment of its ranks."""

    run: RunDir
    number: int
    plan: Plan
    environ: Mapping[str, str]


def note_environment(journal: Journal, node: NotedNode) -> threading.Thread:
    """Note the environment of a node in its journal, in a thread: packages may be on a slow file system.

    Args:
        journal: The node's.
        node: The node.
    """

    def note() -> None:
        # Nothing depends on it: an environment that cannot be read, or a full disk, must not end a run.
        with contextlib.suppress(Exception):
            journal.write(measure_environment(node))

    thread = threading.Thread(target=note, name="environment", daemon=True)
    thread.start()
    return thread


def measure_environment(node: NotedNode) -> EnvironmentNoted:
    """What a node has; its packages are kept in the run's directory, once for all nodes that have the same.

    Args:
        node: The node.

    Raises:
        OSError: The run's directory cannot be written.
    """
    run, environ = node.run, node.environ
    python = Path(node.plan.python)
    software = read_software(python)
    nvml = gpus.load_nvml() if node.plan.spec.resources.gpus_per_node else None
    packages = {name: package.version for name, package in software.packages.items()}
    place = run.software(software.hash)
    if not place.exists():
        # Without its parents: the runs root may have been renamed.
        with contextlib.suppress(FileExistsError):
            make_new_directory(place.parent)
        write_atomically(place, software.to_text().encode())
    versions = {
        "python": software.version,
        "torch": packages.get("torch"),
        "cuda": next(filter(None, (cuda_of(each / "torch") for each in package_directories(python))), None),
        "cudnn": next((version for name, version in packages.items() if _CUDNN.fullmatch(name)), None),
        "driver": gpus.driver_version(nvml),
        "slurm": _slurm_version() if node.number == 0 and "SLURM_JOB_ID" in environ else None,
    }
    kib = read_field("/proc/meminfo", "MemTotal").split(" ")[0]
    gpu_types = Counter(gpus.names_of_gpus(nvml, environ.get("CUDA_VISIBLE_DEVICES")))
    # The same text for nodes of one kind.
    machine = {
        "cpu": read_field("/proc/cpuinfo", "model name") or platform.machine(),
        "cores": str(os.cpu_count() or ""),
        # What the kernel reserves differs by a few MiB between starts.
        "memory": f"{round(int(kib) / 2**20)} GiB" if kib.isdigit() else "",
        "gpus": ", ".join(f"{count} x {name}" for name, count in sorted(gpu_types.items())),
        "kernel": platform.release(),
        "os": read_field("/etc/os-release", "PRETTY_NAME", "=").strip('"'),
    }
    # The run's own copy of its code is elsewhere in each run.
    variables = {name: text.replace(str(run.path), "{run_dir}") for name, text in relevant_variables(environ).items()}
    return EnvironmentNoted(
        node=node.number,
        software=software.hash,
        versions={name: version for name, version in versions.items() if version},
        machine={name: text for name, text in machine.items() if text},
        variables=variables,
        interpreter=environ.get(SETUP_PYTHON, ""),
    )


def relevant_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that can change what training computes, or how fast, without secrets, in alphabetical order."""
    return {
        name: REDACTED if is_secret_variable(name) else redact(value)[:_MOST_CHARACTERS]
        for name, value in sorted(environ.items())
        if name.startswith(_PREFIXES) and name not in _OF_A_NODE
    }


def _slurm_version() -> str | None:
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        completed = subprocess.run(
            ["scontrol", "--version"],
            env=environment_of_tools(),
            capture_output=True,
            text=True,
            timeout=_SLURM_TIMEOUT_S,
            check=False,
        )
        return completed.stdout.strip().removeprefix("slurm ") or None
    return None
