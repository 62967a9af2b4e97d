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

from slurmtrain.config import Config
from slurmtrain.model.run.events.base import encode
from slurmtrain.model.run.layout import RunDir
from slurmtrain.model.run.run import Live, Run
from slurmtrain.ops.shared.observe import Observed, observe
from slurmtrain.ops.shared.slurm_jobs import live_of, look_at_slurm
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.slurm.reconcile import GIVEN_UP_S
from slurmtrain.slurm.scheduler import Queue
from slurmtrain.system.files import locked

RUN_ID = "0123456789"
OTHER_ID = "1123456789"
HERE = socket.gethostname()
DOWN = "squeue: Unable to contact slurm controller"


@pytest.fixture
def slurm() -> FakeScheduler:
    return FakeScheduler()


@pytest.fixture
def workspace(tmp_path: Path, slurm: FakeScheduler) -> Workspace:
    config = Config(runs=tmp_path, executor=None, registry=tmp_path / "registry.db", mlflow_uri=None)
    return Workspace(config, scheduler=slurm)


def make_run(workspace: Workspace, run_id: str = RUN_ID, executor: str = "slurm") -> RunDir:
    directory = workspace.root.run(run_id)
    directory.journals.mkdir(parents=True)
    directory.attempts.mkdir()
    directory.checkpoints.mkdir()
    directory.submission(1).path.mkdir(parents=True)
    tell(directory, "created", at=1.0, name="digits", executor=executor)
    return directory


@pytest.fixture
def run(workspace: Workspace) -> RunDir:
    return make_run(workspace)


def tell(run: RunDir, kind: str, journal: str = "submit", *, at: float | None = None, **data: Any) -> None:
    with (run.journals / f"{journal}.jsonl").open("ab") as file:
        file.write(encode(time.time() - 10.0 if at is None else at, kind, data))


def agent_speaks(run: RunDir, job: str = "7", restart: int = 0, **end: Any) -> None:
    attempt = run.attempt(job, restart)
    attempt.path.mkdir(exist_ok=True)
    now = time.time()
    said = {"node": 0, "nodes": 1, "host": "n0", "executor": "slurm", "submission": 1, "attempt": 1 + restart}
    with attempt.node_journal(0).open("ab") as file:
        file.write(encode(now - 5.0, "agent", said))
        if end:
            file.write(encode(now - 1.0, "end", {"reason": "", "signal": None, **end}))


def submitting(run: RunDir, host: str = HERE, *, submission: int = 1, at: float | None = None) -> None:
    """A submission that was killed before it could say which job it has."""
    tell(run, "submitting", at=at, submission=submission, attempt=submission, executor="slurm", host=host)


def submitted(run: RunDir, job: str = "7", submission: int = 1) -> None:
    submitting(run, submission=submission)
    tell(run, "submitted", submission=submission, job_id=job)


def look(workspace: Workspace) -> Run:
    observe(workspace)
    return loaded(workspace)


def loaded(workspace: Workspace) -> Run:
    run = workspace.store.load(RUN_ID)
    assert run is not None
    return run


def journals(run: RunDir, kind: str) -> list[Path]:
    return sorted(run.journals.glob(f"{kind}-*.jsonl"))


# --- what is asked ----------------------------------------------------------------------------------------------


def test_slurm_is_not_asked_where_nothing_is_open(workspace: Workspace, run: RunDir, slurm: FakeScheduler) -> None:
    submitted(run)
    agent_speaks(run, cause="completed")
    make_run(workspace, OTHER_ID, executor="local")
    observe(workspace)
    assert slurm.questions == []
    assert loaded(workspace).state == "completed"


def test_slurm_is_not_asked_by_a_look_that_shall_not_ask(
    workspace: Workspace, run: RunDir, slurm: FakeScheduler
) -> None:
    submitted(run)
    observe(workspace, ask_slurm=False)
    assert slurm.questions == []


def test_a_job_that_squeue_knows_costs_one_question(workspace: Workspace, run: RunDir, slurm: FakeScheduler) -> None:
    submitted(run)
    slurm.jobs = [job("PENDING")]
    assert look(workspace).state == "pending"
    assert slurm.questions == ["squeue"]
    assert journals(run, "observe") == []


