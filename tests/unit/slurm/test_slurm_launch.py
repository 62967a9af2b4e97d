"""Submitting a job through sbatch: what reaches it, what it replies, and which processes may still submit."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from helpers.fakeslurm import PARTITIONS, Call, SlurmCommands
from helpers.specs import plan
from submitit.core.utils import DelayedSubmission

from slurmtrain.errors import LaunchError, NotAvailable, RequestRefused, SubmissionUncertain
from slurmtrain.model.run.layout import RunsRoot, SubmissionDir
from slurmtrain.slurm.request import make_request
from slurmtrain.slurm.scheduler import Scheduler
from slurmtrain.slurm.slurm_launch import check, is_submitting, launch, launcher_in
from slurmtrain.slurm.task import run_node
from slurmtrain.system.files import make_directory, write_json
from slurmtrain.system.locks import locked

RUN_ID = "0123456789"
SECRET = "hunter2-secret-value"
FAILED = "sbatch: error: Batch job submission failed: "
PATIENCE_S = 60.0


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SlurmCommands:
    fake = SlurmCommands(tmp_path / "bin")
    monkeypatch.setenv("PATH", fake.on_path())
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    fake.replies("sbatch", "Submitted batch job 4711\n")
    fake.replies("srun")
    fake.replies("scontrol", "PartitionName=spot Default=YES MaxTime=1:00:00 TotalNodes=4\n")
    return fake


@pytest.fixture(params=["runs", 'runs of mine, it\'s ünï "quoted"'], ids=["plain", "odd"])
def odd_submission(tmp_path: Path, request: pytest.FixtureRequest) -> SubmissionDir:
    return make_submission(tmp_path / str(request.param))


@pytest.fixture
def submission(tmp_path: Path) -> SubmissionDir:
    return make_submission(tmp_path / "runs")


def make_submission(runs: Path) -> SubmissionDir:
    submission = RunsRoot(runs).run(RUN_ID).submission(1)
    make_directory(submission.path)
    write_json(submission.plan, plan(name="digits").to_json())
    return submission


def hand_over(submission: SubmissionDir, variables: dict[str, str] | None = None, **keys: Any) -> str:
    with (
        locked(submission.run.lock) as lock,
        launcher_in(submission.submitit, [lock or 0], variables or {}) as launcher,
    ):
        return launch(launcher, make_request(plan(name="digits", **keys), submission), [lock or 0])


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


# --- what reaches sbatch ----------------------------------------------------------------------------------------


def script_of(call: Call, submission: SubmissionDir) -> str:
    """submitit renames the script once the job has an id."""
    assert Path(call.args[-1]).parent == submission.submitit
    return (submission.submitit / "4711_submission.sh").read_text()


def test_a_job_that_sbatch_took_has_its_id_and_finds_its_pickle(
    slurm: SlurmCommands, odd_submission: SubmissionDir
) -> None:
    assert hand_over(odd_submission) == "4711"
    [call] = slurm.calls("sbatch")
    assert f"#SBATCH --job-name=digits-{RUN_ID}\n" in script_of(call, odd_submission)
    task = DelayedSubmission.load(odd_submission.submitit / "4711_submitted.pkl")
    assert (task.function, task.args) == (run_node, (str(odd_submission.path),))
    assert call.cwd == str(odd_submission.path)


def test_secret_variables_reach_sbatch_and_are_written_nowhere(slurm: SlurmCommands, submission: SubmissionDir) -> None:
    hand_over(submission, {"WANDB_API_KEY": SECRET}, env={"WANDB_API_KEY": "<redacted>"})
    [call] = slurm.calls("sbatch")
    assert call.env["WANDB_API_KEY"] == SECRET
    assert SECRET not in " ".join(call.args)
    files = [path for path in submission.run.path.rglob("*") if path.is_file()]
    assert any(path.name == "4711_submission.sh" for path in files)
    assert [path for path in files if SECRET.encode() in path.read_bytes()] == []


def test_sbatch_is_called_without_variables_that_outrank_the_batch_script_or_are_of_the_job_around(
    slurm: SlurmCommands, submission: SubmissionDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    outer = ("SBATCH_ACCOUNT", "SBATCH_EXPORT", "SBATCH_TIMELIMIT", "CUDA_VISIBLE_DEVICES", "SLURM_CLUSTERS",
             "SLURM_JOB_ID", "SLURM_MEM_PER_NODE", "SUBMITIT_EXECUTOR", "RANK", "MASTER_ADDR",
             "SLURMTRAIN_SUBMISSION")  # fmt: skip
    for name in (*outer, "SLURM_CONF"):
        monkeypatch.setenv(name, "1")
    hand_over(submission)
    assert slurm.calls("sbatch")[0].env.keys() & {*outer, "SLURM_CONF"} == {"SLURM_CONF"}


# --- what sbatch may reply -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("message", "hint"),
    [
        ("Invalid account or account/partition combination specified", "slurm.account"),
        ("Invalid qos specification", "slurm.qos"),
        ("Requested node configuration is not available", "ask for less per node"),
        ("Job violates accounting/QOS policy (job submit limit, user's size and/or time limits)", "list your limits"),
        ("QOSMaxWallDurationPerJobLimit, Job violates accounting/QOS policy", "resources.time"),
        ("AssocMaxSubmitJobLimit, Job violates accounting/QOS policy", "each run of a sweep is a job"),
        ("Zero Bytes were swallowed", None),
    ],
)
def test_a_job_that_sbatch_refuses_is_refused_with_its_message_and_a_hint(
    slurm: SlurmCommands, submission: SubmissionDir, message: str, hint: str | None
) -> None:
    slurm.fails("sbatch", f"{FAILED}{message}\n")
    with pytest.raises(RequestRefused) as caught:
        hand_over(submission)
    problem = f"Slurm refused the job: Batch job submission failed: {message}"
    assert str(caught.value).startswith(problem)
    if hint is None:
        assert str(caught.value) == problem
    else:
        assert hint in str(caught.value).removeprefix(problem)


@pytest.mark.parametrize(
    ("sbatch", "message"),
    [
        (f"echo '{FAILED}Socket timed out on send/recv operation' >&2; exit 1",
         "Socket timed out on send/recv operation.*'slurmtrain sync' finds out"),
        ("kill -9 $$", "."),
        ("echo 'Thank you! Your number is 4711.'", "Thank you"),
        # The bookkeeping fails after sbatch took the job.
        ("/bin/rm -r '{submitit}'; echo Submitted batch job 4711", "No such file"),
        # The process that submits is killed.
        ("kill -9 $PPID", "exit code -9"),
    ],
)  # fmt: skip
def test_a_job_that_slurm_may_have_taken_is_uncertain(
    slurm: SlurmCommands, submission: SubmissionDir, sbatch: str, message: str
) -> None:
    (slurm.path / "sbatch").write_text(f"#!/bin/sh\n{sbatch.format(submitit=submission.submitit)}\n")
    with pytest.raises(SubmissionUncertain, match=message):
        hand_over(submission)


def test_a_batch_script_is_utf_8_in_any_locale_and_the_job_gets_the_persons_own(
    slurm: SlurmCommands, submission: SubmissionDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    for name, value in own.items():
        monkeypatch.setenv(name, value)
    hand_over(submission, setup=["echo grüße 日本"])
    [call] = slurm.calls("sbatch")
    assert "echo grüße 日本\n" in (submission.submitit / "4711_submission.sh").read_text(encoding="utf-8")
    assert own.items() <= call.env.items()


def no_room(submission: SubmissionDir, slurm: SlurmCommands, monkeypatch: pytest.MonkeyPatch) -> None:
    submission.submitit.write_text("in the way of submitit's folder")


def no_srun(submission: SubmissionDir, slurm: SlurmCommands, monkeypatch: pytest.MonkeyPatch) -> None:
    (slurm.path / "srun").unlink()


def no_controller(submission: SubmissionDir, slurm: SlurmCommands, monkeypatch: pytest.MonkeyPatch) -> None:
    slurm.fails("sbatch", f"{FAILED}Unable to contact slurm controller (connect failure)\n")


def refused(submission: SubmissionDir, slurm: SlurmCommands, monkeypatch: pytest.MonkeyPatch) -> None:
    slurm.fails("sbatch", f"{FAILED}Connection refused\n")


def no_interpreter(submission: SubmissionDir, slurm: SlurmCommands, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONHOME", "/nowhere")


def no_sbatch(submission: SubmissionDir, slurm: SlurmCommands, monkeypatch: pytest.MonkeyPatch) -> None:
    (slurm.path / "sbatch").write_text("#!/no/such/shell\n")


def too_long(submission: SubmissionDir, slurm: SlurmCommands, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LONG", "x" * 200_000)


@pytest.mark.parametrize(
    ("prepare", "message"),
    [(no_room, "sbatch was not called.*File exists"), (no_interpreter, "sbatch was not called.*No module named"),
     (no_sbatch, "sbatch was not called.*No such file"), (too_long, "Argument list too long|argument list too long"),
     (no_srun, "srun"), (no_controller, "try again later"), (refused, "try again later")],
)  # fmt: skip
def test_a_job_that_slurm_cannot_have_taken_leaves_no_doubt(
    slurm: SlurmCommands,
    submission: SubmissionDir,
    monkeypatch: pytest.MonkeyPatch,
    prepare: Callable[[SubmissionDir, SlurmCommands, pytest.MonkeyPatch], None],
    message: str,
) -> None:
    prepare(submission, slurm, monkeypatch)
    with pytest.raises(LaunchError, match=message) as caught:
        hand_over(submission)
    assert not isinstance(caught.value, SubmissionUncertain)
    assert "Traceback" not in str(caught.value)
    assert bool(slurm.calls("sbatch")) == (prepare in (no_controller, refused))


# --- before anything is created ---------------------------------------------------------------------------------


def once() -> Scheduler:
    return Scheduler(1000.0, None)


def test_what_slurm_can_run_passes_and_a_slurm_that_does_not_answer_or_is_not_there_is_an_error(
    slurm: SlurmCommands,
) -> None:
    check([plan(), plan(resources={"nodes": 4})], once())
    assert len(slurm.calls("scontrol")) == 1
    assert slurm.calls("sbatch") == []
    slurm.fails("scontrol", "slurm_load_partitions: Unable to contact slurm controller (connect failure)\n")
    with pytest.raises(LaunchError, match="nothing was created; try again later"):
        check([plan()], once())
    (slurm.path / "sbatch").unlink()
    with pytest.raises(NotAvailable, match="use --executor local here"):
        check([plan()], once())


TWO_COMPONENTS = {"components": [{"nodes": 1}, {"nodes": 1}]}
CONFIG = "SchedulerType = sched/{type}\nSchedulerParameters = bf_interval=1{more}\n"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (CONFIG.format(type="backfill", more=",disable_hetjob_steps"), "allows no job step over several components"),
        (CONFIG.format(type="builtin", more=""), "SchedulerType must be sched/backfill, not builtin"),
    ],
)
def test_a_site_that_runs_no_heterogeneous_jobs_refuses_components(
    slurm: SlurmCommands, config: str, message: str
) -> None:
    slurm.replies("scontrol", PARTITIONS + config)
    check([plan()], once())
    with pytest.raises(RequestRefused, match=rf"resources.components: .*{message}"):
        check([plan(resources=TWO_COMPONENTS)], once())
    slurm.replies("scontrol", PARTITIONS + CONFIG.format(type="backfill", more=""))
    check([plan(resources=TWO_COMPONENTS)], once())


@pytest.mark.parametrize(
    ("resources", "where"), [({"nodes": 5}, ""), ({"components": [{"nodes": 1}, {"nodes": 5}]}, "component 1: ")]
)
def test_a_plan_that_slurm_can_never_run_is_refused(slurm: SlurmCommands, resources: Any, where: str) -> None:
    with pytest.raises(RequestRefused, match=rf"{where}.*gives a job 4 nodes at most, not 5"):
        check([plan(), plan(resources=resources)], once())


# --- who may still submit ---------------------------------------------------------------------------------------

SUBMITTER = """
import json, sys
from pathlib import Path
from slurmtrain.model.run.layout import SubmissionDir
from slurmtrain.model.experiment.plan import Plan
from slurmtrain.slurm.slurm_launch import launch, launcher_in
from slurmtrain.slurm.request import make_request
from slurmtrain.system.locks import locked
submission = SubmissionDir(Path(sys.argv[1]))
with locked(submission.run.lock) as lock, launcher_in(submission.submitit, [lock], {}) as launcher:
    plan = Plan.from_json(json.loads(submission.plan.read_text()))
    launch(launcher, make_request(plan, submission), [lock])
