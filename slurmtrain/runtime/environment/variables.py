"""The names of the environment variables of a job, and environments of processes that are no part of one."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from slurmtrain.model.experiment.plan import Plan

# Seconds after a stop signal at which a rank ends itself: later than an agent that is alive would kill it.
FORCED_EXIT_S = 120.0

JOB_ID = "SLURMTRAIN_JOB_ID"
SUBMISSION = "SLURMTRAIN_SUBMISSION"
ATTEMPT = "SLURMTRAIN_ATTEMPT"
FROM_START = "SLURMTRAIN_FROM_START"
RESUME_FROM = "SLURMTRAIN_RESUME_FROM"
RESUME_DIR = "SLURMTRAIN_RESUME_DIR"
RESUME_TAG = "SLURMTRAIN_RESUME_TAG"
RUN_DIR = "SLURMTRAIN_RUN_DIR"
ATTEMPT_DIR = "SLURMTRAIN_ATTEMPT_DIR"
PARAMS = "SLURMTRAIN_PARAMS"
# In its place, where the parameters are more than a variable can hold: the file that has them.
PARAMS_FILE = "SLURMTRAIN_PARAMS_FILE"
# Characters of the parameters that go into a variable; Linux takes 128 KiB.
LONGEST_PARAMS = 100_000
LOG_DIR = "SLURMTRAIN_LOG_DIR"
AGENT_PID = "SLURMTRAIN_AGENT_PID"
HEARTBEAT = "SLURMTRAIN_HEARTBEAT"
STOP_SIGNAL = "SLURMTRAIN_STOP_SIGNAL"
FORCED_EXIT = "SLURMTRAIN_FORCED_EXIT_S"
ROUND = "SLURMTRAIN_ROUND"
# Who starts the ranks, as in the spec; read by rank_main.py too.
LAUNCHER = "SLURMTRAIN_LAUNCHER"
# The number of this node, which names its log; read by rank_main.py.
NODE = "SLURMTRAIN_NODE"
# How many files a rank may open; read by rank_main.py.
OPEN_FILES = "SLURMTRAIN_OPEN_FILES"
CPUS = "SLURMTRAIN_CPUS"
# How the environment of a command differs from its agent's: ranks.py; applied by rank_main.py.
CHANGES = "SLURMTRAIN_CHANGES"
WORKDIR = "SLURMTRAIN_WORKDIR"
CODE_DIR = "SLURMTRAIN_CODE_DIR"
# What makes runs repeatable: read by scripts without a session, too.
SEED = "SLURMTRAIN_SEED"
DETERMINISTIC = "SLURMTRAIN_DETERMINISTIC"
# Read by scripts without a session, too.
ACCUMULATION = "SLURMTRAIN_ACCUMULATION"
GPUS = "SLURMTRAIN_GPUS"
HOME = "SLURMTRAIN_HOME"
HOME_SECRET = "SLURMTRAIN_HOME_SECRET"  # noqa: S105 (the name of a variable)
# Of a second job of a run: the attempt that its agents could join, and the number of the first of them.
EXTENDS = "SLURMTRAIN_EXTENDS"
# What the shell of setup leaves for the agents: that a line failed, as "CODE LINE ATTEMPT"; the directory and Python
# that it has changed to; the variables of Python that it has made for the ranks, and which there are.
SETUP_FAILED = "SLURMTRAIN_SETUP_FAILED"
SETUP_DIR = "SLURMTRAIN_SETUP_DIR"
SETUP_PYTHON = "SLURMTRAIN_PYTHON"
RANK_VARIABLES = "SLURMTRAIN_RANK_VARIABLES"
OF_RANKS = "SLURMTRAIN_RANK_"
# What a process runs for a node beside its ranks: "setup_node", "teardown", or a sidecar.
HELPER = "SLURMTRAIN_HELPER"
# The attempt whose setup has started a process.
SETUP_OF = "SLURMTRAIN_SETUP_OF"

# Variables of a job that must not leak into a job submitted from within it.
_OURS = (JOB_ID, SUBMISSION, ATTEMPT, FROM_START, RUN_DIR, ATTEMPT_DIR, PARAMS, LOG_DIR, AGENT_PID, HEARTBEAT,
         STOP_SIGNAL, FORCED_EXIT, ROUND, LAUNCHER, NODE, OPEN_FILES, CPUS, CHANGES, HOME, HOME_SECRET, WORKDIR,
         CODE_DIR, EXTENDS, SEED, DETERMINISTIC, ACCUMULATION, RESUME_FROM, RESUME_DIR, RESUME_TAG, "SLURMTRAIN_RUN_ID",
         "SLURMTRAIN_CHECKPOINT_DIR", GPUS, "SLURMTRAIN_NODE_RANK", "SLURMTRAIN_NODES",
         "SLURMTRAIN_PROCS_PER_NODE", "SLURMTRAIN_WORLD_SIZE", "SLURMTRAIN_MASTER_ADDR", "SLURMTRAIN_MASTER_PORT",
         "SLURMTRAIN_HOSTFILE", "SLURMTRAIN_FIRST_RANK", SETUP_FAILED, SETUP_DIR, SETUP_PYTHON, SETUP_OF,
         HELPER,
         PARAMS_FILE)  # fmt: skip
_FOREIGN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK",
            "ROLE_NAME", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "NNODES", "NPROC_PER_NODE",
            "PET_MASTER_ADDR", "PET_MASTER_PORT", "PET_NODE_RANK", "PET_NNODES", "PET_NPROC_PER_NODE",
            "PET_RDZV_ENDPOINT", "PET_LOCAL_ADDR", "PET_SIGNALS_TO_HANDLE",
            "TORCH_ELASTIC_SHUTDOWN_TIMEOUT")  # fmt: skip
# What counts of SBATCH_* is in the batch script (:mod:`slurmtrain.model.environment`).
_FOREIGN_PREFIXES = (OF_RANKS, "TORCHELASTIC_", "SUBMITIT_", "SLURM_", "SRUN_", "SLURMD_", "SBATCH_")
# These show Slurm's commands where the cluster is, and who the user is.
_KEPT = ("SLURM_CONF", "SLURM_JWT")
# With these, a Python that has done its work waits for a person, or runs a file of theirs first.
_INTERACTIVE = ("PYTHONINSPECT", "PYTHONSTARTUP")

# The variables of Python that this process was started with, once it has changed them for its ranks.
_own_python: dict[str, str] = {}
_has_changed: list[bool] = []


def scrubbed(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment without what would outrank a spec, or belongs to a job that this process may be part of."""
    dropped = {*_OURS, *_FOREIGN, *_INTERACTIVE}
    return {
        name: value
        for name, value in environ.items()
        if name in _KEPT or (name not in dropped and not name.startswith(_FOREIGN_PREFIXES))
    }