def test_many_runs_cost_two_questions(workspace: Workspace, run: RunDir, slurm: FakeScheduler) -> None:
    submitted(run)
    for number in range(5):
        submitted(make_run(workspace, f"{number}223456789"), f"1{number}")
    slurm.jobs = [job("RUNNING", "10", "0223456789")]
    observe(workspace)
    assert [one if isinstance(one, str) else one[:3] for one in slurm.questions] == [
        "squeue",
        ("sacct", ["11", "12", "13", "14", "7"], False),
    ]


def test_sacct_is_asked_from_the_first_submission_on(workspace: Workspace, run: RunDir, slurm: FakeScheduler) -> None:
    submitting(run, at=5000.0)
    tell(run, "submitted", submission=1, job_id="7")
    submitted(make_run(workspace, OTHER_ID), "8")
    observe(workspace)
    assert slurm.questions[1] == ("sacct", ["7", "8"], False, 5000.0)


def test_an_orphan_is_looked_for_by_name(workspace: Workspace, run: RunDir, slurm: FakeScheduler) -> None:
    submitting(run)
    submitted(make_run(workspace, OTHER_ID), "8")
    observe(workspace)
    assert slurm.questions[1][:3] == ("sacct", ["8"], True)


# --- what is told -----------------------------------------------------------------------------------------------


def test_what_slurm_says_of_an_end_is_journaled_once(workspace: Workspace, run: RunDir, slurm: FakeScheduler) -> None:
    submitted(run)
    agent_speaks(run)
    slurm.starts = {"7": [job("OUT_OF_MEMORY", ends_at=time.time() - 1)]}
    for _ in range(3):
        found = look(workspace)
        assert (found.state, found.attempts[0].cause) == ("failed", "oom")
    assert len(journals(run, "observe")) == 1


def test_a_job_that_was_put_back_into_the_queue_is_requeued(
    workspace: Workspace, run: RunDir, slurm: FakeScheduler
) -> None:
    submitted(run)
    agent_speaks(run, cause="cancelled", signal="SIGTERM", failed_at=time.time() - 2)
    slurm.jobs = [job("PENDING", restart=1, reason="BeginTime")]
    slurm.starts = {"7": [job("PREEMPTED", restart=None)]}
    found = look(workspace)
    assert (found.state, [attempt.cause for attempt in found.attempts]) == ("requeued", ["preempted", None])
    slurm.jobs = [job("RUNNING", restart=1)]
    agent_speaks(run, restart=1)
    assert look(workspace).state == "running"


def test_why_an_earlier_start_ended_is_asked_once_though_its_job_has_ended_well(
    workspace: Workspace, run: RunDir, slurm: FakeScheduler
) -> None:
    submitted(run)
    agent_speaks(run)
    agent_speaks(run, restart=1, cause="completed")
    slurm.starts = {"7": [job("NODE_FAIL", starts_at=1.0), job("COMPLETED", starts_at=2.0)]}
    for _ in range(3):
        found = look(workspace)
        assert (found.state, [attempt.cause for attempt in found.attempts]) == ("completed", ["node_fail", "completed"])
    assert len(slurm.questions) == 2


@pytest.mark.parametrize(
    ("log", "reason"),
    [
        ("starting\npython: can't open file\n\n", "python: can't open file"),
        ("API_KEY=hunter2\n", "API_KEY=<redacted>"),
        ("", "its log is empty"),
        (None, "it left no log; perhaps the nodes node0 cannot see or write to"),
    ],
)
def test_a_job_that_never_spoke_is_told_by_its_log(
    workspace: Workspace, run: RunDir, slurm: FakeScheduler, log: str | None, reason: str
) -> None:
    submitted(run)
    folder = run.submission(1).submitit
    folder.mkdir()
    if log is not None:
        (folder / "7_0_log.out").write_text(log)
    slurm.jobs = [job("FAILED", exit_code=2, nodes="node0")]
    found = look(workspace)
    assert found.reason.startswith(f"Slurm says FAILED with exit code 2: {reason}")


@pytest.mark.parametrize("state", ["NODE_FAIL", "PREEMPTED", "CANCELLED by 0"])
def test_a_job_that_slurm_ended_needs_no_log(
    workspace: Workspace, run: RunDir, slurm: FakeScheduler, state: str
) -> None:
    submitted(run)
    slurm.jobs = [job(state)]
    assert "log" not in look(workspace).reason


