"""Asking Slurm: how often, with which words, in which environment, and what an answer that fails is."""

from __future__ import annotations

import json
import math
import os
import time
from pathlib import Path

import pytest
from helpers.fakeslurm import SlurmCommands

from slurmtrain.errors import SlurmDown
from slurmtrain.slurm import slurm_commands
from slurmtrain.slurm.parse import ACCOUNTING_FIELDS, QUEUE_FIELDS, join_elements, queue_format
from slurmtrain.slurm.scheduler import Scheduler
from slurmtrain.slurm.slurm_commands import extract_errors, is_installed, run_command

ROW = "7|FAILED|1:0|100|200|300|30|node0|digits-r1\n"


def line(job_id: str = "7", state: str = "RUNNING") -> str:
    cells = {"JobArrayID": job_id, "State": state, "Name": "digits-r1"}
    return "".join(f"{cells.get(name, ''):<{width}}" for name, width in QUEUE_FIELDS) + "\n"


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SlurmCommands:
    fake = SlurmCommands(tmp_path / "bin")
    monkeypatch.setenv("PATH", fake.on_path())
    fake.replies("squeue", line())
    fake.replies("sacct", ROW)
    fake.replies("scontrol", "PartitionName=spot Default=YES MaxTime=1:00:00\n")
    return fake


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "squeue.json"


def once() -> Scheduler:
    """As a command has it that looks once."""
    return Scheduler(math.inf, None)


# --- squeue -----------------------------------------------------------------------------------------------------


