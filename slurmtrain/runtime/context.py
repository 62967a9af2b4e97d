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
from slurmtrain.model.layout import AttemptDir, RunDir
from slurmtrain.model.plan import REDACTED, Plan
from slurmtrain.system.process import Process

# How a worker says "I was asked to stop, saved, and can go on": EX_TEMPFAIL of sysexits.h.
STOPPED = 75

_JOB = "SLURMTRAIN_JOB_ID"
_RESTART = "SLURMTRAIN_RESTART"
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
_OURS = (_JOB, _RESTART, _ATTEMPT, _AFTER, _FROM_START, _SINCE, _RUN_DIR, _ATTEMPT_DIR, _PARAMS, _LOG_DIR, _AGENT_PID,
         "SLURMTRAIN_RUN_ID", "SLURMTRAIN_CHECKPOINT_DIR", "SLURMTRAIN_RESUME_FROM")  # fmt: skip
_FOREIGN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK",
            "ROLE_NAME", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # fmt: skip
_FOREIGN_PREFIXES = ("TORCHELASTIC_", "SUBMITIT_")


def scrubbed(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment without what belongs to a job that this process may itself be part of."""
    return {
        name: value
        for name, value in environ.items()
        if name not in _OURS and name not in _FOREIGN and not name.startswith(_FOREIGN_PREFIXES)
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """What a submission hands to its node agents beside the files of the attempt."""

    job_id: str
    attempt: int
    after: tuple[str, Process] | None = None
    from_start: bool = False
    since: float | None = None

    def variables(self) -> dict[str, str]:
        """As environment variables."""
        variables = {_JOB: self.job_id, _RESTART: "0", _ATTEMPT: str(self.attempt)}
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
    restart: int
    launch: Launch


def this_node() -> Node:
    """Read the agent's environment. Raises LaunchError outside a job."""
    environ = os.environ
    if _JOB not in environ or "SUBMITIT_LOCAL_GLOBALID" not in environ:
        raise LaunchError("the node agent runs inside a job only; start one with 'slurmtrain submit'")
    after = json.loads(environ[_AFTER]) if _AFTER in environ else None
    launch = Launch(
        job_id=environ[_JOB],
        attempt=int(environ[_ATTEMPT]),
        after=(after["run"], Process.from_plain(after["process"])) if after else None,
        from_start=_FROM_START in environ,
        since=float(environ[_SINCE]) if _SINCE in environ else None,
    )
    return Node(
        index=int(environ["SUBMITIT_LOCAL_GLOBALID"]),
        host=socket.gethostname(),
        restart=int(environ[_RESTART]),
        launch=launch,
    )


def set_worker_environment(
    plan: Plan, attempt: AttemptDir, node: Node, *, resume_from: str | None, interface: str
) -> None:
    """Set what the workers of this node inherit: the user's variables, ours, and the network's."""
    run = attempt.run
    environ = os.environ
    environ.setdefault("PYTHONUNBUFFERED", "1")
    environ["OMP_NUM_THREADS"] = str(plan.spec.resources.cpus_per_proc)
    environ["NCCL_SOCKET_IFNAME"] = f"={interface}"
    environ["GLOO_SOCKET_IFNAME"] = environ["TP_SOCKET_IFNAME"] = interface
    environ.update({name: value for name, value in plan.spec.env.items() if value != REDACTED})
    _share_gpus(plan, node.index)
    environ.update(
        {
            _RUN_DIR: str(run.path),
            _ATTEMPT_DIR: str(attempt.path),
            _LOG_DIR: str(attempt.logs),
            _AGENT_PID: str(os.getpid()),
            _PARAMS: json.dumps(plan.spec.params),
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
    number: int
    params: Mapping[str, Any]
    from_start: bool


def this_worker() -> Worker:
    """Read the worker's environment; outside any job, and under plain torchrun, it tells as much as there is."""
    environ = os.environ
    attempt_dir = environ.get(_ATTEMPT_DIR)
    return Worker(
        rank=int(environ.get("RANK", "0")),
        local_rank=int(environ.get("LOCAL_RANK", "0")),
        world_size=int(environ.get("WORLD_SIZE", "1")),
        launched="RANK" in environ,
        attempt=AttemptDir(Path(attempt_dir)) if attempt_dir else None,
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