def test_a_question_without_an_answer_is_a_problem_and_changes_nothing(
    workspace: Workspace, run: RunDir, slurm: FakeScheduler
) -> None:
    submitted(run)
    slurm.squeue_problem = DOWN
    assert observe(workspace).problems == [f"{DOWN}; states are as they were last known"]
    assert slurm.questions == ["squeue"]
    slurm.squeue_problem, slurm.sacct_problem = "", "sacct: down"
    assert observe(workspace).problems == ["sacct: down; runs whose jobs have ended may be shown as they were before"]
    assert loaded(workspace).state == "pending"
    assert journals(run, "observe") == []


def test_a_site_without_accounting_is_no_problem(workspace: Workspace, run: RunDir, slurm: FakeScheduler) -> None:
    submitted(run)
    slurm.sacct_problem, slurm.has_accounting = "sacct: Slurm accounting storage is disabled", False
    assert observe(workspace).problems == []


# --- orphans ----------------------------------------------------------------------------------------------------


def state(workspace: Workspace) -> tuple[str, str]:
    found = look(workspace)
    return found.state, found.newest.job_id if found.newest else ""


def test_the_job_of_a_submission_that_was_killed_is_found_in_squeue(
    workspace: Workspace, run: RunDir, slurm: FakeScheduler
) -> None:
    submitting(run)
    slurm.jobs = [job("RUNNING", "6", OTHER_ID), job("PENDING", "7")]
    for _ in range(2):
        assert state(workspace) == ("pending", "7")
    assert len(journals(run, "adopt")) == 1


def test_the_job_of_a_submission_that_was_killed_is_found_in_sacct_and_then_how_it_ended(
    workspace: Workspace, run: RunDir, slurm: FakeScheduler
) -> None:
    submitting(run)
    slurm.starts = {"6": [job("FAILED", "6", OTHER_ID)], "7": [job("NODE_FAIL", restart=None)]}
    assert state(workspace) == ("pending", "7")
    assert state(workspace) == ("failed", "7")
    assert loaded(workspace).attempts[0].cause == "node_fail"


def test_a_job_that_an_earlier_submission_has_claimed_is_not_taken_for_the_orphans(
    workspace: Workspace, run: RunDir, slurm: FakeScheduler
) -> None:
    submitted(run)
    agent_speaks(run, cause="crash", failed_at=time.time() - 2)
    submitting(run, submission=2, at=time.time())
    slurm.jobs = [job("COMPLETING", "7"), job("PENDING", "8")]
    assert state(workspace) == ("pending", "8")
    assert [attempt.job_id for attempt in loaded(workspace).attempts] == ["7", "8"]


def test_a_submission_whose_agents_speak_needs_no_adoption(
    workspace: Workspace, run: RunDir, slurm: FakeScheduler
) -> None:
    submitting(run)
    agent_speaks(run)
    slurm.jobs = [job("RUNNING")]
    assert state(workspace) == ("running", "7")
    assert journals(run, "adopt") == []


def test_a_submission_that_died_before_slurm_had_its_job_never_was_one(
    workspace: Workspace, run: RunDir, slurm: FakeScheduler
) -> None:
    submitting(run)
    found = look(workspace)
    assert (found.state, found.attempts) == ("created", [])
    assert found.reason == "its submission was killed before Slurm had the job"
    look(workspace)
    assert len(journals(run, "adopt")) == 1


def test_a_site_without_accounting_is_sure_by_squeue_alone(
    workspace: Workspace, run: RunDir, slurm: FakeScheduler
) -> None:
    submitting(run)
    slurm.sacct_problem, slurm.has_accounting = "sacct: Slurm accounting storage is disabled", False
    assert state(workspace)[0] == "created"


@pytest.mark.parametrize(
    "answers",
    [{"age": 500.0}, {"squeue_problem": DOWN}, {"sacct_problem": "sacct: down"}],
    ids=["old", "squeue", "sacct"],
)
def test_no_submission_is_given_up_without_two_answers_from_after_the_look_began(
    workspace: Workspace, run: RunDir, slurm: FakeScheduler, answers: dict[str, Any]
) -> None:
    submitting(run, at=time.time() - 1000.0)
    for name, value in answers.items():
        setattr(slurm, name, value)
    assert state(workspace) == ("pending", "")
    assert journals(run, "adopt") == []


def test_a_job_is_adopted_also_by_an_old_answer(workspace: Workspace, run: RunDir, slurm: FakeScheduler) -> None:
    submitting(run)
    slurm.age, slurm.jobs = 5.0, [job("PENDING")]
    assert state(workspace) == ("pending", "7")