def test_squeue_is_asked_once_however_often_its_answer_is_wanted(slurm: SlurmCommands, tmp_path: Path) -> None:
    scheduler = once()
    before = time.time()
    queues = [scheduler.queue() for _ in range(5)]
    assert queues[0].answered
    assert queues[0].jobs["7"].state == "RUNNING"
    assert before <= queues[0].at <= time.time()
    assert all(queue is queues[0] for queue in queues)
    [call] = slurm.calls("squeue")
    assert call.args == ["--me", "--noheader", "--array", "--states=all", f"--Format={queue_format()}"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bin"]


def test_an_answer_is_asked_for_anew_when_it_is_too_old(slurm: SlurmCommands, monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler, now = Scheduler(10.0, None), time.time()
    monkeypatch.setattr(time, "time", lambda: now)
    scheduler.queue()
    monkeypatch.setattr(time, "time", lambda: now + 9.0)
    scheduler.queue()
    assert len(slurm.calls("squeue")) == 1
    monkeypatch.setattr(time, "time", lambda: now + 11.0)
    scheduler.queue()
    assert len(slurm.calls("squeue")) == 2


@pytest.mark.parametrize("passed_s", [61.0, -100.0])
def test_a_shared_answer_that_is_old_or_from_the_future_is_asked_for_anew_and_shared_again(
    slurm: SlurmCommands, cache: Path, monkeypatch: pytest.MonkeyPatch, passed_s: float
) -> None:
    Scheduler(60.0, cache).queue()
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + passed_s)
    slurm.replies("squeue", line(state="COMPLETING"))
    for _ in range(2):
        assert Scheduler(60.0, cache).queue().jobs["7"].state == "COMPLETING"
    assert len(slurm.calls("squeue")) == 2


@pytest.mark.parametrize("text", ["", "garbage", "[]", "{}", '{"at": "x", "squeue": ""}', '{"at": 1e99, "squeue": 7}'])
def test_a_shared_answer_that_cannot_be_read_is_asked_for_anew(slurm: SlurmCommands, cache: Path, text: str) -> None:
    cache.write_text(text)
    # Also where the answer cannot be shared.
    assert Scheduler(60.0, cache / "c.json").queue().jobs.keys() == {"7"}
    assert Scheduler(60.0, cache).queue().jobs.keys() == {"7"}
    assert json.loads(cache.read_text())["squeue"] == line()


def test_after_a_change_everything_is_asked_for_anew_and_no_shared_answer_from_before_it_believed(
    slurm: SlurmCommands, cache: Path
) -> None:
    scheduler = Scheduler(60.0, cache)
    scheduler.queue()
    scheduler.accounting({"7"}, False, 0.0)
    scheduler.forget()
    slurm.replies("squeue", line("8"))
    for each in (scheduler, scheduler, Scheduler(60.0, cache)):
        assert each.queue().jobs.keys() == {"8"}
    scheduler.accounting({"7"}, False, 0.0)
    assert (len(slurm.calls("squeue")), len(slurm.calls("sacct"))) == (2, 2)


def test_a_squeue_that_fails_is_an_answer_with_a_problem_and_is_asked_once(slurm: SlurmCommands, cache: Path) -> None:
    slurm.fails("squeue", "slurm_load_jobs error: Unable to contact slurm controller (connect failure)\n")
    scheduler = Scheduler(60.0, cache)
    queues = [scheduler.queue() for _ in range(3)]
    assert not queues[0].answered
    assert queues[0].problem == "squeue: slurm_load_jobs error: Unable to contact slurm controller (connect failure)"
    assert queues[0].jobs == {}
    assert len(slurm.calls("squeue")) == 1
    assert not cache.exists()


# --- sacct ------------------------------------------------------------------------------------------------------


def test_sacct_is_asked_for_jobs_by_id_with_their_steps_and_all_their_starts(slurm: SlurmCommands) -> None:
    scheduler = once()
    since = time.mktime((2026, 11, 21, 12, 0, 0, 0, 0, -1))
    accounting = scheduler.accounting({"9", "7"}, False, since)
    assert accounting.answered
    assert [job.state for job in accounting.starts["7"]] == ["FAILED"]
    [call] = slurm.calls("sacct")
    assert call.args == [
        "--parsable2",
        "--noheader",
        "--duplicates",
        f"--user={os.getuid()}",
        f"--format={','.join(ACCOUNTING_FIELDS)}",
        "--starttime=2026-11-21T11:00:00",
        "--jobs=7,9",
    ]


def test_sacct_is_asked_again_by_a_command_that_looks_again_only_for_other_jobs(
    slurm: SlurmCommands, cache: Path
) -> None:
    looks_once, scheduler = once(), Scheduler(60.0, cache)
    for job_ids in ({"7"}, {"7", "8"}):
        looks_once.accounting(job_ids, False, 0.0)
    assert len(slurm.calls("sacct")) == 1
    for job_ids in ({"7", "8"}, {"7"}, {"8"}):
        scheduler.accounting(job_ids, False, 0.0)
    assert len(slurm.calls("sacct")) == 2
    scheduler.accounting({"9"}, False, 0.0)
    assert len(slurm.calls("sacct")) == 3


@pytest.mark.parametrize(
    ("printed", "absent", "problem"),
    [
        ("Slurm accounting storage is disabled\n", True, "sacct: Slurm accounting storage is disabled"),
        ("sacct: error: Connection refused\n", False, "sacct: Connection refused"),
    ],
)
def test_a_sacct_that_fails_is_asked_once_and_a_site_without_accounting_has_answered(
    slurm: SlurmCommands, printed: str, absent: bool, problem: str
) -> None:
    slurm.fails("sacct", printed)
    scheduler = once()
    # By name, or for too many to list, all jobs are asked for.
    answers = [
        scheduler.accounting(ids, by_name, 0.0) for ids, by_name in ((set(map(str, range(1001))), False), ({"7"}, True))
    ]
    assert [(each.answered, each.absent, each.starts, each.problem) for each in answers] == [
        (absent, absent, {}, problem)
    ] * 2
    [call] = slurm.calls("sacct")
    assert not any(argument.startswith("--jobs") for argument in call.args)


# --- scontrol ---------------------------------------------------------------------------------------------------


def test_partitions_are_asked_for_once_and_a_slurm_that_is_down_is_an_error(slurm: SlurmCommands) -> None:
    scheduler = once()
    assert scheduler.partitions() == scheduler.partitions()
    assert scheduler.partitions()["spot"]["MaxTime"] == "1:00:00"
    assert [call.args for call in slurm.calls("scontrol")] == [["--oneliner", "show", "partition"]]
    slurm.fails("scontrol", "slurm_load_partitions error: Unable to contact slurm controller\n")
    with pytest.raises(SlurmDown, match="scontrol: slurm_load_partitions error: Unable to contact"):
        once().partitions()


def test_a_command_does_not_wait_for_a_slurm_that_does_not_answer(
    slurm: SlurmCommands, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm.replies("squeue", until=tmp_path / "never")
    queue = Scheduler(math.inf, None, patience_s=1.0).queue()
    assert (queue.answered, queue.problem) == (False, "squeue did not answer within 1 s")
    monkeypatch.setattr(slurm_commands, "_TIMEOUT_S", 0.2)
    assert "squeue did not answer within" in once().queue().problem


# --- the commands' environment ----------------------------------------------------------------------------------

SCRUBBED = {
    "SQUEUE_FORMAT": "%i",
    "SQUEUE_SORT": "u",
    "SACCT_FORMAT": "jobid",
    "SCANCEL_INTERACTIVE": "1",
    "SLURM_JOB_ID": "99",
    "SLURM_CLUSTERS": "other",
    "SLURM_JSON": "x",
    "SLURMTRAIN_JOB_ID": "99",
}


def test_what_would_change_an_answer_is_kept_from_slurms_commands(
    slurm: SlurmCommands, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = {"SLURM_TIME_FORMAT": "relative", "LC_ALL": "de_DE", "SLURM_BITSTR_LEN": "9"}
    for name, value in {**SCRUBBED, **other}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("SLURM_CONF", "/etc/slurm/slurm.conf")
    monkeypatch.setenv("SLURM_JWT", "t")
    scheduler = once()
    scheduler.queue()
    scheduler.accounting({"7"}, False, 0.0)
    scheduler.partitions()
    for name in ("squeue", "sacct", "scontrol"):
        env = slurm.calls(name)[0].env
        assert not env.keys() & SCRUBBED.keys()
        assert (env["SLURM_CONF"], env["SLURM_JWT"]) == ("/etc/slurm/slurm.conf", "t")
        assert (env["SLURM_TIME_FORMAT"], env["LC_ALL"], env["SLURM_BITSTR_LEN"]) == ("%s", "C.UTF-8", "0")
        assert env["PATH"] == os.environ["PATH"]
    # The environment of this process stays as it is.
    assert SCRUBBED.items() <= os.environ.items()


# --- a command that fails ---------------------------------------------------------------------------------------


def test_a_missing_command_is_named_and_a_silent_one_described_by_its_exit_code(slurm: SlurmCommands) -> None:
    (slurm.path / "sacct").unlink()
    assert is_installed("squeue")
    assert not is_installed("sacct")
    with pytest.raises(SlurmDown, match="there is no sacct on this machine's PATH"):
        run_command("sacct")
    assert "there is no sacct" in once().accounting({"7"}, False, 0.0).problem
    slurm.replies("squeue", code=3)
    with pytest.raises(SlurmDown, match=r"squeue: exit code 3"):
        run_command("squeue")


@pytest.mark.parametrize(
    ("printed", "expected"),
    [
        ([], ""),
        (["", "  "], ""),
        (["sbatch: error: Batch job submission failed: Invalid qos"], "Batch job submission failed: Invalid qos"),
        (["sbatch: error: a", "sbatch: note", "sbatch: error: b"], "a; b"),
        (["sbatch: error: a", "sbatch: error: a"], "a"),
        (["  something else ", "and more"], "something else; and more"),
    ],
)
def test_of_what_a_command_printed_the_errors_count_or_else_all_of_it(printed: list[str], expected: str) -> None:
    assert extract_errors(printed) == expected


# --- scancel ----------------------------------------------------------------------------------------------------


def test_jobs_are_cancelled_with_one_call_and_asked_again_only_when_the_interval_is_over(
    slurm: SlurmCommands, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm.replies("scancel")
    scheduler, now = Scheduler(30.0, None), time.time()
    monkeypatch.setattr(time, "time", lambda: now)
    for _ in range(5):
        scheduler.cancel(["7", "8"], force=False)
    scheduler.cancel(["7", "9"], force=False)
    assert [call.args for call in slurm.calls("scancel")] == [["7", "8"], ["9"]]
    monkeypatch.setattr(time, "time", lambda: now + 31.0)
    scheduler.cancel(["7"], force=False)
    assert len(slurm.calls("scancel")) == 3


def test_a_cancelled_job_is_no_longer_requeued_even_if_scontrol_fails(
    slurm: SlurmCommands,
) -> None:
    slurm.replies("scancel")
    slurm.replies("scontrol")
    once().cancel(["7"], force=False)
    slurm.fails("scontrol", "slurm_update error: Invalid job id specified\n")
    once().cancel(["7", "8"], force=False)
    expected = [["update", "JobId=7", "Requeue=0"], ["update", "JobId=7,8", "Requeue=0"]]
    assert [call.args for call in slurm.calls("scontrol")] == expected
    assert [call.args for call in slurm.calls("scancel")] == [["7"], ["7", "8"]]


def test_a_cancelled_job_that_has_ended_is_none_to_worry_about_but_a_dead_slurm_is(slurm: SlurmCommands) -> None:
    slurm.fails("scancel", "scancel: error: Kill job error on job id 7: Invalid job id specified\n")
    once().cancel(["7"], force=False)
    once().cancel(["7"], force=True)
    assert [call.args for call in slurm.calls("scancel")] == [["7"], ["--signal=KILL", "--full", "7"]]
    slurm.fails("scancel", "scancel: error: Unable to contact slurm controller (connect failure)\n")
    with pytest.raises(SlurmDown, match="connect failure"):
        once().cancel(["7"], force=False)


def test_elements_of_an_array_are_one_argument_of_a_command() -> None:
    assert join_elements(["8_0", "9", "8_2", "8_1", "8_5", "10_3"]) == ["8_[0-2,5]", "9", "10_3"]
    assert join_elements([f"8_{index}" for index in range(1000)]) == ["8_[0-999]"]
