"""What a command sees of Slurm, MPI and torch elastic, for each launcher: a table."""

from __future__ import annotations

from dataclasses import replace

import pytest

from slurmtrain.model.spec.launcher import NodeRanks
from slurmtrain.runtime.environment.ranks import Tasks, write_changes

# What Slurm sets for the agent on the second of two nodes, its only task there.
AGENT = {
    "SLURM_JOB_ID": "8", "SLURM_PROCID": "1", "SLURM_LOCALID": "0", "SLURM_NODEID": "1", "SLURM_GTIDS": "1",
    "SLURM_NTASKS": "2", "SLURM_NPROCS": "2", "SLURM_STEP_NUM_TASKS": "2", "SLURM_NTASKS_PER_NODE": "1",
    "SLURM_TASKS_PER_NODE": "1(x2)", "SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_CPUS_PER_TASK": "4",
    "SLURM_TRES_PER_TASK": "cpu=4", "SLURM_NNODES": "2", "SLURM_STEP_NUM_NODES": "2", "SLURM_JOB_NUM_NODES": "2",
    "SLURM_NODELIST": "node[0-1]", "SLURM_JOB_NODELIST": "node[0-1]", "SLURM_STEP_NODELIST": "node[0-1]",
    "SLURM_JOB_CPUS_PER_NODE": "4(x2)", "SLURM_DISTRIBUTION": "cyclic", "SLURM_TASK_PID": "77", "SLURM_STEP_ID": "0",
    "SLURM_CPUS_ON_NODE": "4", "SLURM_NTASKS_PER_NODE_HET_GROUP_0": "1", "SLURM_MPI_TYPE": "pmix",
}  # fmt: skip
TASK = {"SLURM_PROCID", "SLURM_LOCALID", "SLURM_GTIDS", "SLURM_NTASKS", "SLURM_NPROCS", "SLURM_STEP_NUM_TASKS",
        "SLURM_NTASKS_PER_NODE", "SLURM_TASKS_PER_NODE", "SLURM_STEP_TASKS_PER_NODE", "SLURM_CPUS_PER_TASK",
        "SLURM_TRES_PER_TASK", "SLURM_DISTRIBUTION", "SLURM_TASK_PID", "SLURM_NTASKS_PER_NODE_HET_GROUP_0",
        "SLURM_MPI_TYPE"}  # fmt: skip
# What torchrun sets for a rank.
ELASTIC = {
    "RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2", "ROLE_RANK": "3", "ROLE_NAME": "worker", "ROLE_WORLD_SIZE": "4", "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "12345", "TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": "0",
    "TORCHELASTIC_RUN_ID": "x", "TORCHELASTIC_USE_AGENT_STORE": "False", "TORCHELASTIC_ERROR_FILE": "/x",
}  # fmt: skip
# Those of MPI's processes and submitit's, and settings of MPI, which are nobody's identity.
OTHERS = {"PMI_RANK": "1", "PMIX_RANK": "1", "PMI_FD": "5", "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2",
          "OMPI_UNIVERSE_SIZE": "2", "MV2_COMM_WORLD_RANK": "1", "MPI_LOCALRANKID": "0", "SUBMITIT_EXECUTOR": "slurm",
          "JSM_NAMESPACE_RANK": "1"}  # fmt: skip
SETTINGS = {"OMPI_MCA_btl": "tcp,self", "PATH": "/bin", "WORLD": "x", "MYRANK": "x"}
RANKS = Tasks(launcher="ranks", place=1, ranks=NodeRanks((2, 2)), hosts=["node0", "node1"], cpus_per_task=2)


def inherited(tasks: Tasks, environ: dict[str, str], local_rank: int = 1) -> dict[str, str]:
    changed: dict[str, str | None] = {**environ, **tasks.changes(environ, local_rank)}
    return {name: value for name, value in changed.items() if value is not None}


