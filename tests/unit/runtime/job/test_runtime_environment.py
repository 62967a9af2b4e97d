"""What a job's processes read from their environment, and what is kept from a job that is submitted within one."""

from __future__ import annotations

import ast
import json
import os
import socket
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurmtrain.errors import LaunchError
from slurmtrain.model.interruption.interval import InterruptionStats
from slurmtrain.model.run.layout import RunDir
from slurmtrain.model.spec.launcher import NodePlace
from slurmtrain.runtime.job import environment
from slurmtrain.runtime.job.environment import Launch, Node, Turn, local_job, scrubbed, slurm_job_id, this_node

SLURM = {"SLURM_JOB_ID": "4711", "SLURM_NODEID": "1", "SLURM_STEP_NUM_NODES": "2"}
LOCAL = {"SUBMITIT_LOCAL_GLOBALID": "1", "SUBMITIT_LOCAL_NTASKS": "2", **local_job("local-abc", ["0", "1"])}
HANDED = Launch(attempt=3)


@pytest.fixture(autouse=True)
def _outside_any_job(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("SLURM_", "SUBMITIT_", "SBATCH_")):
            monkeypatch.delenv(name)


def node(monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], launch: Launch = HANDED) -> Node:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    with tempfile.TemporaryDirectory() as folder:
        submission = RunDir(Path(folder)).submission(2)
        submission.path.mkdir(parents=True)
        submission.launch.write_text(json.dumps(launch.to_dict()))
        return this_node(submission)


# --- which node of which attempt --------------------------------------------------------------------------------


def test_a_node_of_a_job_of_slurms_knows_which_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    agent = node(monkeypatch, SLURM)
    assert (agent.index, agent.count, agent.host, agent.job_id) == (1, 2, socket.gethostname(), "4711")
    assert agent.restart == 0
    assert (agent.executor, agent.submission, agent.launch, agent.attempt) == ("slurm", 2, HANDED, 3)


def test_the_nodes_of_a_job_are_those_of_its_step_which_may_be_fewer(monkeypatch: pytest.MonkeyPatch) -> None:
    assert node(monkeypatch, {**SLURM, "SLURM_NNODES": "3"}).count == 2
    monkeypatch.delenv("SLURM_STEP_NUM_NODES")
    assert node(monkeypatch, {"SLURM_NNODES": "3"}).count == 3


def test_a_job_that_was_started_again_counts_its_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    agent = node(monkeypatch, {**SLURM, "SLURM_RESTART_COUNT": "2"})
    assert (agent.restart, agent.attempt) == (2, 5)


def test_an_element_of_an_array_goes_by_the_arrays_id_and_its_own_number(monkeypatch: pytest.MonkeyPatch) -> None:
    array = {"SLURM_ARRAY_JOB_ID": "4700", "SLURM_ARRAY_TASK_ID": "3", "SLURM_RESTART_COUNT": "1"}
    agent = node(monkeypatch, {**SLURM, **array})
    assert (agent.job_id, agent.restart) == ("4700_3", 1)
    assert slurm_job_id(SLURM) == "4711"


def test_a_node_of_a_local_job_knows_which_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    agent = node(monkeypatch, LOCAL)
    assert (agent.index, agent.count, agent.job_id, agent.restart) == (1, 2, "local-abc", 0)
    assert agent.executor == "local"


def test_a_local_job_within_a_job_of_slurms_is_a_local_one(monkeypatch: pytest.MonkeyPatch) -> None:
    agent = node(monkeypatch, {**SLURM, "SLURM_STEP_NUM_NODES": "9", "SLURM_RESTART_COUNT": "4", **LOCAL})
    assert (agent.index, agent.count, agent.job_id, agent.restart) == (1, 2, "local-abc", 0)
    assert agent.executor == "local"


def test_outside_a_job_there_is_no_node(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="runs only inside a job"):
        this_node(RunDir(tmp_path).submission(1))


def test_a_node_that_does_not_see_the_run_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    monkeypatch.setenv("SLURM_NODEID", "0")
    with pytest.raises(LaunchError, match="is the run directory visible on this node"):
        this_node(RunDir(tmp_path).submission(1))


def test_only_the_nodes_of_a_local_run_share_a_host_and_are_told_apart_by_their_index() -> None:
    local = Node(index=1, count=2, host="h", job_id="j", restart=0, executor="local", submission=1, launch=HANDED)
    slurm = Node(index=1, count=2, host="h", job_id="j", restart=0, executor="slurm", submission=1, launch=HANDED)
    assert (local.name(2), local.name(1), slurm.name(2)) == ("h/1", "h", "h")


# --- what a submission hands over -------------------------------------------------------------------------------

launches = st.builds(
    Launch,
    attempt=st.integers(1, 99),
    turn=st.none() | st.builds(Turn, st.text(), st.integers(1, 99), st.none() | st.text()),
    from_start=st.booleans(),
    since=st.none() | st.floats(0, 2**40),
    history=st.none() | st.builds(InterruptionStats, uptime_s=st.floats(0, 2**40), interruptions=st.integers(0, 99)),
)


