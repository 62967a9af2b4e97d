"""The variables of Slurm, MPI and torchrun that a command sees: its own place, not the place of its agent.

Slurm starts a task per node, the agent. Scripts that take their rank from SLURM_PROCID, or a library's detection of
Slurm or MPI, would take the agent's for theirs: each rank of a node would train for itself.

* ``launcher: ranks``: Slurm's variables are as under an ``srun`` with a task per rank, on the nodes that train.
* ``node``, ``none``: the command starts the ranks, which inherit its environment, so that nothing names a task. The
  variables that name the nodes are true.
* Variables by which MPI and submitit know their processes are gone: the agent's would be the same in all ranks.

Seen on 22.05 and 24.11: the variables that srun sets, and their values. A step on some nodes of its job leaves
SLURM_NODELIST and SLURM_JOB_NODELIST alone, and scripts look for rank 0 on the first node there: here they name only
the nodes that train.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from slurmtrain.model.hostlist import expand_hostlist
from slurmtrain.model.spec.launcher import NONE, RANKS, NodeRanks

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
        unwanted = dict.fromkeys(filter(self._is_unwanted, environ), None)
        changes = {**unwanted, **(self._of_slurm(environ, local_rank) if "SLURM_JOB_ID" in environ else {})}
        return {name: value for name, value in changes.items() if name not in self.own}

    def _is_unwanted(self, name: str) -> bool:
        if _OF_OTHERS.fullmatch(name) or _OF_A_TASK.fullmatch(name):
            return True
        if self.launcher == RANKS:
            return False
        return bool(_OF_A_RANK.fullmatch(name) or (self.launcher == NONE and _OF_A_MEETING.fullmatch(name)))

    def _of_slurm(self, environ: Mapping[str, str], local_rank: int) -> dict[str, str | None]:
        nodes = str(len(self.ranks.counts))
        of_nodes = {
            "SLURM_NODEID": str(self.place),
            **dict.fromkeys(("SLURM_NNODES", "SLURM_STEP_NUM_NODES", "SLURM_JOB_NUM_NODES"), nodes),
            **self._hosts(environ),
        }
        return of_nodes if self.launcher != RANKS else {**of_nodes, **self._of_task(environ, local_rank)}

    def _hosts(self, environ: Mapping[str, str]) -> dict[str, str | None]:
        """The lists of nodes that differ from the ranks' nodes; as Slurm writes them they are shorter."""
        if not self.hosts:
            return {}
        lists = ("SLURM_NODELIST", "SLURM_JOB_NODELIST", "SLURM_STEP_NODELIST")
        other = [name for name in lists if _expand(environ.get(name, "")) != [*self.hosts]]
        # As many numbers as the job has nodes.
        per_node = {"SLURM_JOB_CPUS_PER_NODE": None} if "SLURM_JOB_NODELIST" in other else {}
        return {**dict.fromkeys(other, ",".join(self.hosts)), **per_node}

    def _of_task(self, environ: Mapping[str, str], local_rank: int) -> dict[str, str | None]:
        own = self.ranks.ranks_of(self.place)
        counts = [(count, len(list(same))) for count, same in itertools.groupby(self.ranks.counts)]
        per_node = ",".join(f"{count}(x{times})" if times > 1 else str(count) for count, times in counts)
        cpus = str(self.cpus_per_task)
        per_task = {"SLURM_TRES_PER_TASK": f"cpu={cpus}"} if "SLURM_TRES_PER_TASK" in environ else {}
        return {
            "SLURM_PROCID": str(own[local_rank]),
            "SLURM_LOCALID": str(local_rank),
            "SLURM_GTIDS": ",".join(map(str, own)),
            **dict.fromkeys(("SLURM_NTASKS", "SLURM_NPROCS", "SLURM_STEP_NUM_TASKS"), str(self.ranks.world_size)),
            **dict.fromkeys(("SLURM_TASKS_PER_NODE", "SLURM_STEP_TASKS_PER_NODE"), per_node),
            "SLURM_NTASKS_PER_NODE": str(len(own)),
            "SLURM_CPUS_PER_TASK": cpus,
            **per_task,
        }


def _expand(hostlist: str) -> list[str]:
    try:
        return expand_hostlist(hostlist)
    except ValueError:
        return []


def write_changes(changes: Mapping[str, str | None]) -> str:
    """Changes of an environment as text, a line for each; rank_main.py applies it."""
    return "\n".join(name if value is None else f"{name}={value}" for name, value in changes.items())
