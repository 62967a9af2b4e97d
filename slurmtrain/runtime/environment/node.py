"""Which node and which job this agent is on, as their scheduler, the submission and the batch script say it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slurmtrain.errors import LaunchError, PathError
from slurmtrain.model.experiment.launcher import RANKS
from slurmtrain.model.hostlist import expand_hostlist
from slurmtrain.model.interruption.members import Stage
from slurmtrain.model.run.layout import AttemptDir, SubmissionDir
from slurmtrain.runtime.environment import variables
from slurmtrain.system.files import read_json
from slurmtrain.system.owned_files import open_directory

if TYPE_CHECKING:
    from slurmtrain.model.experiment.plan import Plan
    from slurmtrain.model.experiment.sweep import Pack
    from slurmtrain.model.interruption.interval import InterruptionStats


# Begins the names of variables with the nodes of components, before the component's number.
_COMPONENT_NODES = "SLURM_JOB_NODELIST_HET_GROUP_"


def expected_hosts(nodes: int) -> dict[int, str]:
    """Slurm's names for an attempt's nodes, for nodes that never report one; empty if Slurm does not give them."""
    # The nodes of a step are sorted by name, even if another component's come first.
    count = os.environ.get("SLURM_HET_SIZE", "")
    names = [f"{_COMPONENT_NODES}{number}" for number in range(int(count))] if count.isdecimal() else ()
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

    ``peers``: the names of all nodes; empty: as Slurm says (:func:`expected_hosts`). ``partition``: its job's, or its
    component's in a heterogeneous job; empty: unknown, or a local job.
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
    partition: str = ""

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
        raise LaunchError("the node agent only runs inside a job; submit one with 'slurmtrain submit'")
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
    # Slurm's name for a node may differ from its host name, and only Slurm's name can be excluded.
    host = (None if local else environ.get("SLURMD_NODENAME")) or socket.gethostname()
    return Node(
        index=int(index),
        count=int(count),
        host=host,
        job_id=job_id,
        restart=int(restart),
        executor="local" if local else "slurm",
        submission=submission.number,
        launch=launch,
        partition="" if local else _partition_of(environ, host),
    )


def _partition_of(environ: Mapping[str, str], host: str) -> str:
    """The partition of a node's job, or of the component that the node is of; empty if Slurm does not say."""
    name = "SLURM_JOB_PARTITION"
    if "SLURM_HET_SIZE" in environ:
        groups = (each.removeprefix(_COMPONENT_NODES) for each in environ if each.startswith(_COMPONENT_NODES))
        own = next((group for group in groups if _is_in(host, environ[f"{_COMPONENT_NODES}{group}"])), "")
        name = f"SLURM_JOB_PARTITION_HET_GROUP_{own}"
    partition = environ.get(name, "")
    # Slurm 22.05 names all partitions that the job has waited in, and 24.11 the one that took it.
    return "" if "," in partition else partition


def _is_in(host: str, nodes: str) -> bool:
    with contextlib.suppress(ValueError):
        return host in expand_hostlist(nodes)
    return False


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


# --- what the submission says -----------------------------------------------------------------------------------------
# Commands that only query Slurm import this module too; these imports take longer than all the others.