"""


def is_free(lock: Path) -> bool:
    with locked(lock, wait=False) as held:
        return held is not None


def test_a_submission_whose_command_was_killed_holds_the_lock_until_sbatch_has_answered(
    slurm: SlurmCommands, odd_submission: SubmissionDir, tmp_path: Path
) -> None:
    submission, answer = odd_submission, tmp_path / "answer now"
    slurm.replies("sbatch", "Submitted batch job 4711\n", until=answer)
    submitter = subprocess.Popen([sys.executable, "-c", SUBMITTER, str(submission.path)])
    try:
        wait_for(lambda: bool(slurm.calls("sbatch")))
    finally:
        submitter.send_signal(signal.SIGKILL)
        submitter.wait()
    try:
        assert not is_free(submission.run.lock)
        assert is_submitting(submission)
    finally:
        answer.touch()
    wait_for(lambda: is_free(submission.run.lock))
    assert not is_submitting(submission)
    assert len(slurm.calls("sbatch")) == 1
    assert (submission.submitit / "4711_submitted.pkl").exists()


@contextmanager
def process(*command: str) -> Iterator[None]:
    """A process that only waits, with this command line."""
    started = subprocess.Popen(
        [command[0], "-c", "import time; print(flush=True); time.sleep(600)", *command[1:]],
        executable=sys.executable,
        stdout=subprocess.PIPE,
    )
    try:
        assert started.stdout is not None
        started.stdout.readline()
        yield
    finally:
        started.kill()
        started.communicate()


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (("/usr/bin/sbatch", "{folder}/.submission_file_1.sh"), True),
        (("sbatch", "{folder}/.submission_file_1.sh"), True),
        (("python3", "-m", "slurmtrain.slurm.sbatch_process", '{{"folder": "{folder}"}}'), True),
        (("srun", "--output", "{folder}/%j.out", "python", "-m", "slurmtrain.runtime.task", "{folder}"), False),
        (("python3", "-m", "slurmtrain.runtime.task", "{folder}"), False),
        (("tail", "{folder}/4711_0_log.out"), False),
        (("sbatch", "/elsewhere/script.sh"), False),
    ],
)
def test_only_a_process_that_may_still_submit_counts(
    command: tuple[str, ...], expected: bool, submission: SubmissionDir
) -> None:
    assert not is_submitting(submission)
    with process(*(word.format(folder=submission.submitit) for word in command)):
        assert is_submitting(submission) is expected
