"""The environment of the processes that train, and what their command is told."""

from __future__ import annotations

import itertools
import json
import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from slurmtrain.errors import SlurmtrainError
from slurmtrain.model.experiment.launcher import NONE, RANKS, NodeRanks
from slurmtrain.model.hostlist import expand_hostlist
from slurmtrain.model.run.layout import AttemptDir, RunDir
from slurmtrain.runtime.environment import variables
from slurmtrain.runtime.environment.node import Node
from slurmtrain.runtime.environment.process_limits import soft_limit_of_ranks
from slurmtrain.runtime.environment.variables import gpus_of_node
from slurmtrain.system import interpreter
from slurmtrain.system.files import describe_os_error, write_atomically

if TYPE_CHECKING:
    from slurmtrain.model.experiment.launcher import NodePlace
    from slurmtrain.model.experiment.plan import Plan
    from slurmtrain.model.experiment.spec import Spec


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
    for name, value in (load_profile(plan.spec.network.profile).variables if plan.spec.network.profile else {}).items():
        environ.setdefault(name, value)
    environ.update(network_variables(place.interface, place.address))
    environ.update(_launcher_variables(plan.spec, place))
    if (seed := plan.spec.seed) is not None:
        environ.update({variables.SEED: str(seed), "PYTHONHASHSEED": str(seed)})
    if plan.spec.deterministic:
        # By torch's notes on reproducibility: otherwise, what other streams do decides about cuBLAS' algorithms.
        environ.update({"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "TORCHINDUCTOR_DETERMINISTIC": "1"})
        environ[variables.DETERMINISTIC] = "1"
    environ.update(_env_of(plan.spec))
    environ.update(_code_variables(plan, run))
    if node.executor == "local":
        environ.update(gpus_of_node(plan, node.index))
    environ.update(
        {
            variables.RUN_DIR: str(run.path),
            variables.ATTEMPT_DIR: str(attempt.path),
            variables.LOG_DIR: str(attempt.logs),
            variables.AGENT_PID: str(os.getpid()),
            **_parameters(plan.spec, attempt, node),
            variables.ACCUMULATION: str(plan.spec.resources.accumulation_on(place.nodes)),
            variables.STOP_SIGNAL: plan.spec.requeue.signal,
            variables.FORCED_EXIT: str(variables.FORCED_EXIT_S),
            variables.ATTEMPT: str(node.attempt),
            variables.SUBMISSION: str(node.submission),
            variables.ROUND: str(attempt.round),
            variables.LAUNCHER: plan.spec.launcher or RANKS,
            variables.NODE: str(node.index),
            variables.OPEN_FILES: str(soft_limit_of_ranks()),
            # Only in the first round: restarted ranks continue from what the first ones saved.
            variables.FROM_START: "1" if node.from_start and attempt.round == 0 else "",
            **({variables.HEARTBEAT: heartbeat} if heartbeat is not None else {}),
            "SLURMTRAIN_RUN_ID": run.id,
            "SLURMTRAIN_CHECKPOINT_DIR": str(run.checkpoints),
            variables.RESUME_FROM: resume_from or "",
            variables.RESUME_DIR: str(Path(resume_from).parent) if resume_from else "",
            variables.RESUME_TAG: Path(resume_from).name if resume_from else "",
        }
    )


def variables_of_rank(
    attempt: AttemptDir, ranks: NodeRanks, place: int, local_rank: int, master: tuple[str, int]
) -> dict[str, str]:
    """The variables that torchrun sets for a rank (torch's documentation of torchrun, "Environment Variables").

    Args:
        attempt: Names the round.
        ranks: The number of ranks of each node.
        place: This node's place among the nodes that have ranks.
        local_rank: The rank on its node, from 0.
        master: The address and port of rank 0's store where ranks meet.
    """
    own = ranks.ranks_of(place)
    rank, world_size = str(own[local_rank]), str(ranks.world_size)
    return {
        "RANK": rank,
        "LOCAL_RANK": str(local_rank),
        "GROUP_RANK": str(place),
        "ROLE_RANK": rank,
        "ROLE_NAME": "worker",
        "LOCAL_WORLD_SIZE": str(len(own)),
        "WORLD_SIZE": world_size,
        "GROUP_WORLD_SIZE": str(len(ranks.counts)),
        "ROLE_WORLD_SIZE": world_size,
        "MASTER_ADDR": master[0],
        "MASTER_PORT": str(master[1]),
        # Ranks of later rounds take themselves for restarted ones, and nobody restarts them within the round.
        "TORCHELASTIC_RESTART_COUNT": str(attempt.round),
        "TORCHELASTIC_MAX_RESTARTS": str(attempt.round),
        "TORCHELASTIC_RUN_ID": f"{attempt.run.id}/{attempt.round}",
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "TORCHELASTIC_ERROR_FILE": str(attempt.logs / f"rank-{rank}.error.json"),
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
    }


def _parameters(spec: Spec, attempt: AttemptDir, node: Node) -> dict[str, str]:
    """The variable with the parameters or, where they are too long for one, that with the file of this ``node``."""
    text = json.dumps(spec.params)
    if len(text) <= variables.LONGEST_PARAMS:
        return {variables.PARAMS: text}
    path = attempt.params(node.index)
    write_atomically(path, text.encode(), private=True)
    os.environ.pop(variables.PARAMS, None)
    return {variables.PARAMS_FILE: str(path)}


def set_mlflow_run(uri: str, mlflow_run_id: str) -> None:
    """Set what workers inherit to find their run on the MLflow server at ``uri``, unless the plan says otherwise."""
    os.environ.update({"MLFLOW_TRACKING_URI": uri, "MLFLOW_RUN_ID": mlflow_run_id})


def _code_variables(plan: Plan, run: RunDir) -> dict[str, str]:
    """The variables by which a script, and the Python that runs it, find the run's own copy of its code."""
    if plan.code is None:
        return {variables.WORKDIR: plan.workdir}
    from slurmtrain.runtime.code.code_copy import CodeCopy

    copy = CodeCopy(plan.code, run)
    roots = [str(copy.tree / root) for root in plan.code.import_roots]
    paths = [copy.translate(path) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    path = os.pathsep.join(dict.fromkeys((*roots, *paths)))
    return {
        variables.WORKDIR: plan.workdir,
        variables.CODE_DIR: str(copy.tree),
        **({"PYTHONPATH": path} if path else {}),
    }


def _launcher_variables(spec: Spec, place: NodePlace) -> dict[str, str]:
    """Variables by which launchers find the nodes and their port.

    Launchers that find no port take 29500, which runs on the same node would share: a single rank may call one too.
    """
    if spec.calls_launcher:
        return {**place.own_variables(), **place.variables(spec.requeue.signal)}
    if spec.per_node:
        return place.own_variables()
    if place.ranks.world_size == 1:
        return {"PET_MASTER_ADDR": place.master_addr, "PET_MASTER_PORT": str(place.master_port)}
    # Scripts may change MASTER_ADDR, and then call slurmtrain.session().
    return {"SLURMTRAIN_MASTER_ADDR": place.master_addr, "SLURMTRAIN_MASTER_PORT": str(place.master_port)}


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
    gpus = gpus_of_node(plan, node.index) if node.executor == "local" else {}
    return {**variables.with_own_python(os.environ), **_env_of(plan.spec), **gpus}


def _env_of(spec: Spec) -> dict[str, str]:
    """The spec's ``env``, without the secrets that its file hides: the job's environment already has these."""
    from slurmtrain.model.experiment.plan import REDACTED

    return {name: value for name, value in spec.env.items() if value != REDACTED}


def for_all_reduce(spec: Spec, interface: str, address: str) -> dict[str, str]:
    """The environment of processes that test the network as the ranks of ``spec`` will use it.

    ``interface``, ``address``: this node's own in that network.
    """
    environ = variables.with_own_python(os.environ)
    return {**environ, **network_variables(interface, address), **_env_of(spec), "OMP_NUM_THREADS": "1"}


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


# --- the variables of Slurm, MPI and torchrun that a command sees -----------------------------------------------------
# Slurm starts a task per node, the agent. Scripts that take their rank from SLURM_PROCID, or a library's detection of
# Slurm or MPI, would take the agent's for theirs: each rank of a node would train for itself.
#
# * ``launcher: ranks``: Slurm's variables are as under an ``srun`` with a task per rank, on the nodes that train.
# * ``node``, ``none``: the command starts the ranks, which inherit its environment, so that nothing names a task. The
#   variables that name the nodes are true.
# * Variables by which MPI and submitit know their processes are gone: the agent's would be the same in all ranks.
#
# Seen on 22.05 and 24.11: the variables that srun sets, and their values. A step on some nodes of its job leaves
# SLURM_NODELIST and SLURM_JOB_NODELIST alone, and scripts look for rank 0 on the first node there: here they name only
# the nodes that train.


# What torchrun sets for a rank, which a launcher or a rendezvous of the command's own would take for its own.
_OF_A_RANK = re.compile(
    r"(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|ROLE_NAME"
    r"|TORCHELASTIC_(RESTART_COUNT|MAX_RESTARTS|RUN_ID|USE_AGENT_STORE|ERROR_FILE)"
)
_OF_A_MEETING = re.compile(r"MASTER_(ADDR|PORT)")
# What Slurm sets for a task, or for the tasks of a step or of a component.
_OF_A_TASK = re.compile(
    r"SLURM_(PROCID|LOCALID|GTIDS|TASK_PID|DISTRIBUTION|MPI_TYPE|TRES_PER_TASK|(CPUS|GPUS|MEM)_PER_TASK"
    r"|(STEP_)?(NTASKS|NPROCS|NUM_TASKS|TASKS_PER_NODE|NTASKS_PER_(NODE|CORE|SOCKET|GPU|TRES))"
    r"(_(HET|PACK)_GROUP_\d+)?|PMI\w*)"
)
# The processes of MPI, but not OMPI_MCA_btl and other settings; and of submitit, whose job a rank is not.
_OF_OTHERS = re.compile(
    r"(PMI|PMI2|PMIX|PRTE|HYDI?|MV2_COMM_WORLD|OMPI_COMM_WORLD|OMPI_MCA_(orte|ess|pmix)|JSM_NAMESPACE|FLUX_TASK|PALS"
    r"|SUBMITIT)_\w+|OMPI_(UNIVERSE_SIZE|FIRST_RANKS|FILE_LOCATION|APP_CTX_NUM_PROCS|ARGV|COMMAND)"
    r"|MPI_LOCAL(RANKID|NRANKS)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tasks:
    """The ranks of a round, as the tasks of a step.

    ``launcher``: who starts the ranks. ``place``: this node's among the training nodes. ``ranks``: the number of ranks
    of each node. ``hosts``: names of the nodes, in this order; empty: unknown. ``cpus_per_task``: on this node.
    ``own``: the names of variables that the spec sets, which stay as they are.
    """

    launcher: str
    place: int
    ranks: NodeRanks
    hosts: Sequence[str]
    cpus_per_task: int
    own: Collection[str] = ()

    def changes(self, environ: Mapping[str, str], local_rank: int) -> dict[str, str | None]:
        """How the environment of a command differs from the inherited one; None: it lacks the variable.

        Args:
            environ: the inherited environment.
            local_rank: the number of its process on this node.
        """
        patterns = [_OF_OTHERS, _OF_A_TASK]
        if self.launcher != RANKS:
            patterns += [_OF_A_RANK, *([_OF_A_MEETING] if self.launcher == NONE else [])]
        changes: dict[str, str | None] = {
            name: None for name in environ if any(pattern.fullmatch(name) for pattern in patterns)
        }
        if "SLURM_JOB_ID" in environ:
            nodes = str(len(self.ranks.counts))
            changes["SLURM_NODEID"] = str(self.place)
            changes |= dict.fromkeys(("SLURM_NNODES", "SLURM_STEP_NUM_NODES", "SLURM_JOB_NUM_NODES"), nodes)
            changes |= self._hosts(environ)
        if "SLURM_JOB_ID" in environ and self.launcher == RANKS:
            own, cpus = self.ranks.ranks_of(self.place), str(self.cpus_per_task)
            counts = [(count, len(list(same))) for count, same in itertools.groupby(self.ranks.counts)]
            per_node = ",".join(f"{count}(x{times})" if times > 1 else str(count) for count, times in counts)
            changes |= dict.fromkeys(
                ("SLURM_NTASKS", "SLURM_NPROCS", "SLURM_STEP_NUM_TASKS"), str(self.ranks.world_size)
            )
            changes |= dict.fromkeys(("SLURM_TASKS_PER_NODE", "SLURM_STEP_TASKS_PER_NODE"), per_node)
            changes |= {
                "SLURM_PROCID": str(own[local_rank]),
                "SLURM_LOCALID": str(local_rank),
                "SLURM_GTIDS": ",".join(map(str, own)),
                "SLURM_NTASKS_PER_NODE": str(len(own)),
                "SLURM_CPUS_PER_TASK": cpus,
                **({"SLURM_TRES_PER_TASK": f"cpu={cpus}"} if "SLURM_TRES_PER_TASK" in environ else {}),
            }
        return {name: value for name, value in changes.items() if name not in self.own}

    def _hosts(self, environ: Mapping[str, str]) -> dict[str, str | None]:
        """The lists of nodes that differ from the ranks' nodes; as Slurm writes them they are shorter."""
        if not self.hosts:
            return {}
        lists = ("SLURM_NODELIST", "SLURM_JOB_NODELIST", "SLURM_STEP_NODELIST")
        other = []
        for name in lists:
            try:
                differs = expand_hostlist(environ.get(name, "")) != [*self.hosts]
            except ValueError:
                differs = True
            other += [name] if differs else []
        # As many numbers as the job has nodes.
        per_node = {"SLURM_JOB_CPUS_PER_NODE": None} if "SLURM_JOB_NODELIST" in other else {}
        return {**dict.fromkeys(other, ",".join(self.hosts)), **per_node}


def write_changes(changes: Mapping[str, str | None]) -> str:
    """Changes of an environment as text, a line for each; rank_main.py applies it."""
    return "\n".join(name if value is None else f"{name}={value}" for name, value in changes.items())


# --- network profiles: variables that suit a kind of network ----------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Profile:
    """A profile: variables for every rank, and shell lines for the job's ``setup``."""

    variables: Mapping[str, str]
    setup: tuple[str, ...]


def load_profile(name: str) -> Profile:
    """Read the profile of this name. Raises SlurmtrainError if its file is damaged or missing."""
    import yaml

    path = interpreter.template_directory() / "network" / f"{name}.yaml"
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
        variables = {str(name): str(entry["value"]) for name, entry in data["variables"].items()}
        return Profile(variables, tuple(map(str, data.get("setup", ()))))
    except OSError as error:
        problem = f"cannot read the network profile {path}: {describe_os_error(error)}"
    except (yaml.YAMLError, UnicodeDecodeError, AttributeError, KeyError, TypeError) as error:
        problem = f"{path} is not a network profile ({' '.join(str(error).split())})"
    raise SlurmtrainError(f"{problem}; reinstall slurmtrain if you did not change it")
