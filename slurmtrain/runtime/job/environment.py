"""The environment inside a job: the only file of the runtime that reads or names environment variables."""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slurmtrain.errors import LaunchError, PathError
from slurmtrain.model.hostlist import expand_hostlist
from slurmtrain.model.run.layout import AttemptDir, RunDir, SubmissionDir
from slurmtrain.model.spec.launcher import RANKS
from slurmtrain.runtime.job import network_profile
from slurmtrain.runtime.job.file_limit import soft_limit_of_ranks
from slurmtrain.system.files import read_json
from slurmtrain.system.owned_files import open_directory

# Commands that only query Slurm import this module too, for scrubbed(); these imports take longer than all the others.
if TYPE_CHECKING:
    from slurmtrain.model.interruption.interval import InterruptionStats
    from slurmtrain.model.spec.launcher import NodePlace
    from slurmtrain.model.spec.plan import Plan
    from slurmtrain.model.spec.spec import Spec
    from slurmtrain.model.spec.sweep.pack import Pack

# Seconds after a stop signal at which a rank ends itself: later than an agent that is alive would kill it.
FORCED_EXIT_S = 120.0

_JOB = "SLURMTRAIN_JOB_ID"
_SUBMISSION = "SLURMTRAIN_SUBMISSION"
_ATTEMPT = "SLURMTRAIN_ATTEMPT"
_FROM_START = "SLURMTRAIN_FROM_START"
_RESUME_FROM = "SLURMTRAIN_RESUME_FROM"
_RESUME_DIR = "SLURMTRAIN_RESUME_DIR"
_RESUME_TAG = "SLURMTRAIN_RESUME_TAG"
_RUN_DIR = "SLURMTRAIN_RUN_DIR"
ATTEMPT_DIR = "SLURMTRAIN_ATTEMPT_DIR"
_PARAMS = "SLURMTRAIN_PARAMS"
_LOG_DIR = "SLURMTRAIN_LOG_DIR"
_AGENT_PID = "SLURMTRAIN_AGENT_PID"
_HEARTBEAT = "SLURMTRAIN_HEARTBEAT"
_STOP_SIGNAL = "SLURMTRAIN_STOP_SIGNAL"
_FORCED_EXIT = "SLURMTRAIN_FORCED_EXIT_S"
_ROUND = "SLURMTRAIN_ROUND"
# Who starts the ranks, as in the spec; read by rank_main.py too.
_LAUNCHER = "SLURMTRAIN_LAUNCHER"
# The number of this node, which names its log; read by rank_main.py.
_NODE = "SLURMTRAIN_NODE"
# How many files a rank may open; read by rank_main.py.
_OPEN_FILES = "SLURMTRAIN_OPEN_FILES"
_WORKDIR = "SLURMTRAIN_WORKDIR"
_CODE_DIR = "SLURMTRAIN_CODE_DIR"
# What makes runs repeatable: read by scripts without a session, too.
_SEED = "SLURMTRAIN_SEED"
_DETERMINISTIC = "SLURMTRAIN_DETERMINISTIC"
_GPUS = "SLURMTRAIN_GPUS"
_HOME = "SLURMTRAIN_HOME"
_HOME_SECRET = "SLURMTRAIN_HOME_SECRET"  # noqa: S105 (the name of a variable)
# The salt with which the port of the preflight is chosen, so that it differs from that of training.
BOOTSTRAP = "bootstrap"

# Variables of a job that must not leak into a job submitted from within it.
_OURS = (_JOB, _SUBMISSION, _ATTEMPT, _FROM_START, _RUN_DIR, ATTEMPT_DIR, _PARAMS, _LOG_DIR, _AGENT_PID, _HEARTBEAT,
         _STOP_SIGNAL, _FORCED_EXIT, _ROUND, _LAUNCHER, _NODE, _OPEN_FILES, _HOME, _HOME_SECRET, _WORKDIR, _CODE_DIR,
         _SEED, _DETERMINISTIC, _RESUME_FROM, _RESUME_DIR, _RESUME_TAG, "SLURMTRAIN_RUN_ID",
         "SLURMTRAIN_CHECKPOINT_DIR", _GPUS, "SLURMTRAIN_NODE_RANK", "SLURMTRAIN_NODES",
         "SLURMTRAIN_PROCS_PER_NODE", "SLURMTRAIN_WORLD_SIZE", "SLURMTRAIN_MASTER_ADDR", "SLURMTRAIN_MASTER_PORT",
         "SLURMTRAIN_HOSTFILE")  # fmt: skip