def test_a_rank_sees_what_an_srun_with_a_task_per_rank_sets() -> None:
    assert inherited(RANKS, AGENT) == {
        "SLURM_JOB_ID": "8", "SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_NODEID": "1", "SLURM_GTIDS": "2,3",
        "SLURM_NTASKS": "4", "SLURM_NPROCS": "4", "SLURM_STEP_NUM_TASKS": "4", "SLURM_NTASKS_PER_NODE": "2",
        "SLURM_TASKS_PER_NODE": "2(x2)", "SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURM_CPUS_PER_TASK": "2",
        "SLURM_TRES_PER_TASK": "cpu=2", "SLURM_NNODES": "2", "SLURM_STEP_NUM_NODES": "2", "SLURM_JOB_NUM_NODES": "2",
        "SLURM_NODELIST": "node[0-1]", "SLURM_JOB_NODELIST": "node[0-1]", "SLURM_STEP_NODELIST": "node[0-1]",
        "SLURM_JOB_CPUS_PER_NODE": "4(x2)", "SLURM_STEP_ID": "0", "SLURM_CPUS_ON_NODE": "4",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("place", "counts", "hosts", "expected"),
    [
        # The first node of the job is a spare one, or was lost.
        (0, (2,), ["node1"], {"SLURM_NODEID": "0", "SLURM_NNODES": "1", "SLURM_NODELIST": "node1",
                              "SLURM_JOB_NODELIST": "node1", "SLURM_STEP_NODELIST": "node1", "SLURM_PROCID": "1",
                              "SLURM_NTASKS": "2", "SLURM_TASKS_PER_NODE": "2", "SLURM_JOB_CPUS_PER_NODE": None}),
        # Components with different numbers of ranks, the second of which Slurm's list names first.
        (1, (1, 2, 2), ["node1", "node0", "node2"], {"SLURM_STEP_NODELIST": "node1,node0,node2", "SLURM_PROCID": "2",
                                                     "SLURM_TASKS_PER_NODE": "1,2(x2)", "SLURM_NTASKS": "5",
                                                     "SLURM_GTIDS": "1,2", "SLURM_NTASKS_PER_NODE": "2"}),
        # Slurm did not say what the nodes are called.
        (1, (2, 2), [], {"SLURM_NODELIST": "node[0-1]", "SLURM_PROCID": "3"}),
    ],
)  # fmt: skip
def test_ranks_see_the_nodes_that_train_in_the_order_of_the_ranks(
    place: int, counts: tuple[int, ...], hosts: list[str], expected: dict[str, str | None]
) -> None:
    environ = inherited(replace(RANKS, place=place, ranks=NodeRanks(counts), hosts=hosts), AGENT)
    assert {name: environ.get(name) for name in expected} == expected


def test_a_run_of_a_pack_sees_its_own_ranks_and_not_the_other_runs() -> None:
    pack = {**AGENT, "SLURM_NODEID": "0", "SLURM_NNODES": "1", "SLURM_STEP_NODELIST": "node1", "SLURM_NTASKS": "3"}
    environ = inherited(replace(RANKS, place=0, ranks=NodeRanks((2,)), hosts=["node1"]), pack)
    assert (environ["SLURM_PROCID"], environ["SLURM_NTASKS"], environ["SLURM_TASKS_PER_NODE"]) == ("1", "2", "2")


@pytest.mark.parametrize("launcher", ["node", "none"])
def test_a_command_per_node_sees_the_nodes_and_no_task(launcher: str) -> None:
    environ = inherited(replace(RANKS, launcher=launcher), {**AGENT, **OTHERS}, local_rank=0)
    assert environ == {name: value for name, value in AGENT.items() if name not in TASK}


@pytest.mark.parametrize(
    ("launcher", "kept"), [("ranks", {*ELASTIC}), ("node", {"MASTER_ADDR", "MASTER_PORT"}), ("none", set())]
)
def test_only_a_rank_inherits_what_torchrun_sets_for_one(launcher: str, kept: set[str]) -> None:
    environ = inherited(replace(RANKS, launcher=launcher), {**ELASTIC, **OTHERS, **SETTINGS})
    assert environ.keys() == {*kept, *SETTINGS}


def test_outside_slurm_nothing_of_slurm_appears_and_what_the_spec_sets_stays() -> None:
    assert not any(name.startswith("SLURM") for name in inherited(RANKS, ELASTIC))
    own = replace(RANKS, own={"SLURM_NTASKS_PER_NODE", "PMI_RANK"})
    environ = inherited(own, {**AGENT, "SLURM_NTASKS_PER_NODE": "8", "PMI_RANK": "7"})
    assert (environ["SLURM_NTASKS_PER_NODE"], environ["PMI_RANK"], environ["SLURM_NTASKS"]) == ("8", "7", "4")


def test_changes_are_written_a_line_each() -> None:
    assert write_changes({"A": None, "B": "1=2", "C": ""}) == "A\nB=1=2\nC="