def test_a_submission_that_still_holds_its_lock_is_left_alone(
    workspace: Workspace, run: RunDir, slurm: FakeScheduler
) -> None:
    submitting(run)
    slurm.jobs = [job("PENDING")]
    with locked(run.lock):
        assert state(workspace) == ("pending", "")
    assert journals(run, "adopt") == []
    assert state(workspace) == ("pending", "7")


def test_a_submission_whose_sbatch_lives_is_left_alone(workspace: Workspace, run: RunDir, slurm: FakeScheduler) -> None:
    submitting(run)
    script = str(run.submission(1).submitit / ".submission_file_1.sh")
    code = "import time; print(flush=True); time.sleep(600)"
    sbatch = subprocess.Popen(["sbatch", "-c", code, script], executable=sys.executable, stdout=subprocess.PIPE)
    try:
        assert sbatch.stdout is not None
        sbatch.stdout.readline()
        assert state(workspace) == ("pending", "")
    finally:
        sbatch.kill()
        sbatch.communicate()
    assert state(workspace)[0] == "created"


def test_the_lock_of_an_orphan_is_held_while_slurm_is_asked_and_free_afterwards(
    workspace: Workspace, run: RunDir, slurm: FakeScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    submitting(run)
    free = []

    def is_free() -> bool:
        with locked(run.lock, wait=False) as lock:
            return lock is not None

    def queue() -> Queue:
        free.append(is_free())
        return Queue(at=time.time())

    monkeypatch.setattr(slurm, "queue", queue)
    look(workspace)
    assert free == [False]
    assert is_free()


def test_a_submission_from_another_machine_is_given_up_only_after_a_while(
    workspace: Workspace, run: RunDir, slurm: FakeScheduler
) -> None:
    submitting(run, "elsewhere")
    assert state(workspace) == ("pending", "")
    old = make_run(workspace, OTHER_ID)
    submitting(old, "elsewhere", at=time.time() - GIVEN_UP_S - 5)
    look(workspace)
    assert state(workspace) == ("pending", "")
    other = workspace.store.load(OTHER_ID)
    assert other is not None
    assert other.state == "created"


def test_the_job_of_a_submission_from_another_machine_is_adopted_at_once(
    workspace: Workspace, run: RunDir, slurm: FakeScheduler
) -> None:
    submitting(run, "elsewhere")
    slurm.jobs = [job("PENDING")]
    assert state(workspace) == ("pending", "7")


# --- what a job is doing ----------------------------------------------------------------------------------------


def live(seen: Observed) -> Live | None:
    return seen.runs[RUN_ID].live


def test_a_job_that_waits_tells_why_and_until_when(workspace: Workspace, run: RunDir, slurm: FakeScheduler) -> None:
    submitted(run)
    slurm.jobs = [job("PENDING", reason="Priority", starts_at=5e9, priority=10)]
    assert live(observe(workspace)) == Live(
        state="PENDING",
        code="Priority",
        reason="jobs of higher priority are before it (Priority)",
        starts_at=5e9,
        priority=10,
    )


@pytest.mark.parametrize("over", ["COMPLETED", "FAILED"])
def test_a_job_that_is_over_is_not_live(workspace: Workspace, run: RunDir, slurm: FakeScheduler, over: str) -> None:
    submitted(run)
    slurm.jobs = [job(over)]
    assert live(observe(workspace)) is None


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        ("RUNNING", "Slurm has started it; it is being set up"),
        ("COMPLETING", "its last processes are ending"),
        ("SUSPENDED", "Slurm has suspended it"),
        ("SOMETHING_NEW", "Slurm says SOMETHING_NEW"),
    ],
)
def test_a_job_that_does_not_wait_tells_its_nodes(state: str, reason: str) -> None:
    assert live_of(job(state, nodes="n[0-1]")) == Live(state=state, nodes="n[0-1]", reason=reason)


@pytest.mark.parametrize("state", ["REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD"])
def test_a_job_that_is_held_tells_how_to_let_it_go(state: str) -> None:
    held = live_of(job(state, reason="JobHeldUser"))
    assert held.state == state
    assert "'scontrol release 7' releases it" in held.reason


def test_a_submission_that_ended_since_its_run_was_read_is_no_orphan(workspace: Workspace, run: RunDir) -> None:
    submitting(run)
    observe(workspace, ask_slurm=False)
    before = loaded(workspace)
    tell(run, "submitted", submission=1, job_id="7")
    look_at_slurm(workspace, {run: before})
    assert journals(run, "adopt") == []