@dataclass(frozen=True, slots=True)
class Turn:
    """What a run of a local sweep waits for. ``sweep``: the sweep's id.

    ``count``: how many of its runs may run at once. ``behind``: the run that was submitted before it; None: there is
    none, or it does not matter which of the two begins first.
    """

    sweep: str
    count: int
    behind: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """This as JSON."""
        return {"sweep": self.sweep, "count": self.count, "behind": self.behind}

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> Turn:
        """Read what :meth:`to_dict` returned."""
        behind = plain.get("behind")
        return cls(str(plain["sweep"]), max(1, int(plain["count"])), None if behind is None else str(behind))


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """The facts that a submission tells its agents besides the plan. ``attempt`` is the number of its first attempt.

    ``turn``: the turn that a run of a local sweep waits for. ``since``: a script's own checkpoints count only if they
    are newer (seconds since 1970). ``history``: the known interruptions, at submission, where the job will run.
    ``array``: the id of the array that the job is an element of, which is no job's id, and its index. ``mlflow``: the
    URI of the MLflow server that shows the run; empty: it has none. ``pack``: how several runs share the job; ``slot``:
    the number of this run among them, from 0. ``notify``: the path of the configuration file that says who is told of
    the run; empty: nobody is.
    """

    attempt: int
    turn: Turn | None = None
    from_start: bool = False
    since: float | None = None
    history: InterruptionStats | None = None
    array: tuple[str, int] | None = None
    mlflow: str = ""
    pack: Pack | None = None
    slot: int = 0
    notify: str = ""

    def to_dict(self) -> dict[str, Any]:
        """This as JSON."""
        return {
            "attempt": self.attempt,
            **({"turn": self.turn.to_dict()} if self.turn else {}),
            "from_start": self.from_start,
            "since": self.since,
            "history": self.history.to_dict() if self.history else None,
            **({"array": {"id": self.array[0], "index": self.array[1]}} if self.array else {}),
            "mlflow": self.mlflow,
            **({"pack": {**self.pack.to_dict(), "slot": self.slot}} if self.pack else {}),
            **({"notify": self.notify} if self.notify else {}),
        }

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> Launch:
        """Read what :meth:`to_dict` returned, in this version or in an earlier one."""
        from slurmtrain.model.experiment.sweep import Pack
        from slurmtrain.model.interruption.interval import InterruptionStats

        turn, history, array, pack = plain.get("turn"), plain.get("history"), plain.get("array"), plain.get("pack")
        return cls(
            attempt=int(plain["attempt"]),
            turn=Turn.from_dict(turn) if turn else None,
            from_start=bool(plain["from_start"]),
            since=plain["since"],
            history=InterruptionStats.from_dict(history) if history else None,
            array=(str(array["id"]), int(array["index"])) if array else None,
            mlflow=str(plain.get("mlflow") or ""),
            pack=Pack.from_dict(pack) if pack else None,
            slot=int(pack["slot"]) if pack else 0,
            notify=str(plain.get("notify") or ""),
        )


def read_launch(submission: SubmissionDir) -> Launch | None:
    """What the submission tells its agents besides the plan; None if it has no such file. Raises PathError."""
    types = {"attempt": "int", "from_start": "bool", "since": "float | None", "history": "Mapping[str, Any] | None",
             "turn": "Mapping[str, Any] | None"}  # fmt: skip
    data = read_json(submission.launch, types=types)
    try:
        return Launch.from_dict(data) if data is not None else None
    except (KeyError, TypeError, ValueError) as error:
        raise PathError(f"{submission.launch} has changed since slurmtrain wrote it ({error!r})") from error


def read_plan(path: Path) -> Plan | None:
    """The plan in this file; None if there is no such file. Raises PathError if it cannot be read."""
    data = read_json(path)
    if data is None:
        return None
    from slurmtrain.model.experiment.plan import Plan

    try:
        return Plan.from_json(data)
    except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise PathError(f"the plan at {path} cannot be read: {error}") from error


# --- where node 0 listens before training -----------------------------------------------------------------------------
# The salt of the preflight's port, so that it differs from training's.
BOOTSTRAP = "bootstrap"


@dataclass(frozen=True, slots=True)
class CoordinatorEndpoints:
    """The addresses where node 0, the coordinator of a preflight, listens.

    Attributes:
        addresses: All of its addresses; it is not known which ones the other nodes can reach.
        port: The port on each.
        secret: The attempt's secret, which both sides of a connection must prove that they know.
    """

    addresses: tuple[str, ...]
    port: int
    secret: bytes

    def to_dict(self) -> dict[str, Any]:
        """This as JSON."""
        return {"addresses": list(self.addresses), "port": self.port, "secret": self.secret.hex()}

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> CoordinatorEndpoints:
        """Read what :meth:`to_dict` returned."""
        return cls(tuple(plain["addresses"]), int(plain["port"]), bytes.fromhex(plain["secret"]))

    def variables(self) -> dict[str, str]:
        """This as environment variables for the tasks."""
        return {variables.HOME: " ".join([str(self.port), *self.addresses]), variables.HOME_SECRET: self.secret.hex()}


def pop_coordinator_endpoints() -> CoordinatorEndpoints | None:
    """The endpoints of node 0; None unless the batch script exported them and they reached this task.

    The variables are removed, so that no rank inherits the secret.
    """
    endpoints, secret = os.environ.pop(variables.HOME, ""), os.environ.pop(variables.HOME_SECRET, "")
    try:
        port, *addresses = endpoints.split()
        return (
            CoordinatorEndpoints(tuple(addresses), int(port), bytes.fromhex(secret)) if addresses and secret else None
        )
    except ValueError:
        return None