_FOREIGN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK",
            "ROLE_NAME", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "NNODES", "NPROC_PER_NODE",
            "PET_MASTER_ADDR", "PET_MASTER_PORT", "PET_NODE_RANK", "PET_NNODES", "PET_NPROC_PER_NODE",
            "PET_RDZV_ENDPOINT", "PET_LOCAL_ADDR", "PET_SIGNALS_TO_HANDLE",
            "TORCH_ELASTIC_SHUTDOWN_TIMEOUT")  # fmt: skip
_FOREIGN_PREFIXES = ("TORCHELASTIC_", "SUBMITIT_", "SLURM_", "SRUN_", "SLURMD_")
# These show Slurm's commands where the cluster is, and who the user is.
_KEPT = ("SLURM_CONF", "SLURM_JWT")


def scrubbed(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment without the variables of a job that this process may be part of.

    A person's own SBATCH_* defaults stay, but not those that a job inherits from its own sbatch.
    """
    prefixes = (*_FOREIGN_PREFIXES, "SBATCH_") if "SLURM_JOB_ID" in environ else _FOREIGN_PREFIXES
    return {
        name: value
        for name, value in environ.items()
        if name in _KEPT or (name not in _OURS and name not in _FOREIGN and not name.startswith(prefixes))
    }


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
    """What a submission tells its node agents besides the plan. ``attempt`` is the number of its first attempt.

    ``turn``: what a run of a local sweep waits for. ``since``: a script's own checkpoints count only if they are newer
    (seconds since 1970). ``history``: what was known at submission about interruptions where the job will run.
    ``array``: the id of the array that the job is an element of, which is not that of a job, and its index. ``mlflow``:
    the URI of the MLflow server that shows the run; empty: it has none. ``pack``: how several runs share the job;
    ``slot``: which of them this is, from 0.
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
        }

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> Launch:
        """Read what :meth:`to_dict` returned, in this version or in an earlier one."""
        from slurmtrain.model.interruption.interval import InterruptionStats
        from slurmtrain.model.spec.sweep.pack import Pack

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
        )


@dataclass(frozen=True, slots=True)
class CoordinatorEndpoints:
    """The addresses where node 0, the coordinator of a preflight, listens.

    Attributes:
        addresses: All of its addresses; which of them the other nodes can reach is not known.
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
        return {_HOME: " ".join([str(self.port), *self.addresses]), _HOME_SECRET: self.secret.hex()}


def pop_coordinator_endpoints() -> CoordinatorEndpoints | None:
    """The endpoints of node 0; None unless the batch script exported them and they reached this task.

    The variables are removed, so that no rank inherits the secret.
    """
    endpoints, secret = os.environ.pop(_HOME, ""), os.environ.pop(_HOME_SECRET, "")
    try:
        port, *addresses = endpoints.split()
        return (
            CoordinatorEndpoints(tuple(addresses), int(port), bytes.fromhex(secret)) if addresses and secret else None
        )
    except ValueError:
        return None


def expected_hosts(nodes: int) -> dict[int, str]:
    """Slurm's names for an attempt's nodes, for those that never report one; empty if Slurm does not give them."""
    try:
        hosts = expand_hostlist(os.environ.get("SLURM_STEP_NODELIST", ""))
    except ValueError:
        hosts = []
    return dict(enumerate(hosts)) if len(hosts) == nodes else {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """The node and attempt whose agent this process is. ``index`` counts from 0, of ``count`` nodes."""

    index: int
    count: int
    host: str
    job_id: str
    restart: int
    executor: str
    submission: int
    launch: Launch

    @property
    def attempt(self) -> int:
        """The number of this attempt, as far as this node knows."""
        return self.launch.attempt + self.restart

    def name(self, nodes: int) -> str:
        """The host's name. The nodes of a local run share one host, so their index is appended."""
        return f"{self.host}/{self.index}" if self.executor == "local" and nodes > 1 else self.host

    @property
    def from_start(self) -> bool:
        """Whether to start from the beginning: a requeued job continues from what it has saved."""
        return self.launch.from_start and self.restart == 0