@given(launches)
def test_what_a_submission_hands_over_is_what_its_nodes_read(launch: Launch) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        assert node(monkeypatch, SLURM, launch).launch == launch


def test_what_a_version_handed_over_that_knew_of_no_history_is_read() -> None:
    data = Launch(attempt=2, history=InterruptionStats(interruptions=1)).to_dict()
    del data["history"]
    assert Launch.from_dict(data) == Launch(attempt=2)


def test_only_the_first_start_of_a_job_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    launch = Launch(attempt=1, from_start=True)
    assert node(monkeypatch, SLURM, launch).from_start
    assert not node(monkeypatch, {**SLURM, "SLURM_RESTART_COUNT": "1"}, launch).from_start


# --- what is kept from a job within a job -----------------------------------------------------------------------

INSIDE = {
    "SLURM_JOB_ID": "1",
    "SLURM_MEM_PER_NODE": "100",
    "SLURM_CLUSTERS": "other",
    "SLURMD_NODENAME": "n0",
    "SRUN_DEBUG": "3",
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


@pytest.mark.parametrize(("around", "kept"), [({}, True), ({"SLURM_JOB_ID": "1"}, False)])
def test_defaults_for_sbatch_are_a_persons_own_only_outside_a_job(around: dict[str, str], kept: bool) -> None:
    assert ("SBATCH_ACCOUNT" in scrubbed({**around, "SBATCH_ACCOUNT": "mine"})) is kept


@given(st.dictionaries(st.text(), st.text()))
def test_scrubbing_adds_and_changes_nothing_and_does_not_need_to_be_done_twice(environ: dict[str, str]) -> None:
    once = scrubbed({**environ, **INSIDE})
    assert once.items() <= environ.items()
    assert scrubbed(once) == once


# --- the only reader ----------------------------------------------------------------------------------------------

RUNTIME = Path(environment.__file__).parents[1]
ALLOWED_READERS = {
    "job/environment.py": "the reader",
    "training/loader_guard.py": "runs whenever torch is imported, so that it must import nothing else",
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


def test_one_module_of_the_runtime_reads_the_environment() -> None:
    readers = {
        path.relative_to(RUNTIME).as_posix()
        for path in RUNTIME.rglob("*.py")
        if reads_environment(ast.parse(path.read_bytes()))
    }
    assert readers == set(ALLOWED_READERS)


@pytest.mark.parametrize(
    "source",
    [
        "import os\nx = os.environ['A']",
        "import os\nx = os.getenv('A')",
        "from os import environ",
        "import os\nenv = {**os.environ}",
        "import os as system",
    ],
)
def test_every_way_to_read_the_environment_is_noticed(source: str) -> None:
    assert reads_environment(ast.parse(source))


def test_an_environment_that_is_passed_in_is_not_the_processs() -> None:
    assert not reads_environment(ast.parse("import os\nx = context.environ['A']\nos.getpid()"))


def test_tools_are_found_and_speak_english_where_no_path_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PATH")
    monkeypatch.setenv("LC_ALL", "de_DE.UTF-8")
    environ = environment.environment_of_tools()
    assert (environ["PATH"], environ["LC_ALL"]) == (os.defpath, "C")


def test_a_job_that_was_never_restarted_has_restart_0(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    assert environment.this_slurm_job() == ("4711", 0)
    monkeypatch.setenv("SLURM_RESTART_COUNT", "2")
    assert environment.this_slurm_job() == ("4711", 2)


# --- launchers --------------------------------------------------------------------------------------------------


def test_what_a_launcher_got_does_not_reach_a_job_that_is_submitted_within_its_run() -> None:
    place = NodePlace(
        node_rank=0, nodes=2, procs_per_node=2, interface="lo", address="10.0.0.1", master_addr="10.0.0.1",
        master_port=12345, hostfile="/x",
    )  # fmt: skip
    inherited = {**place.variables("SIGTERM"), **place.own_variables(), "PET_LOG_DIR": "/mine", "PATH": "/bin"}
    assert scrubbed(inherited) == {"PET_LOG_DIR": "/mine", "PATH": "/bin"}


# --- elements of job arrays -----------------------------------------------------------------------------------------


def test_an_element_of_an_array_finds_its_submission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    submission = RunDir(tmp_path / "r1").submission(1)
    submission.path.mkdir(parents=True)
    launch = Launch(attempt=1, array=("A1", 3), mlflow="http://mlflow:5000")
    submission.launch.write_text(json.dumps(launch.to_dict()))
    elements = tmp_path / "elements"
    elements.mkdir(mode=0o700)
    (elements / "3").symlink_to(submission.path)
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "3")
    assert environment.enter_element(elements) == submission
    assert environment.read_launch(submission) == launch
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "4")
    with pytest.raises(LaunchError, match="element 4 of a job array has no run"):
        environment.enter_element(elements)