# --- what a training process knows about where it runs ----------------------------------------------------------------
@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """The facts that a training process knows about its place. ``attempt`` is None outside a job.

    ``node``: the number of its node; a run's nodes may leave out some numbers; under plain torchrun, torchrun's.
    ``launched``: a launcher has set its rank. ``launcher``: who starts the ranks, as in the spec. ``meets_at``: the
    address and the port of rank 0's store where ranks meet; None if the launcher has arranged that.
    ``launcher_restarts``: how often the command's own launcher has restarted its ranks. ``expected``: the number of
    ranks if such a launcher starts them all; ``first_rank``: the first one on this node. ``resume_from``: the path of
    the checkpoint that the attempt continues from; None if there is none. ``heartbeat``: the path of the board where
    its agent reads its progress; None if there is none. ``stop_signal``: the signal that its agent sends to stop it.
    ``forced_exit_s``: time after that signal until it must have exited, in seconds; None outside a job. ``seed``,
    ``deterministic`` and ``accumulation``: as in the spec.
    """

    rank: int
    local_rank: int
    world_size: int
    node: int
    launched: bool
    launcher: str
    meets_at: tuple[str, int] | None
    launcher_restarts: int
    expected: int
    first_rank: int
    attempt: AttemptDir | None
    submission: SubmissionDir | None
    number: int
    params: Mapping[str, Any]
    from_start: bool
    resume_from: str | None
    heartbeat: str | None
    stop_signal: signal.Signals
    forced_exit_s: float | None
    seed: int | None
    deterministic: bool
    accumulation: int


def this_worker() -> Worker:
    """Read the worker's environment; outside any job, and under plain torchrun, most of it is missing."""
    environ = os.environ
    attempt_dir, launcher = environ.get(variables.ATTEMPT_DIR), environ.get(variables.LAUNCHER, RANKS)
    attempt = AttemptDir(Path(attempt_dir), int(environ.get(variables.ROUND, "0"))) if attempt_dir else None
    restarts, params_file = int(environ.get("TORCHELASTIC_RESTART_COUNT", "0")), environ.get(variables.PARAMS_FILE)
    address, port = environ.get("SLURMTRAIN_MASTER_ADDR"), environ.get("SLURMTRAIN_MASTER_PORT")
    # A launcher within a rank has a port of its own, and one that the agent starts serves the store itself.
    is_agents = port is not None and environ.get("MASTER_PORT") == port and "TORCHELASTIC_RUN_ID" in environ
    serves = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return Worker(
        rank=int(environ.get("RANK", "0")),
        local_rank=int(environ.get("LOCAL_RANK", "0")),
        world_size=int(environ.get("WORLD_SIZE", "1")),
        node=int(environ.get(variables.NODE, environ.get("GROUP_RANK", "0"))),
        launched="RANK" in environ,
        launcher=launcher,
        meets_at=(address, int(port)) if address and port and is_agents and not serves else None,
        # With ``ranks``, the agent counts the rounds there, as torchrun does.
        launcher_restarts=restarts if launcher != RANKS else 0,
        expected=int(environ.get("SLURMTRAIN_WORLD_SIZE", "1")),
        first_rank=int(environ.get("SLURMTRAIN_FIRST_RANK", "0")),
        attempt=attempt,
        submission=attempt.run.submission(int(environ[variables.SUBMISSION])) if attempt else None,
        number=int(environ.get(variables.ATTEMPT, "1")),
        # If they are too long for a variable, another one names a file that has them.
        params=json.loads(Path(params_file).read_bytes() if params_file else environ.get(variables.PARAMS, "{}")),
        from_start=bool(environ.get(variables.FROM_START)),
        resume_from=environ.get(variables.RESUME_FROM) or None,
        heartbeat=environ.get(variables.HEARTBEAT),
        stop_signal=signal.Signals[environ.get(variables.STOP_SIGNAL, "SIGTERM")],
        forced_exit_s=float(environ[variables.FORCED_EXIT]) if environ.get(variables.FORCED_EXIT) else None,
        seed=int(environ[variables.SEED]) if environ.get(variables.SEED) else None,
        deterministic=environ.get(variables.DETERMINISTIC) == "1",
        accumulation=int(environ.get(variables.ACCUMULATION, "1")),
    )
