"""What ranks see of a real Slurm: what they would see as tasks of an srun, whatever style their script is in."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import pytest
from helpers.cluster import Cluster, ClusterSite
from helpers.rare import rare
from helpers.site import PATIENCE_S
from helpers.trainers import TRAINERS

PORT = 29517
# What names a task, the tasks of a step, or its nodes.
COMPARED = re.compile(
    r"SLURM_(PROCID|LOCALID|NODEID|GTIDS|NNODES|NPROCS|NTASKS\w*|TASKS_PER_NODE|STEP_(N|TASKS)\w*|\w*NODELIST"
    r"|JOB_NUM_NODES|CPUS_PER_TASK|TRES_PER_TASK|JOB_CPUS_PER_NODE|MPI\w*)|(PMI|OMPI_COMM|SUBMITIT)\w*"
)


def compared(lines: Iterable[str]) -> dict[str, str]:
    """The variables among lines ``NAME=VALUE``."""
    pairs = (line.partition("=") for line in lines)
    return {name: value for name, _, value in pairs if COMPARED.fullmatch(name)}


@pytest.mark.slow
def test_scripts_of_each_style_meet_all_ranks_and_see_what_srun_sets(site: ClusterSite, cluster: Cluster) -> None:
    resources = {"nodes": 2, "procs_per_node": 2, "cpus_per_proc": 1, "time": "00:05:00"}
    run_id = site.submit(
        site.spec("styles", command=f"python {site.scripts / 'styles.py'} {PORT}", resources=resources),
        env=site.with_entry_points(site.person.code),
    )
    site.until_state(run_id, "completed", "failed")
    logs = {
        int(path.stem.removeprefix("rank-")): path.read_text().splitlines()
        for path in (site.runs / run_id).glob("attempts/*/logs/rank-*.log")
    }
    printed = {rank: [line for line in lines if line.startswith("style ")] for rank, lines in logs.items()}
    assert printed == {
        rank: [f"style {style} {rank} 4 {rank % 2} 6" for style in ("tcp", "jax", "mm")] for rank in range(4)
    }, logs
    # What srun itself sets: a line "TASK: NAME=VALUE" each.
    step = ("--nodes=2", "--ntasks-per-node=2", "--cpus-per-task=1", "--mpi=none")
    lines = [line.strip() for line in cluster.slurm("srun", *step, "--label", "env").splitlines()]
    for rank, own in logs.items():
        theirs = compared(line.partition(": ")[2] for line in lines if line.startswith(f"{rank}: "))
        ours = compared(line.removeprefix("variable ") for line in own if line.startswith("variable "))
        assert "SLURM_STEP_TASKS_PER_NODE" in theirs
        assert ours == theirs


def joining(site: ClusterSite, *arguments: str) -> dict[str, Any]:
    """A run whose ranks join as a trainer does by itself, at its end."""
    command = f"python {site.scripts / 'trainers' / 'joined.py'} {' '.join(arguments)}"
    resources = {"nodes": 2, "procs_per_node": 2, "time": "00:10:00"}
    # As of an agent that MPI has started.
    setup = ["export PMI_RANK=0 PMI_SIZE=1 OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=1 OMPI_COMM_WORLD_LOCAL_RANK=0"]
    spec = site.spec("joining", command=command, resources=resources, setup=setup, requeue={"max_failures": 0})
    # Importing a trainer takes minutes while other tests train on all cores.
    return site.until_state(site.submit(spec), "completed", "failed", patience_s=3 * PATIENCE_S)


@rare
@pytest.mark.slow
@pytest.mark.parametrize("arguments", [("lightning", "2", "2"), ("accelerate",)])
def test_trainers_that_look_for_slurm_themselves_meet_all_ranks(site: ClusterSite, arguments: tuple[str, ...]) -> None:
    TRAINERS[arguments[0]].skip_if_missing()
    run = joining(site, *arguments)
    assert (run["state"], run["reason"]) == ("completed", "")
    logs = sorted((site.runs / run["id"]).glob("attempts/*/logs/rank-*.log"))
    joined = [line for log in logs for line in log.read_text().splitlines() if line.startswith("joined ")]
    assert joined == [f"joined {rank} 4 6 []" for rank in range(4)]


@rare
@pytest.mark.slow
def test_lightning_without_devices_is_told_how_many_there_are(site: ClusterSite) -> None:
    TRAINERS["lightning"].skip_if_missing()
    run = joining(site, "lightning", "auto", "2")
    assert run["state"] == "failed"
    assert "Set `devices=2`" in run["reason"]
