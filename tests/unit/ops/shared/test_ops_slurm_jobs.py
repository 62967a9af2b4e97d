"""Looking at runs whose jobs are Slurm's: what is asked, what is journaled, and whose orphaned jobs are found again."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from helpers.fakeslurm import FakeScheduler, job
from helpers.simulated_run import DOWN, RUN_ID, SimulatedRun
from helpers.workspaces import load_run, make_workspace

from slurmtrain.model.run.run import Live, Run
from slurmtrain.ops.shared.observe import Observed, observe
from slurmtrain.ops.shared.slurm_jobs import holder, live_of, look_at_slurm
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.slurm.scheduler import GIVEN_UP_S, Queue
from slurmtrain.system.locks import locked

OTHER_ID = "1123456789"
THIS_HOST = socket.gethostname()


@pytest.fixture
def slurm() -> FakeScheduler:
    return FakeScheduler()


@pytest.fixture
def workspace(tmp_path: Path, slurm: FakeScheduler) -> Workspace:
    return make_workspace(tmp_path, slurm)


def make_run(workspace: Workspace, run_id: str = RUN_ID, **builder: Any) -> SimulatedRun:
    """A run that was created a few seconds ago."""
    return SimulatedRun(workspace.root.run(run_id), now=time.time() - 20.0, **builder).created(name="digits")


@pytest.fixture
def run(workspace: Workspace) -> SimulatedRun:
    return make_run(workspace)


def journals(run: SimulatedRun, command: str) -> list[Path]:
    """The journals of commands of this name."""
    return sorted(run.directory.journals.glob(f"{command}-*.jsonl"))


def look(workspace: Workspace) -> Run:
    observe(workspace)
    return load_run(workspace)


# --- what is asked ----------------------------------------------------------------------------------------------


def test_slurm_is_not_asked_where_nothing_is_open_nor_by_a_look_that_shall_not(
    workspace: Workspace, run: SimulatedRun, slurm: FakeScheduler
) -> None:
    run.submitted(host=THIS_HOST)
    observe(workspace, ask_slurm=False)
    run.started().ended(cause="completed")
    make_run(workspace, OTHER_ID, executor="local")
    observe(workspace)
    assert slurm.questions == []
    assert load_run(workspace).state == "completed"


def test_a_job_that_squeue_knows_costs_one_question(
    workspace: Workspace, run: SimulatedRun, slurm: FakeScheduler
) -> None:
    run.submitted(host=THIS_HOST)
    slurm.jobs = [job("PENDING")]
    assert look(workspace).state == "pending"
    assert slurm.questions == ["squeue"]
    assert journals(run, "observe") == []


def test_many_runs_cost_two_questions_and_sacct_is_asked_from_the_first_submission_on(
    workspace: Workspace, run: SimulatedRun, slurm: FakeScheduler
) -> None:
    run.submitting(host=THIS_HOST, at=5000.0)
    run.command("submitted", submission=1, job_id="7")
    for number in range(5):
        make_run(workspace, f"{number}223456789", job=f"1{number}").submitted()
    slurm.jobs = [job("RUNNING", "10", "0223456789")]
    observe(workspace)
    assert slurm.questions == ["squeue", ("sacct", ["11", "12", "13", "14", "7"], False, 5000.0)]
    # An orphan is looked for by name.
    make_run(workspace, OTHER_ID).submitting(host=THIS_HOST)
    observe(workspace)
    assert slurm.questions[-1][2]


# --- what is told -----------------------------------------------------------------------------------------------


def test_what_slurm_says_of_an_end_is_journaled_once(
    workspace: Workspace, run: SimulatedRun, slurm: FakeScheduler
) -> None:
    run.submitted(host=THIS_HOST)
    run.started()
    slurm.starts = {"7": [job("OUT_OF_MEMORY", ends_at=time.time() - 1)]}
    for _ in range(3):
        current = look(workspace)
        assert (current.state, current.attempts[0].cause) == ("failed", "oom")
    assert len(journals(run, "observe")) == 1


@pytest.mark.parametrize(
    ("log", "reason"),
    [
        ("starting\npython: can't open file\n\n", "python: can't open file"),
        ("API_KEY=hunter2\n", "API_KEY=<redacted>"),
        (
            "srun: error: Task launch for StepId=7.0 failed on node node0: Invalid job credential\nsrun: error: "
            "Application launch failed: Invalid job credential\nsrun: Job step aborted\nslurmstepd: error: *** STEP "
            "7.0 ON node0 CANCELLED AT 2026-11-22T12:00:00 ***\nsrun: error: node1: task 1: Killed\n",
            "srun: error: Task launch for StepId=7.0 failed on node node0: Invalid job credential",
        ),
        (
            "KeyError: 'lr'\nslurmstepd: error: *** STEP 7.0 ON node0 CANCELLED AT 2026-11-22T12:00:00 DUE TO JOB "
            "REQUEUE ***\nsrun: error: Task launch for StepId=7.0 failed on node node0: Invalid job credential\n",
            "srun: error: Task launch for StepId=7.0 failed on node node0: Invalid job credential",
        ),
        ("", "its log is empty"),
        (None, "it left no log; perhaps nodes node0 cannot see "),
    ],
)
def test_a_job_that_never_spoke_is_told_by_its_log(
    workspace: Workspace, run: SimulatedRun, slurm: FakeScheduler, log: str | None, reason: str
) -> None:
    run.submitted(host=THIS_HOST)
    folder = run.directory.submission(1).submitit
    folder.mkdir(parents=True)
    if log is not None:
        (folder / "7_0_log.out").write_text(log)
    slurm.jobs = [job("FAILED", exit_code=2, nodes="node0")]
    current = look(workspace)
    assert current.reason.startswith(f"Slurm says FAILED with exit code 2: {reason}")


def test_a_question_without_an_answer_is_a_problem_and_changes_nothing(
    workspace: Workspace, run: SimulatedRun, slurm: FakeScheduler
) -> None:
    run.submitted(host=THIS_HOST)
    slurm.squeue_problem = DOWN.problem
    assert observe(workspace).problems == [f"{DOWN.problem}; these are the last known states"]
    assert slurm.questions == ["squeue"]
    slurm.squeue_problem, slurm.sacct_problem = "", "sacct: down"
    assert observe(workspace).problems == [
        "sacct: down; runs whose jobs have ended may appear with their earlier state"
    ]
    assert load_run(workspace).state == "pending"
    assert journals(run, "observe") == []


# --- orphans ----------------------------------------------------------------------------------------------------


def state(workspace: Workspace) -> tuple[str, str]:
    current = look(workspace)
    return current.state, current.newest.job_id if current.newest else ""


@pytest.mark.parametrize(("host", "age"), [(THIS_HOST, 0.0), (THIS_HOST, 5.0), ("elsewhere", 0.0)])
def test_the_job_of_a_submission_that_was_killed_is_found_in_squeue_whatever_its_host_and_the_answers_age(
    workspace: Workspace, run: SimulatedRun, slurm: FakeScheduler, host: str, age: float
) -> None:
    run.submitting(host=host)
    slurm.age, slurm.jobs = age, [job("RUNNING", "6", OTHER_ID), job("PENDING", "7")]
    for _ in range(2):
        assert state(workspace) == ("pending", "7")
    assert len(journals(run, "adopt")) == 1


def test_the_job_of_a_submission_that_was_killed_is_found_in_sacct_and_then_how_it_ended(
    workspace: Workspace, run: SimulatedRun, slurm: FakeScheduler
) -> None:
    run.submitting(host=THIS_HOST)
    slurm.starts = {"6": [job("FAILED", "6", OTHER_ID)], "7": [job("NODE_FAIL", restart=None)]}
    assert state(workspace) == ("pending", "7")
    assert state(workspace) == ("failed", "7")
    assert load_run(workspace).attempts[0].cause == "node_fail"


def test_a_job_that_an_earlier_submission_has_claimed_is_not_taken_for_the_orphans(
    workspace: Workspace, run: SimulatedRun, slurm: FakeScheduler
) -> None:
    run.submitted(host=THIS_HOST)
    run.started().ended(cause="crash", failed_at=time.time() - 2)
    run.submitting(2, host=THIS_HOST, at=time.time())
    slurm.jobs = [job("COMPLETING", "7"), job("PENDING", "8")]
    assert state(workspace) == ("pending", "8")
    assert [attempt.job_id for attempt in load_run(workspace).attempts] == ["7", "8"]


def test_a_submission_whose_agents_speak_needs_no_adoption(
    workspace: Workspace, run: SimulatedRun, slurm: FakeScheduler
) -> None:
    run.submitting(host=THIS_HOST)
    run.started()
    slurm.jobs = [job("RUNNING")]
    assert state(workspace) == ("running", "7")
    assert journals(run, "adopt") == []


def test_a_submission_that_died_before_slurm_had_its_job_never_was_one(
    workspace: Workspace, run: SimulatedRun, slurm: FakeScheduler
) -> None:
    run.submitting(host=THIS_HOST)
    current = look(workspace)
    assert (current.state, current.attempts) == ("created", [])
    assert current.reason == "its submission was killed before Slurm had the job"
    look(workspace)
    assert len(journals(run, "adopt")) == 1


def test_a_site_without_accounting_is_no_problem_and_sure_by_squeue_alone(
    workspace: Workspace, run: SimulatedRun, slurm: FakeScheduler
) -> None:
    run.submitting(host=THIS_HOST)
    slurm.sacct_problem, slurm.has_accounting = "sacct: Slurm accounting storage is disabled", False
    assert observe(workspace).problems == []
    assert state(workspace)[0] == "created"


@pytest.mark.parametrize(
    "answers",
    [{"age": 500.0}, {"squeue_problem": DOWN.problem}, {"sacct_problem": "sacct: down"}],
    ids=["old", "squeue", "sacct"],
)
def test_no_submission_is_given_up_without_two_answers_from_after_the_look_began(
    workspace: Workspace, run: SimulatedRun, slurm: FakeScheduler, answers: dict[str, Any]
) -> None:
    run.submitting(host=THIS_HOST, at=time.time() - 1000.0)
    for name, value in answers.items():
        setattr(slurm, name, value)
    assert state(workspace) == ("pending", "")
    assert journals(run, "adopt") == []


def test_a_submission_that_still_holds_its_lock_is_left_alone(
    workspace: Workspace, run: SimulatedRun, slurm: FakeScheduler
) -> None:
    run.submitting(host=THIS_HOST)
    slurm.jobs = [job("PENDING")]
    with locked(run.directory.lock):
        assert state(workspace) == ("pending", "")
    assert journals(run, "adopt") == []
    assert state(workspace) == ("pending", "7")


def test_a_submission_whose_sbatch_lives_is_left_alone(
    workspace: Workspace, run: SimulatedRun, slurm: FakeScheduler
) -> None:
    run.submitting(host=THIS_HOST)
    script = str(run.directory.submission(1).submitit / ".submission_file_1.sh")
    code = "import time; print(flush=True); time.sleep(600)"
    sbatch = subprocess.Popen(["sbatch", "-c", code, script], executable=sys.executable, stdout=subprocess.PIPE)
    try:
        sbatch.stdout.readline()
        assert state(workspace) == ("pending", "")
    finally:
        sbatch.kill()
        sbatch.communicate()
    assert state(workspace)[0] == "created"


def test_the_lock_of_an_orphan_is_held_while_slurm_is_asked_and_free_afterwards(
    workspace: Workspace, run: SimulatedRun, slurm: FakeScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.submitting(host=THIS_HOST)
    free = []

    def is_free() -> bool:
        with locked(run.directory.lock, wait=False) as lock:
            return lock is not None

    def queue() -> Queue:
        free.append(is_free())
        return Queue(at=time.time())

    monkeypatch.setattr(slurm, "queue", queue)
    look(workspace)
    assert free == [False]
    assert is_free()


def test_a_submission_from_another_machine_is_given_up_only_after_a_while(
    workspace: Workspace, run: SimulatedRun, slurm: FakeScheduler
) -> None:
    run.submitting(host="elsewhere")
    assert state(workspace) == ("pending", "")
    old = make_run(workspace, OTHER_ID)
    old.submitting(host="elsewhere", at=time.time() - GIVEN_UP_S - 5)
    look(workspace)
    assert state(workspace) == ("pending", "")
    assert load_run(workspace, OTHER_ID).state == "created"


# --- what a job is doing ----------------------------------------------------------------------------------------


def live(observed: Observed) -> Live | None:
    return observed.runs[RUN_ID].live


def test_a_job_that_waits_tells_why_and_until_when_and_one_that_is_over_is_not_live(
    workspace: Workspace, run: SimulatedRun, slurm: FakeScheduler
) -> None:
    run.submitted(host=THIS_HOST)
    slurm.jobs = [job("PENDING", reason="Priority", starts_at=5e9, priority=10)]
    reason = "jobs of higher priority are before it (Priority)"
    waits = Live(state="PENDING", code="Priority", reason=reason, starts_at=5e9, priority=10)
    assert live(observe(workspace)) == waits
    for over in ("COMPLETED", "FAILED"):
        slurm.jobs = [job(over)]
        assert live(observe(workspace)) is None


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        ("RUNNING", "Slurm has started it; it is being set up"),
        ("COMPLETING", "its last processes are exiting"),
        ("SUSPENDED", "Slurm has suspended it"),
        ("SOMETHING_NEW", "Slurm says SOMETHING_NEW"),
    ],
)
def test_a_job_that_does_not_wait_tells_its_nodes(state: str, reason: str) -> None:
    assert live_of(job(state, nodes="n[0-1]")) == Live(state=state, nodes="n[0-1]", reason=reason)


@pytest.mark.parametrize(
    ("state", "reason", "expected"),
    [
        ("PENDING", "Priority", ""),
        ("PENDING", "JobHeldUser", "user"),
        ("PENDING", "JobHeldAdmin", "admin"),
        ("PENDING", "(launch failure limit exceeded requeued held)", "slurm"),
        ("REQUEUE_HOLD", "JobHoldMaxRequeue", "slurm"),
        ("REQUEUE_HOLD", "job requeued in held state", "user"),
        ("SPECIAL_EXIT", "", "user"),
        ("RESV_DEL_HOLD", "JobHeldUser", "user"),
        ("RUNNING", "None", ""),
    ],
)
def test_who_holds_a_job_follows_from_its_state_and_reason(state: str, reason: str, expected: str) -> None:
    held = live_of(job(state, reason=reason))
    assert (held.state, holder(held)) == (state, expected)
    assert ("'scontrol release 7' releases it" in held.reason) == (expected == "user" and bool(reason))


def test_a_submission_that_ended_since_its_run_was_read_is_no_orphan(workspace: Workspace, run: SimulatedRun) -> None:
    run.submitting(host=THIS_HOST)
    observe(workspace, ask_slurm=False)
    before = load_run(workspace)
    run.command("submitted", submission=1, job_id="7")
    look_at_slurm(workspace, {run.directory: before})
    assert journals(run, "adopt") == []
