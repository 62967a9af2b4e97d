"""The environment of the processes that train, and what their command is told."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

from slurmtrain.model.run.layout import AttemptDir, RunDir
from slurmtrain.model.spec.launcher import RANKS
from slurmtrain.runtime.environment import network_profile, variables
from slurmtrain.runtime.environment.file_limit import soft_limit_of_ranks
from slurmtrain.runtime.environment.gpus import gpus_of_node
from slurmtrain.runtime.environment.node import Node
from slurmtrain.system.files import write_atomically

if TYPE_CHECKING:
    from slurmtrain.model.spec.launcher import NodePlace, NodeRanks
    from slurmtrain.model.spec.plan import Plan
    from slurmtrain.model.spec.spec import Spec


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
    from slurmtrain.runtime.code.copy_paths import CodeCopy

    copy = CodeCopy(plan.code, run)
    roots = [str(copy.tree / root) for root in plan.code.import_roots]
    paths = [copy.translate(path) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    path = os.pathsep.join(dict.fromkeys((*roots, *paths)))
    return {
        variables.WORKDIR: plan.workdir,
        variables.CODE_DIR: str(copy.tree),
        **({"PYTHONPATH": path} if path else {}),
    }


def _repeatable(spec: Spec) -> dict[str, str]:
    """Variables that make the run repeatable, as far as the spec demands that."""
    seeds = {} if spec.seed is None else {variables.SEED: str(spec.seed), "PYTHONHASHSEED": str(spec.seed)}
    # By torch's notes on reproducibility: without it, what other streams do decides about cuBLAS' algorithms.
    switches = {variables.DETERMINISTIC: "1", "CUBLAS_WORKSPACE_CONFIG": ":4096:8", "TORCHINDUCTOR_DETERMINISTIC": "1"}
    return {**seeds, **(switches if spec.deterministic else {})}


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
    from slurmtrain.model.spec.plan import REDACTED

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