def take_variable(name: str) -> str:
    """The value of the variable ``name``, which processes that this one starts no longer have; empty without it."""
    return os.environ.pop(name, "")


def is_extension() -> bool:
    """Whether this process is an agent of a second job, which brings nodes to an attempt of another one."""
    return bool(os.environ.get(EXTENDS))


def environment_of_agent() -> Mapping[str, str]:
    """The environment of this process, as its ranks inherit it."""
    return os.environ


def environment_of_helper() -> dict[str, str]:
    """The environment of a process that helps this one: its own, so that it finds slurmtrain in the same place."""
    package_parent = str(Path(__file__).parents[3])
    own = with_own_python(os.environ)
    path = own.get("PYTHONPATH")
    return {**own, "PYTHONPATH": package_parent + (os.pathsep + path if path else "")}


def with_own_python(environ: Mapping[str, str]) -> dict[str, str]:
    """An environment for a process with the Python of this one: its variables of Python, not the ranks'."""
    if not _has_changed:
        return dict(environ)
    return {**{name: value for name, value in environ.items() if not name.startswith("PYTHON")}, **_own_python}


def keep_own_python() -> None:
    """Remember the variables of Python of this process, which is about to change them for its ranks."""
    if not _has_changed:
        _own_python.update({name: value for name, value in os.environ.items() if name.startswith("PYTHON")})
        _has_changed.append(True)


def environment_of_tools() -> dict[str, str]:
    """The environment of system tools whose output is parsed: their messages are not translated."""
    # A process may have been started without a PATH.
    return {"PATH": os.defpath, **os.environ, "LC_ALL": "C"}


def use_loopback() -> None:
    """Keep gloo from looking up this machine's name if a single process only talks to itself."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


# --- which GPUs are whose: of the runs of a pack, of a local run, and of its nodes ------------------------------------
def take_gpus(count: int, slot: int) -> None:
    """Let this process see only its own of the job's GPUs.

    Args:
        count: How many each run of the pack has.
        slot: Which of the runs this is, from 0.

    Raises:
        LaunchError: The job has too few.
    """
    if not count:
        return
    # Without it, as where Slurm knows no device files, CUDA numbers all GPUs of the node.
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    begin, end = slot * count, (slot + 1) * count
    names = [str(number) for number in range(end)] if visible is None else visible.split(",")
    if len(names) < end:
        from slurmtrain.errors import LaunchError

        raise LaunchError(
            f"run {slot} of the pack needs GPUs {begin} to {end - 1} of its job, but the job has {visible!r}"
        )
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(names[begin:end])


def local_job(job_id: str, gpus: Sequence[str]) -> dict[str, str]:
    """The variables that give a local job its id and its GPUs, since no scheduler does.

    Args:
        job_id: the id.
        gpus: the names of the GPUs, as CUDA_VISIBLE_DEVICES has them.
    """
    return {JOB_ID: job_id, GPUS: ",".join(gpus)}


def local_gpus() -> list[str]:
    """The GPUs that the submitter of a local run could see, as CUDA_VISIBLE_DEVICES names them."""
    return [name for name in os.environ.get(GPUS, "").split(",") if name]


def set_local_gpus(names: Sequence[str]) -> None:
    """Let this run use only some of these GPUs, from now on."""
    os.environ[GPUS] = ",".join(names)


def gpus_of_node(plan: Plan, node: int) -> dict[str, str]:
    """Assign each node of a local run its own GPUs, from ``SLURMTRAIN_GPUS``, the GPUs that the submitter could see."""
    resources = plan.spec.resources
    first = sum(resources.of_node(other).gpus_per_node for other in range(node))
    own = local_gpus()[first : first + resources.of_node(node).gpus_per_node]
    return {"CUDA_VISIBLE_DEVICES": ",".join(own)}
