"""The environment inside a job: the only file of the runtime that reads or names environment variables."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurmtrain.errors import LaunchError
from slurmtrain.model.layout import AttemptDir, RunDir, SubmissionDir
from slurmtrain.model.plan import REDACTED, Plan
from slurmtrain.system.process import Process

# How a worker says "I was asked to stop, saved, and can go on": EX_TEMPFAIL of sysexits.h.
STOPPED = 75

_JOB = "SLURMTRAIN_JOB_ID"
_SUBMISSION = "SLURMTRAIN_SUBMISSION"
_ATTEMPT = "SLURMTRAIN_ATTEMPT"
_AFTER = "SLURMTRAIN_AFTER"
_FROM_START = "SLURMTRAIN_FROM_START"
_SINCE = "SLURMTRAIN_SINCE"
_RUN_DIR = "SLURMTRAIN_RUN_DIR"
_ATTEMPT_DIR = "SLURMTRAIN_ATTEMPT_DIR"
_PARAMS = "SLURMTRAIN_PARAMS"
_LOG_DIR = "SLURMTRAIN_LOG_DIR"
_AGENT_PID = "SLURMTRAIN_AGENT_PID"

# Variables of a job that must not leak into a job that is submitted from within it.
_OURS = (_JOB, _SUBMISSION, _ATTEMPT, _AFTER, _FROM_START, _SINCE, _RUN_DIR, _ATTEMPT_DIR, _PARAMS, _LOG_DIR,
         _AGENT_PID, "SLURMTRAIN_RUN_ID", "SLURMTRAIN_CHECKPOINT_DIR", "SLURMTRAIN_RESUME_FROM",
         "SLURMTRAIN_GPUS")  # fmt: skip
_FOREIGN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK",
            "ROLE_NAME", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # fmt: skip
_FOREIGN_PREFIXES = ("TORCHELASTIC_", "SUBMITIT_", "SLURM_", "SRUN_", "SLURMD_")
# What tells Slurm's commands where the cluster is, and who asks.
_KEPT = ("SLURM_CONF", "SLURM_JWT")


def scrubbed(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment without what belongs to a job that this process may itself be part of.

    A person's own SBATCH_* defaults stay, but not those that a job has from its own sbatch.
    """
    prefixes = (*_FOREIGN_PREFIXES, "SBATCH_") if "SLURM_JOB_ID" in environ else _FOREIGN_PREFIXES
    return {
        name: value
        for name, value in environ.items()
        if name in _KEPT or (name not in _OURS and name not in _FOREIGN and not name.startswith(prefixes))
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """What a submission hands to its node agents beside its files. ``attempt`` is the number of its first attempt."""

    submission: int
    attempt: int
    after: tuple[str, Process] | None = None
    from_start: bool = False
    since: float | None = None

    def variables(self) -> dict[str, str]:
        """As environment variables."""
        variables = {_SUBMISSION: str(self.submission), _ATTEMPT: str(self.attempt)}
        if self.after is not None:
            variables[_AFTER] = json.dumps({"run": self.after[0], "process": self.after[1].plain()})
        if self.from_start:
            variables[_FROM_START] = "1"
        if self.since is not None:
            variables[_SINCE] = repr(self.since)
        return variables


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """Which node of which attempt this process is the agent of. ``index`` counts from 0."""

    index: int
    host: str
    job_id: str
    restart: int
    executor: str
    launch: Launch

    @property
    def attempt(self) -> int:
        """The number of this attempt, as far as can be told from here."""
        return self.launch.attempt + self.restart

    def name(self, nodes: int) -> str:
        """The host's; the nodes of a local run share one, and are told apart by their index."""
        return f"{self.host}/{self.index}" if self.executor == "local" and nodes > 1 else self.host

    @property
    def from_start(self) -> bool:
        """Whether to begin anew: a job that was put back into the queue goes on from what it has saved."""
        return self.launch.from_start and self.restart == 0


def this_node() -> Node:
    """Read the agent's environment. Raises LaunchError outside a job."""
    environ = os.environ
    local = "SUBMITIT_LOCAL_GLOBALID" in environ
    if _SUBMISSION not in environ or not (local or "SLURM_NODEID" in environ):
        raise LaunchError("the node agent runs inside a job only; start one with 'slurmtrain submit'")
    after = json.loads(environ[_AFTER]) if _AFTER in environ else None
    launch = Launch(
        submission=int(environ[_SUBMISSION]),
        attempt=int(environ[_ATTEMPT]),
        after=(after["run"], Process.from_plain(after["process"])) if after else None,
        from_start=_FROM_START in environ,
        since=float(environ[_SINCE]) if _SINCE in environ else None,
    )
    if local:
        index, job_id, restart = environ["SUBMITIT_LOCAL_GLOBALID"], environ[_JOB], "0"
    else:
        # Unset at the first start.
        index, job_id, restart = environ["SLURM_NODEID"], slurm_job_id(environ), environ.get("SLURM_RESTART_COUNT", "0")
    return Node(
        index=int(index),
        host=socket.gethostname(),
        job_id=job_id,
        restart=int(restart),
        executor="local" if local else "slurm",
        launch=launch,
    )


def slurm_job_id(environ: Mapping[str, str]) -> str:
    """The job's id as squeue, sacct and scancel take it: ``<array>_<task>`` for an element of an array."""
    if "SLURM_ARRAY_JOB_ID" in environ:
        return f"{environ['SLURM_ARRAY_JOB_ID']}_{environ['SLURM_ARRAY_TASK_ID']}"
    return environ["SLURM_JOB_ID"]


def local_job(job_id: str) -> dict[str, str]:
    """How a local job learns its id, which no scheduler gives it."""
    return {_JOB: job_id}


def set_worker_environment(
    plan: Plan, attempt: AttemptDir, node: Node, *, resume_from: str | None, interface: str
) -> None:
    """Set what the workers of this node inherit: the user's variables, ours, and the network's."""
    run = attempt.run
    environ = os.environ
    environ.setdefault("PYTHONUNBUFFERED", "1")
    environ.pop(_FROM_START, None)
    environ["OMP_NUM_THREADS"] = str(plan.spec.resources.cpus_per_proc)
    environ["NCCL_SOCKET_IFNAME"] = f"={interface}"
    environ["GLOO_SOCKET_IFNAME"] = environ["TP_SOCKET_IFNAME"] = interface
    environ.update({name: value for name, value in plan.spec.env.items() if value != REDACTED})
    if node.executor == "local":
        _share_gpus(plan, node.index)
    environ.update(
        {
            _RUN_DIR: str(run.path),
            _ATTEMPT_DIR: str(attempt.path),
            _LOG_DIR: str(attempt.logs),
            _AGENT_PID: str(os.getpid()),
            _PARAMS: json.dumps(plan.spec.params),
            _ATTEMPT: str(node.attempt),
            **({_FROM_START: "1"} if node.from_start else {}),
            "SLURMTRAIN_RUN_ID": run.id,
            "SLURMTRAIN_CHECKPOINT_DIR": str(run.checkpoints),
            "SLURMTRAIN_RESUME_FROM": resume_from or "",
        }
    )
    # The handlers of torch elastic raise inside whatever runs; ours only set a flag, and must not be replaced.
    environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGQUIT"


def _share_gpus(plan: Plan, node: int) -> None:
    """Give each node of this machine its own GPUs; ``SLURMTRAIN_GPUS`` lists what the submitter could see."""
    count = plan.spec.resources.gpus_per_node
    visible = os.environ.get("SLURMTRAIN_GPUS", "").split(",")
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(visible[node * count : (node + 1) * count])


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """What a training process knows of where it runs. ``attempt`` is None outside a job."""

    rank: int
    local_rank: int
    world_size: int
    launched: bool
    attempt: AttemptDir | None
    submission: SubmissionDir | None
    number: int
    params: Mapping[str, Any]
    from_start: bool


def this_worker() -> Worker:
    """Read the worker's environment; outside any job, and under plain torchrun, it tells as much as there is."""
    environ = os.environ
    attempt = AttemptDir(Path(environ[_ATTEMPT_DIR])) if environ.get(_ATTEMPT_DIR) else None
    return Worker(
        rank=int(environ.get("RANK", "0")),
        local_rank=int(environ.get("LOCAL_RANK", "0")),
        world_size=int(environ.get("WORLD_SIZE", "1")),
        launched="RANK" in environ,
        attempt=attempt,
        submission=attempt.run.submission(int(environ[_SUBMISSION])) if attempt else None,
        number=int(environ.get(_ATTEMPT, "1")),
        params=json.loads(environ.get(_PARAMS, "{}")),
        from_start=_FROM_START in environ,
    )


def use_loopback() -> None:
    """Keep gloo from looking up this machine's name where one process talks only to itself."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


def facts_for_command(run: RunDir, attempt: int, resume_from: str | None) -> dict[str, str | None]:
    """What stands for the placeholders of a command."""
    return {
        "run_dir": str(run.path),
        "checkpoint_dir": str(run.checkpoints),
        "run_id": run.id,
        "attempt": str(attempt),
        "resume_from": resume_from,
    }
