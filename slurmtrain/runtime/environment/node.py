"""Which node and which job this agent is on, as their scheduler says it."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from slurmtrain.errors import LaunchError
from slurmtrain.model.hostlist import expand_hostlist
from slurmtrain.model.interruption.growth import Stage
from slurmtrain.model.run.layout import SubmissionDir
from slurmtrain.runtime.environment import variables
from slurmtrain.runtime.environment.launch import Launch, read_launch
from slurmtrain.system.owned_files import open_directory


def expected_hosts(nodes: int) -> dict[int, str]:
    """Slurm's names for an attempt's nodes, for nodes that never report one; empty if Slurm does not give them."""
    # The nodes of a step are sorted by name, even if another component's come first.
    count = os.environ.get("SLURM_HET_SIZE", "")
    names = [f"SLURM_JOB_NODELIST_HET_GROUP_{number}" for number in range(int(count))] if count.isdecimal() else ()
    try:
        hosts = [
            host for name in names or ("SLURM_STEP_NODELIST",) for host in expand_hostlist(os.environ.get(name, ""))
        ]
    except ValueError:
        hosts = []
    return dict(enumerate(hosts)) if len(hosts) == nodes else {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """The node and attempt whose agent this process is. ``index`` counts from 0, of ``count`` nodes.

    ``peers``: the names of all nodes; empty: as Slurm says (:func:`expected_hosts`).
    """

    index: int
    count: int
    host: str
    job_id: str
    restart: int
    executor: str
    submission: int
    launch: Launch
    peers: tuple[str, ...] = ()

    @property
    def hosts(self) -> dict[int, str]:
        """The names of the attempt's nodes, as far as they are known."""
        return dict(enumerate(self.peers)) if self.peers else expected_hosts(self.count)

    def at(self, stage: Stage) -> Node:
        """The same node, as the other nodes of a ``stage`` know it. It takes part in that stage."""
        place = stage.place_of(self.index)
        assert place is not None
        return replace(self, index=place, count=len(stage.roster), peers=tuple(stage.hosts))

    @property
    def attempt(self) -> int:
        """The number of this attempt, as far as this node knows."""
        return self.launch.attempt + self.restart

    def name(self, nodes: int) -> str:
        """The host's name. The nodes of a local run share one host, so their index is appended."""
        return f"{self.host}/{self.index}" if self.executor == "local" and nodes > 1 else self.host

    @property
    def from_start(self) -> bool:
        """Whether to start from the beginning: a requeued job continues from its checkpoint."""
        return self.launch.from_start and self.restart == 0


def this_node(submission: SubmissionDir) -> Node:
    """This agent's node: from the environment, which the job's scheduler sets, and from its submission's files.

    Raises LaunchError outside a job, and if the submission cannot be read.
    """
    environ = os.environ
    local = "SUBMITIT_LOCAL_GLOBALID" in environ
    if not (local or "SLURM_NODEID" in environ):
        raise LaunchError("the node agent runs only inside a job; start one with 'slurmtrain submit'")
    launch = read_launch(submission)
    if launch is None:
        raise LaunchError(f"there is no {submission.launch}; is the run directory visible on this node?")
    if local:
        index, job_id, restart = environ["SUBMITIT_LOCAL_GLOBALID"], environ[variables.JOB_ID], "0"
        count = environ["SUBMITIT_LOCAL_NTASKS"]
    else:
        # Unset at the first start.
        index, job_id, restart = environ["SLURM_NODEID"], slurm_job_id(environ), environ.get("SLURM_RESTART_COUNT", "0")
        count = environ.get("SLURM_STEP_NUM_NODES") or environ.get("SLURM_NNODES", "1")
    if launch.pack is not None:
        # Each run of a pack has an agent of its own, on the job's only node.
        index, count = "0", "1"
    return Node(
        index=int(index),
        count=int(count),
        # Slurm's name for a node may differ from its host name, and only Slurm's name can be excluded.
        host=(None if local else environ.get("SLURMD_NODENAME")) or socket.gethostname(),
        job_id=job_id,
        restart=int(restart),
        executor="local" if local else "slurm",
        submission=submission.number,
        launch=launch,
    )


def slurm_job_id(environ: Mapping[str, str]) -> str:
    """The job's id as squeue, sacct and scancel take it: ``<array>_<task>`` for an element of an array."""
    if "SLURM_ARRAY_JOB_ID" in environ:
        return f"{environ['SLURM_ARRAY_JOB_ID']}_{environ['SLURM_ARRAY_TASK_ID']}"
    return environ["SLURM_JOB_ID"]


def enter_element(elements: Path, *, packed: bool = False) -> SubmissionDir:
    """The submission whose job is this element of an array.

    Args:
        elements: The directory with a link for each element, or for each run of its pack.
        packed: Whether each task of the job is the agent of a run of its own.

    Raises:
        LaunchError: There is no such submission.
    """
    index = os.environ.get("SLURM_ARRAY_TASK_ID", "")
    if packed:
        index = f"{index}.{os.environ.get('SLURM_PROCID', '')}"
    try:
        handle = open_directory(elements)
        try:
            submission = SubmissionDir(Path(os.readlink(index, dir_fd=handle)))
        finally:
            os.close(handle)
    except OSError as error:
        raise LaunchError(f"element {index} of a job array has no run: there is no link in {elements}") from error
    return submission


def this_slurm_job() -> tuple[str, int]:
    """The id of the Slurm job that this process belongs to, and how often that job was restarted."""
    # SLURM_RESTART_COUNT is unset at the first start.
    return slurm_job_id(os.environ), int(os.environ.get("SLURM_RESTART_COUNT", "0"))


def cpus_of_job() -> int | None:
    """How many CPUs of this node Slurm gave to the job; None if it does not say."""
    text = os.environ.get("SLURM_CPUS_ON_NODE", "")
    return int(text) if text.isdecimal() else None
