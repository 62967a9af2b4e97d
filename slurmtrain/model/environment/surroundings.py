"""Which settings of the shell that submits a run count beside its spec, which comes first. Pure.

Variables outrank the lines of a batch script (sbatch(1), "INPUT ENVIRONMENT VARIABLES", 22.05 to 25.11), and a job has
the environment of the shell that submitted it. docs/slurm.md has the reasons for what becomes of each.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

PREFIX = "SBATCH_"
# The variable of any other option has the option's own name.
_NAMES = {
    "ARRAY_INX": "array", "BURST_BUFFER": "bb", "CPU_FREQ_REQ": "cpu-freq", "DEBUG": "verbose", "MEM_PER_NODE": "mem",
    "REQ_SWITCH": "switches", "SEGMENT_SIZE": "segment", "TIMELIMIT": "time", "WAIT4SWITCH": "switches",
}  # fmt: skip
# Options that say where a job goes and who pays for it: a person's or a site's default, if the spec names none.
PLACES = frozenset({"account", "bb", "constraint", "network", "partition", "qos", "reservation", "segment", "wckey"})
# Keys of the spec that a person may miss who has set one of these options by a variable, which has no effect.
_KEYS = {
    "cpus-per-gpu": "resources.cpus_per_proc", "gpus": "resources.gpus_per_node",
    "gpus-per-node": "resources.gpus_per_node", "gpus-per-socket": "resources.gpus_per_node",
    "gpus-per-task": "resources.gpus_per_node", "mem": "resources.mem", "mem-per-cpu": "resources.mem",
    "mem-per-gpu": "resources.mem", "time": "resources.time", "tres-per-task": "resources.gpus_per_node",
}  # fmt: skip
# Options that slurmtrain sets whatever the spec says, or that concern sbatch's own output and environment.
_OURS = frozenset(
    {"array", "clusters", "error", "export", "get-user-env", "ignore-pbs", "input", "job-name", "mem-bind", "no-kill",
     "no-requeue", "open-mode", "output", "requeue", "signal", "umask", "verbose", "wait"}
)  # fmt: skip
# Variables that name GPUs of the machine where a run is submitted; Slurm gives the job other GPUs.
GPU_VARIABLES = ("CUDA_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL", "HIP_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES",
                 "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")  # fmt: skip
# Variables that reach the ranks, and decide which code they run or how.
_TELLING = ("PYTHONPATH", "PYTHONHOME", "PYTHONOPTIMIZE", "PYTHONWARNINGS", "LD_PRELOAD", "MKL_NUM_THREADS",
            "NUMEXPR_NUM_THREADS", "OPENBLAS_NUM_THREADS", "OMP_PLACES", "OMP_PROC_BIND", "GOMP_CPU_AFFINITY",
            "KMP_AFFINITY")  # fmt: skip


def option_of(variable: str) -> str:
    """The option of sbatch that a variable stands for, or would; empty if it does not begin as these do."""
    if not variable.startswith(PREFIX):
        return ""
    name = variable.removeprefix(PREFIX)
    return _NAMES.get(name, name.lower().replace("_", "-"))


def places(environ: Mapping[str, str], own: Collection[str]) -> dict[str, str]:
    """The variables by which this environment says where a job goes, as far as the spec leaves that open.

    Args:
        environ: the environment of the command that submits.
        own: the options of sbatch that the spec sets.
    """
    return {
        name: value
        for name, value in sorted(environ.items())
        if (option := option_of(name)) in PLACES and option not in own and value.isprintable() and value.strip()
    }


def options(variables: Mapping[str, str]) -> dict[str, str]:
    """Values of options of sbatch, by the variables that stand for them; other variables are left out."""
    return {option: value for name, value in variables.items() if (option := option_of(name)) in PLACES}


def telling(environ: Mapping[str, str], own: Collection[str]) -> dict[str, str]:
    """The variables that decide what the ranks run or how, unless the spec sets them.

    Args:
        environ: the environment of the command that submits.
        own: the variables that the spec sets.
    """
    return {name: environ[name] for name in _TELLING if environ.get(name) and name not in own}


def without_effect(environ: Mapping[str, str], own: Collection[str], options: Collection[str]) -> Iterator[str]:
    """Variables that sbatch would have followed and that have no effect, each with what to write instead.

    Variables that stand for a setting of the spec, or that slurmtrain sets itself, are left out.

    Args:
        environ: the environment of the command that submits.
        own: the options of sbatch that the spec sets, and its keys that have a value.
        options: all options of sbatch.
    """
    for name, value in sorted(environ.items()):
        option = option_of(name)
        if option == "clusters" or name == "SLURM_CLUSTERS":
            yield f"{name}={value} (runs go to the cluster of this machine)"
        elif option in own or option in PLACES or option in _OURS or option not in options:
            continue
        elif (key := _KEYS.get(option, f"slurm.{option}")) and key not in own:
            yield f"{name}={value} (write {key} into the spec)"
    if environ.get("CUDA_VISIBLE_DEVICES"):
        yield "CUDA_VISIBLE_DEVICES (Slurm chooses the GPUs)"


def describe(variables: Mapping[str, str]) -> str:
    """Variables that count, in a line, with the options that they stand for."""
    return ", ".join(
        f"{name}={value}" + (f" (--{option})" if (option := option_of(name)) else "")
        for name, value in variables.items()
    )