def read_launch(submission: SubmissionDir) -> Launch | None:
    """What the submission tells its agents besides the plan; None if it has no such file. Raises PathError."""
    types = {"attempt": "int", "from_start": "bool", "since": "float | None", "history": "Mapping[str, Any] | None",
             "turn": "Mapping[str, Any] | None"}  # fmt: skip
    data = read_json(submission.launch, types=types)
    try:
        return Launch.from_dict(data) if data is not None else None
    except (KeyError, TypeError, ValueError) as error:
        raise PathError(f"{submission.launch} is not what slurmtrain wrote there ({error!r})") from error


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
        index, job_id, restart = environ["SUBMITIT_LOCAL_GLOBALID"], environ[_JOB], "0"
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
        raise LaunchError(f"run {slot} of the pack needs GPUs {begin} to {end - 1} of its job, which has {visible!r}")
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(names[begin:end])


def cpus_of_job() -> int | None:
    """How many CPUs of this node Slurm gave to the job; None if it does not say."""
    text = os.environ.get("SLURM_CPUS_ON_NODE", "")
    return int(text) if text.isdecimal() else None


def local_job(job_id: str, gpus: Sequence[str]) -> dict[str, str]:
    """The variables that give a local job its id and its GPUs, since no scheduler does.

    Args:
        job_id: the id.
        gpus: the names of the GPUs, as CUDA_VISIBLE_DEVICES has them.
    """
    return {_JOB: job_id, _GPUS: ",".join(gpus)}


def local_gpus() -> list[str]:
    """The GPUs that the submitter of a local run could see, as CUDA_VISIBLE_DEVICES names them."""
    return [name for name in os.environ.get(_GPUS, "").split(",") if name]


def set_local_gpus(names: Sequence[str]) -> None:
    """Let this run use only some of these GPUs, from now on."""
    os.environ[_GPUS] = ",".join(names)


def set_worker_environment(
    plan: Plan,
    attempt: AttemptDir,
    node: Node,
    place: NodePlace,
    *,
    resume_from: str | None,
    heartbeat: str | None = None,
) -> None:
    """Set what the workers of this ``node`` inherit: the variables of the ``plan``, slurmtrain's, and the network's.

    ``attempt``: names the round. ``place``: the node's, in this round. ``resume_from``: the path of the checkpoint to
    continue from. ``heartbeat``: the path of the node's board.
    """
    run = attempt.run
    environ = os.environ
    environ.setdefault("PYTHONUNBUFFERED", "1")
    environ["OMP_NUM_THREADS"] = str(plan.spec.resources.cpus_per_proc)
    for name, value in (
        network_profile.load(plan.spec.network.profile).variables if plan.spec.network.profile else {}
    ).items():
        environ.setdefault(name, value)
    environ.update(network_variables(place.interface, place.address))
    environ.update(_launcher_variables(plan.spec, place))
    environ.update(_repeatable(plan.spec))
    environ.update(_env_of(plan.spec))
    environ.update(_code_variables(plan, run))
    if node.executor == "local":
        environ.update(_shared_gpus(plan, node.index))
    environ.update(
        {
            _RUN_DIR: str(run.path),
            ATTEMPT_DIR: str(attempt.path),
            _LOG_DIR: str(attempt.logs),
            _AGENT_PID: str(os.getpid()),
            _PARAMS: json.dumps(plan.spec.params),
            _STOP_SIGNAL: plan.spec.requeue.signal,
            _FORCED_EXIT: str(FORCED_EXIT_S),
            _ATTEMPT: str(node.attempt),
            _SUBMISSION: str(node.submission),
            _ROUND: str(attempt.round),
            _LAUNCHER: plan.spec.launcher or RANKS,
            _NODE: str(node.index),
            _OPEN_FILES: str(soft_limit_of_ranks()),
            # Only in the first round: restarted ranks continue from what the first ones saved.
            _FROM_START: "1" if node.from_start and attempt.round == 0 else "",
            **({_HEARTBEAT: heartbeat} if heartbeat is not None else {}),
            "SLURMTRAIN_RUN_ID": run.id,
            "SLURMTRAIN_CHECKPOINT_DIR": str(run.checkpoints),
            _RESUME_FROM: resume_from or "",
            _RESUME_DIR: str(Path(resume_from).parent) if resume_from else "",
            _RESUME_TAG: Path(resume_from).name if resume_from else "",
        }
    )
    # Torch elastic's handlers raise in whatever code is running; ours only set a flag, and must not be replaced.
    environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGQUIT"
    # All nodes have equally many ranks: torch elastic need not find out through a store.
    environ["TORCH_ELASTIC_WORKER_IDENTICAL"] = "1"


