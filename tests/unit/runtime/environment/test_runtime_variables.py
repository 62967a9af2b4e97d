"""What is kept from a job that is submitted within one, and who may read the environment."""

from __future__ import annotations

import ast
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurmtrain import runtime
from slurmtrain.errors import LaunchError
from slurmtrain.model.experiment.launcher import NodePlace, NodeRanks
from slurmtrain.runtime.environment.variables import (
    environment_of_agent,
    environment_of_tools,
    local_job,
    scrubbed,
    take_gpus,
)

INSIDE = {
    "SLURM_JOB_ID": "1",
    "SLURM_MEM_PER_NODE": "100",
    "SLURM_CLUSTERS": "other",
    "SLURMD_NODENAME": "n0",
    "SRUN_DEBUG": "3",
    "SBATCH_EXPORT": "NONE",
    "SBATCH_ACCOUNT": "a default of sbatch, which a batch script names",
    "PYTHONINSPECT": "1",
    "SUBMITIT_EXECUTOR": "slurm",
    "TORCHELASTIC_RUN_ID": "x",
    "RANK": "0",
    "WORLD_SIZE": "2",
    "MASTER_ADDR": "n0",
    "MASTER_PORT": "1",
    "SLURMTRAIN_SUBMISSION": "1",
    "SLURMTRAIN_ATTEMPT": "1",
    "SLURMTRAIN_FROM_START": "1",
    **local_job("j", ["0", "1"]),
}
OUTSIDE = {"PATH": "/bin", "HOME": "/root", "SLURM_CONF": "/etc/slurm.conf", "SLURM_JWT": "t", "RANKING": "1",
           "SLURMTRAIN_RUNS": "/runs", "MY_SLURM_JOB_ID": "5"}  # fmt: skip


def test_what_belongs_to_the_job_around_is_taken_out_and_all_else_stays() -> None:
    assert scrubbed({**INSIDE, **OUTSIDE}) == OUTSIDE


@given(st.dictionaries(st.text(), st.text()))
def test_scrubbing_adds_and_changes_nothing_and_does_not_need_to_be_done_twice(environ: dict[str, str]) -> None:
    once = scrubbed({**environ, **INSIDE})
    assert once.items() <= environ.items()
    assert scrubbed(once) == once


# --- the only reader ----------------------------------------------------------------------------------------------

RUNTIME = Path(runtime.__file__).parent
ALLOWED_READERS = {
    "code/git.py": "keeps variables of another repository from git, also for commands",
    "training/loader_guard.py": "runs whenever torch is imported, so that it must import nothing else",
    "agent/agent.py": "changes what its ranks inherit by what setup has left",
    "agent/helpers.py": "hands on to ranks what setup_node exports",
    "task.py": "tells what setup has made of its environment",
    "agent/node_start.py": "fills Slurm's facts into the path of a log",
    "preflight/facts/cpus.py": "hands on to ranks which CPUs are theirs",
    "agent/rank_main.py": "runs with -I -S, so that it can import nothing of slurmtrain",
}
ENVIRONMENT_NAMES = frozenset({"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"})


def reads_environment(tree: ast.AST) -> bool:
    """Whether a module names the process's environment: ``os.environ``, or ``from os import environ``."""
    return any(
        (isinstance(node, ast.Attribute) and node.attr in ENVIRONMENT_NAMES and ast.unparse(node.value) == "os")
        or (
            isinstance(node, ast.ImportFrom)
            and node.module == "os"
            and ENVIRONMENT_NAMES & {a.name for a in node.names}
        )
        or (isinstance(node, ast.Import) and any(a.name == "os" and a.asname not in (None, "os") for a in node.names))
        for node in ast.walk(tree)
    )


def test_one_room_of_the_runtime_reads_the_environment() -> None:
    readers = {
        path.relative_to(RUNTIME).as_posix()
        for path in RUNTIME.rglob("*.py")
        if path.parent.name != "environment" or path.parent.parent != RUNTIME
        if reads_environment(ast.parse(path.read_bytes()))
    }
    assert readers == set(ALLOWED_READERS)


def test_tools_are_found_and_speak_english_where_no_path_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PATH")
    monkeypatch.setenv("LC_ALL", "de_DE.UTF-8")
    environ = environment_of_tools()
    assert (environ["PATH"], environ["LC_ALL"]) == (os.defpath, "C")


# --- launchers --------------------------------------------------------------------------------------------------


def test_what_a_launcher_got_does_not_reach_a_job_that_is_submitted_within_its_run() -> None:
    place = NodePlace(
        node_rank=0, ranks=NodeRanks((2, 2)), interface="lo", address="10.0.0.1", master_addr="10.0.0.1",
        master_port=12345, hostfile="/x",
    )  # fmt: skip
    inherited = {**place.variables("SIGTERM"), **place.own_variables(), "PET_LOG_DIR": "/mine", "PATH": "/bin"}
    assert scrubbed(inherited) == {"PET_LOG_DIR": "/mine", "PATH": "/bin"}


# --- GPUs -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("visible", "count", "slot", "own"),
    [("0,1,2,3", 2, 1, "2,3"), ("GPU-a,GPU-b", 1, 0, "GPU-a"), (None, 2, 1, "2,3"), ("0,1", 0, 1, "0,1")],
)
def test_each_run_sees_its_own_gpus(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, count: int, slot: int, own: str
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    take_gpus(count, slot)
    assert environment_of_agent()["CUDA_VISIBLE_DEVICES"] == own


def test_a_job_with_too_few_gpus_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with pytest.raises(LaunchError, match="run 1 of the pack needs GPUs 1 to 1"):
        take_gpus(1, 1)
