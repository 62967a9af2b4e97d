"""What a command sees of Slurm, MPI and torch elastic, for each launcher: a table."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from slurmtrain.errors import SlurmtrainError
from slurmtrain.model.environment import describe_obsolete
from slurmtrain.model.experiment.launcher import NodeRanks
from slurmtrain.model.experiment.spec import NETWORK_PROFILES
from slurmtrain.runtime.environment.ranks import Tasks, load_profile, write_changes
from slurmtrain.system import interpreter

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


# --- network profiles -------------------------------------------------------------------------------------------------


FOLDER = interpreter.template_directory() / "network"
PAGE = (Path(__file__).resolve().parents[4] / "docs" / "network-profiles.md").read_text()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder of profiles in place of the one that is shipped."""
    monkeypatch.setattr(interpreter, "template_directory", lambda: tmp_path)
    (tmp_path / "network").mkdir()
    return tmp_path / "network"


def section(name: str) -> str:
    """What the page for users has on a profile."""
    section = re.search(rf"^## {name}\n(.*?)(?=^## )", PAGE, re.MULTILINE | re.DOTALL)
    assert section is not None
    return section[1]


def test_there_is_a_profile_for_each_name_that_a_spec_may_give_and_no_other() -> None:
    assert {path.name for path in FOLDER.iterdir()} == {f"{name}.yaml" for name in NETWORK_PROFILES}


@pytest.mark.parametrize("name", NETWORK_PROFILES)
def test_each_profile_has_a_reason_for_each_variable_and_stands_in_the_page(name: str) -> None:
    profile = load_profile(name)
    assert all(map(re.compile("[A-Z][A-Z0-9_]*").fullmatch, profile.variables))
    text = (FOLDER / f"{name}.yaml").read_text()
    assert text.startswith("# Sources: ")
    source = yaml.safe_load(text)
    rows = re.findall(r"^\| `([A-Z0-9_]+)` \| `(.*?)` \| (.+) \|$", section(name), re.MULTILINE)
    assert {variable: value for variable, value, _ in rows} == dict(profile.variables)
    assert source["about"].endswith(".")
    assert all(isinstance(entry["value"], str) for entry in source["variables"].values())
    assert all(entry["why"].strip().endswith(".") for entry in source["variables"].values())
    assert describe_obsolete(profile.variables) == []


@pytest.mark.parametrize(
    "text", ["", "about: [", "- about", "variables: []", "variables: {A: x}", "variables: {A: {}}"]
)
def test_a_profile_that_is_damaged_or_missing_is_told_with_its_file(folder: Path, text: str) -> None:
    path = folder / "own.yaml"
    for problem in (f"cannot read the network profile {path}: no such file", f"{path} is not a network profile"):
        with pytest.raises(SlurmtrainError, match=re.escape(problem)):
            load_profile("own")
        path.write_text(text)


def test_importing_the_module_does_not_import_yaml() -> None:
    code = "import sys, slurmtrain.runtime.environment.ranks; sys.exit('yaml' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


@pytest.mark.parametrize("inside", [True, False])
def test_templates_are_in_the_package_of_a_wheel_and_beside_that_of_a_checkout(
    inside: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "slurmtrain" / "templates" if inside else tmp_path / "templates"
    directory.mkdir(parents=True)
    monkeypatch.setattr(interpreter, "__file__", str(tmp_path / "slurmtrain" / "system" / "interpreter.py"))
    assert interpreter.template_directory() == directory


# --- Google's scripts, in directories of the test -----------------------------------------------------------------


def run_setup(root: Path) -> subprocess.CompletedProcess[str]:
    """The lines of gcp's setup, with Google's directories below this one, and then what they have exported."""
    lines = [
        line.replace("/usr/local/gib", f"{root}/gib").replace("/var/lib", f"{root}/var")
        for line in load_profile("gcp").setup
    ]
    script = "\n".join(["set -eu", *lines, "env"])
    return subprocess.run(
        ["bash", "-c", script], env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True, timeout=60, check=True
    )


def install(root: Path, path: str, text: str) -> None:
    script = root / path
    script.parent.mkdir(parents=True)
    script.write_text(text)


@pytest.mark.parametrize("place", ["gib", "var/gib"])
def test_where_gib_is_installed_its_script_and_its_libraries_are_used(place: str, tmp_path: Path) -> None:
    install(tmp_path, f"{place}/scripts/set_nccl_env.sh", "export NCCL_IB_TC=52\n")
    shell = run_setup(tmp_path)
    exported = dict(line.split("=", 1) for line in shell.stdout.splitlines())
    assert exported["NCCL_IB_TC"] == "52"
    assert exported["NCCL_NET"] == "gIB"
    assert exported["LD_LIBRARY_PATH"] == f"{tmp_path}/{place}/lib64"
    assert shell.stderr == ""


def test_where_tcpxo_is_installed_its_script_is_told_where_it_lies(tmp_path: Path) -> None:
    install(tmp_path, "var/tcpxo/lib64/nccl-env-profile.sh", 'export NCCL_TUNER_CONFIG_PATH="$NCCL_LIB_DIR/tuner"\n')
    shell = run_setup(tmp_path)
    exported = dict(line.split("=", 1) for line in shell.stdout.splitlines())
    assert exported["NCCL_TUNER_CONFIG_PATH"] == f"{tmp_path}/var/tcpxo/lib64/tuner"
    assert exported["LD_LIBRARY_PATH"] == f"{tmp_path}/var/tcpxo/lib64"
    assert "NCCL_NET" not in exported
    assert shell.stderr == ""


def test_where_neither_is_installed_the_log_says_that_nccl_will_use_tcp(tmp_path: Path) -> None:
    shell = run_setup(tmp_path)
    assert "NCCL will use TCP" in shell.stderr
    assert "NCCL" not in shell.stdout