def set_mlflow_run(uri: str, mlflow_run_id: str) -> None:
    """Set what workers inherit to find their run on the MLflow server at ``uri``, unless the plan says otherwise."""
    os.environ.update({"MLFLOW_TRACKING_URI": uri, "MLFLOW_RUN_ID": mlflow_run_id})


def _code_variables(plan: Plan, run: RunDir) -> dict[str, str]:
    """The variables by which a script, and the Python that runs it, find the run's own copy of its code."""
    if plan.code is None:
        return {_WORKDIR: plan.workdir}
    from slurmtrain.runtime.code.translation import CodeCopy

    copy = CodeCopy(plan.code, run)
    roots = [str(copy.tree / root) for root in plan.code.import_roots]
    paths = [copy.translate(path) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    path = os.pathsep.join(dict.fromkeys((*roots, *paths)))
    return {_WORKDIR: plan.workdir, _CODE_DIR: str(copy.tree), **({"PYTHONPATH": path} if path else {})}


def _repeatable(spec: Spec) -> dict[str, str]:
    """Variables that make the run repeatable, as far as the spec demands that."""
    seeds = {} if spec.seed is None else {_SEED: str(spec.seed), "PYTHONHASHSEED": str(spec.seed)}
    # By torch's notes on reproducibility: without it, what other streams do decides about cuBLAS' algorithms.
    switches = {_DETERMINISTIC: "1", "CUBLAS_WORKSPACE_CONFIG": ":4096:8", "TORCHINDUCTOR_DETERMINISTIC": "1"}
    return {**seeds, **(switches if spec.deterministic else {})}


def _launcher_variables(spec: Spec, place: NodePlace) -> dict[str, str]:
    """Variables by which launchers find the nodes and their port.

    Launchers that find no port take 29500, which runs on the same node would share: a single rank may call one too.
    """
    if spec.calls_launcher:
        return {**place.own_variables(), **place.variables(spec.requeue.signal)}
    if spec.per_node:
        return place.own_variables()
    if place.nodes * place.procs_per_node == 1:
        return {"PET_MASTER_ADDR": place.master_addr, "PET_MASTER_PORT": str(place.master_port)}
    return {}


def network_variables(interface: str, address: str) -> dict[str, str]:
    """Variables that make the libraries use exactly this ``interface``, in the family of the node's ``address``."""
    family = {"NCCL_SOCKET_FAMILY": "AF_INET6"} if ":" in address else {}
    return {
        "NCCL_SOCKET_IFNAME": f"={interface}",
        "GLOO_SOCKET_IFNAME": interface,
        "TP_SOCKET_IFNAME": interface,
        **family,
    }


def environment_of_ranks(plan: Plan, node: Node) -> dict[str, str]:
    """The part of the environment of this node's ranks that comes from the user, and the GPUs that they will see."""
    return {**os.environ, **_env_of(plan.spec), **(_shared_gpus(plan, node.index) if node.executor == "local" else {})}


def _env_of(spec: Spec) -> dict[str, str]:
    """The spec's ``env``, without the secrets that its file hides: the job's environment already has those."""
    from slurmtrain.model.spec.plan import REDACTED

    return {name: value for name, value in spec.env.items() if value != REDACTED}


def for_all_reduce(spec: Spec, interface: str, address: str) -> dict[str, str]:
    """The environment of processes that test the network as the ranks of ``spec`` will use it.

    ``interface``, ``address``: this node's own in that network.
    """
    return {**os.environ, **network_variables(interface, address), **_env_of(spec), "OMP_NUM_THREADS": "1"}


def environment_of_agent() -> Mapping[str, str]:
    """The environment of this process, as its ranks inherit it."""
    return os.environ


def environment_of_helper() -> dict[str, str]:
    """The environment of a process that helps this one: its own, so that it finds slurmtrain in the same place."""
    package_parent = str(Path(__file__).parents[3])
    path = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": package_parent + (os.pathsep + path if path else "")}


def environment_of_tools() -> dict[str, str]:
    """The environment of system tools whose output is parsed, in which their messages are not translated."""
    # A process may have been started without a PATH.
    return {"PATH": os.defpath, **os.environ, "LC_ALL": "C"}


def _shared_gpus(plan: Plan, node: int) -> dict[str, str]:
    """Assign each node of a local run its own GPUs, from ``SLURMTRAIN_GPUS``, those that the submitter could see."""
    count = plan.spec.resources.gpus_per_node
    visible = local_gpus()
    return {"CUDA_VISIBLE_DEVICES": ",".join(visible[node * count : (node + 1) * count])}


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """What a training process knows about where it runs. ``attempt`` is None outside a job.

    ``launched``: a launcher has set its rank. ``launcher``: who starts the ranks, as in the spec.
    ``launcher_restarts``: how often the command's own launcher has restarted its ranks. ``nodes``, ``procs_per_node``:
    the ranks that such a launcher is to start. ``resume_from``: the path of the checkpoint that the attempt continues
    from; None if there is none. ``heartbeat``: the path of the board on which its agent reads its progress; None if
    there is none. ``stop_signal``: what its agent sends to stop it. ``forced_exit_s``: seconds after that within which
    it must exit; None outside a job. ``seed`` and ``deterministic``: as in the spec.
    """

    rank: int
    local_rank: int
    world_size: int
    launched: bool
    launcher: str
    launcher_restarts: int
    nodes: int
    procs_per_node: int
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


def this_worker() -> Worker:
    """Read the worker's environment; outside any job, and under plain torchrun, most of it is missing."""
    environ = os.environ
    attempt_dir, launcher = environ.get(ATTEMPT_DIR), environ.get(_LAUNCHER, RANKS)
    attempt = AttemptDir(Path(attempt_dir), int(environ.get(_ROUND, "0"))) if attempt_dir else None
    restarts = int(environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    return Worker(
        rank=int(environ.get("RANK", "0")),
        local_rank=int(environ.get("LOCAL_RANK", "0")),
        world_size=int(environ.get("WORLD_SIZE", "1")),
        launched="RANK" in environ,
        launcher=launcher,
        # With ``ranks``, torch elastic counts the rounds there: see runtime/agent/workers.py.
        launcher_restarts=restarts if launcher != RANKS else 0,
        nodes=int(environ.get("SLURMTRAIN_NODES", "1")),
        procs_per_node=int(environ.get("SLURMTRAIN_PROCS_PER_NODE", "1")),
        attempt=attempt,
        submission=attempt.run.submission(int(environ[_SUBMISSION])) if attempt else None,
        number=int(environ.get(_ATTEMPT, "1")),
        params=json.loads(environ.get(_PARAMS, "{}")),
        from_start=bool(environ.get(_FROM_START)),
        resume_from=environ.get(_RESUME_FROM) or None,
        heartbeat=environ.get(_HEARTBEAT),
        stop_signal=signal.Signals[environ.get(_STOP_SIGNAL, "SIGTERM")],
        forced_exit_s=float(environ[_FORCED_EXIT]) if environ.get(_FORCED_EXIT) else None,
        seed=int(environ[_SEED]) if environ.get(_SEED) else None,
        deterministic=environ.get(_DETERMINISTIC) == "1",
    )


def use_loopback() -> None:
    """Keep gloo from looking up this machine's name if a single process only talks to itself."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


def facts_for_command(
    run: RunDir, attempt: int, resume_from: str | None, place: NodePlace | None
) -> dict[str, str | None]:
    """The values of a command's placeholders, in this ``attempt`` of ``run``.

    ``resume_from``: a checkpoint's path. ``place``: the node's place in the round, if the command is started per node.
    """
    return {
        **(place.placeholders() if place is not None else {}),
        "run_dir": str(run.path),
        "checkpoint_dir": str(run.checkpoints),
        "run_id": run.id,
        "attempt": str(attempt),
        "resume_from": resume_from,
        # DeepSpeed wants them apart.
        "resume_dir": None if resume_from is None else str(Path(resume_from).parent),
        "resume_tag": None if resume_from is None else Path(resume_from).name,
    }
