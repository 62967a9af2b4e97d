"""Putting a job back into the queue without some nodes: what Slurm is told, in which order, and what a refusal does."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from helpers.fakeslurm import SlurmCommands
from helpers.site import PATIENCE_S, until

from slurmtrain.errors import SlurmDown
from slurmtrain.slurm import requeue
from slurmtrain.slurm.requeue import SlurmQueue, release_held

RECORD = """\
JobId=7 JobName=digits Requeue=9 ExcNodeList=evil
   UserId=me(1000) GroupId=me(1000) MCS_label=N/A
   Priority=1 Nice=0 Account=team QOS=normal
   JobState={state} Reason={reason} Dependency=(null)
   Requeue={requeue} Restarts=0 BatchFlag=1 Reboot=0 ExitCode=0:0
   Partition=spot AllocNode:Sid=login:1
   ReqNodeList=(null) ExcNodeList={excluded}
   NodeList=node[0-1]
   NumNodes=2 NumCPUs=2 NumTasks=2 CPUs/Task=1 ReqB:S:C:T=0:0:*:*
   Features=(null) DelayBoot=00:00:00
   Command=/runs/x ExcNodeList=evil
   WorkDir=/runs/x
"""
SCRIPT = "#!/bin/bash\n#SBATCH --account=lab\n#SBATCH --nodes=2\nsrun true\n"
# A scontrol that keeps a job: its state is the file job.json beside it, and each call is noted.
SCONTROL = """\
#!{python} -IS
import json, os, signal, sys
here = os.path.dirname(os.path.abspath(sys.argv[0]))
with open(here + "/calls.jsonl", "a") as file:
    file.write(json.dumps({{"name": "scontrol", "args": sys.argv[1:], "env": dict(os.environ), "cwd": "/"}}) + "\\n")
with open(here + "/job.json") as file:
    job = json.load(file)
verb = sys.argv[1]
def refuse(why):
    sys.stderr.write(why + "\\n")
    sys.exit(1)
if verb == "show":
    sys.stdout.write(job["record"].format(**job))
elif verb == "write":
    sys.stdout.write(job["script"])
elif verb == "requeue":
    if job["requeue"] == "0":
        refuse("Requested operation is presently disabled for job 7")
    job["state"] = "PENDING"
    if job["strict"]:
        os.kill(os.getppid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
elif verb == "update":
    if job["refusals"]:
        job["refusals"] -= 1
        with open(here + "/job.json", "w") as file:
            json.dump(job, file)
        refuse("slurm_update error: Job is no longer pending execution")
    told = dict(word.split("=", 1) for word in sys.argv[2:])
    job["excluded"] = told.get("ExcNodeList", job["excluded"])
    job["starts"] = told.get("StartTime", job["starts"])
    job["after"] = told.get("Dependency", job["after"])
    job["requeue"] = told.get("Requeue", job["requeue"])
elif verb == "hold":
    job["reason"] = "JobHeldUser"
elif verb == "release":
    job["reason"] = "None"
with open(here + "/job.json", "w") as file:
    json.dump(job, file)
"""


class Slurm(SlurmCommands):
    """Slurm with one job."""

    def job(self, **more: Any) -> None:
        fields = {"record": RECORD, "script": SCRIPT, "state": "RUNNING", "reason": "None", "requeue": "1",
                "excluded": "(null)", "starts": "now", "after": "", "refusals": 0, "strict": False, **more}  # fmt: skip
        (self.path / "job.json").write_text(json.dumps(fields))
        script = self.path / "scontrol"
        script.write_text(SCONTROL.format(python=sys.executable))
        script.chmod(0o755)

    @property
    def now(self) -> dict[str, Any]:
        state: dict[str, Any] = json.loads((self.path / "job.json").read_text())
        return state

    @property
    def verbs(self) -> list[str]:
        return [call.args[0] for call in self.calls("scontrol")]


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Slurm:
    fake = Slurm(tmp_path / "bin")
    monkeypatch.setenv("PATH", fake.on_path())
    monkeypatch.setattr(requeue, "_PAUSES_S", (0.0, 0.0))
    # What Slurm itself leaves is too little for a program to start in on a machine that is busy.
    monkeypatch.setattr(requeue, "_PATIENCE_S", PATIENCE_S)
    fake.job()
    fake.replies(
        "sbatch", stderr="sbatch: Job 9 to start at 2026-01-01T00:00:00 using 2 processors on nodes node[0,2]\n"
    )
    fake.replies("sinfo", "".join(f"node{i}|spot|idle|8|16000|(null)|(null)\n" for i in range(3)))
    return fake


def requeue_job(without: Sequence[str] = (), delay_s: float = 0.0, intent: Path = Path("/nowhere/requeue")) -> None:
    """Put the job back. By default ``intent`` cannot be written, so that doing so would fail."""
    SlurmQueue().requeue_job("7", without, delay_s, intent)


# --- putting back -------------------------------------------------------------------------------------------------


def test_a_job_is_requeued_before_its_nodes_are_changed_and_never_held(slurm: Slurm) -> None:
    requeue_job()
    assert [call.args for call in slurm.calls("scontrol")] == [["requeue", "incomplete", "7"]]
    requeue_job(["node1"])
    assert [call.args for call in slurm.calls("scontrol")][1:] == [
        ["show", "job", "7"], ["requeue", "incomplete", "7"], ["update", "JobId=7", "ExcNodeList=node1"],
    ]  # fmt: skip


def test_a_job_is_told_when_to_start_in_whole_seconds_and_put_back_if_that_fails(slurm: Slurm) -> None:
    requeue_job(delay_s=29.2)
    assert (slurm.verbs, slurm.now["starts"]) == (["requeue", "update"], "now+30")
    (slurm.path / "calls.jsonl").unlink()
    slurm.job(refusals=3)
    requeue_job(["node1"], delay_s=60)
    assert slurm.verbs == ["show", "requeue", "update", "update", "update", "update"]
    assert (slurm.now["starts"], slurm.now["excluded"]) == ("now", "node1")


@pytest.mark.parametrize(
    ("before", "after"), [("node2", "node[1-2]"), ("node[1,3]", "node[1,3]"), ("odd]", "odd],node1")]
)
def test_what_was_excluded_before_stays_excluded(slurm: Slurm, before: str, after: str) -> None:
    slurm.job(excluded=before)
    requeue_job(["node1"])
    assert slurm.now["excluded"] == after


def test_a_job_is_kept_from_another_start(slurm: Slurm, tmp_path: Path) -> None:
    SlurmQueue().forbid_requeue("7", tmp_path / "no-requeue")
    assert slurm.calls("scontrol")[0].args == ["update", "JobId=7", "Requeue=0"]
    assert not (tmp_path / "no-requeue").exists()


def test_the_batch_script_keeps_a_job_from_another_start_if_the_agent_cannot(slurm: Slurm, tmp_path: Path) -> None:
    slurm.job(refusals=1)
    SlurmQueue().forbid_requeue("7", tmp_path / "refused")
    (slurm.path / "scontrol").unlink()
    SlurmQueue().forbid_requeue("7", tmp_path / "container")
    for name in ("refused", "container"):
        assert json.loads((tmp_path / name).read_text()) == {"forbid_requeue": "7"}


def test_a_job_whose_nodes_cannot_be_left_out_is_held_and_the_agent_told(slurm: Slurm) -> None:
    slurm.job(refusals=99)
    with pytest.raises(SlurmDown, match="Job is no longer pending execution"):
        requeue_job(["node1"])
    assert slurm.verbs == ["show", "requeue", "update", "update", "update", "hold"]
    assert slurm.now["reason"] == "JobHeldUser"


def test_a_job_that_may_not_be_requeued_is_left_as_it_is(slurm: Slurm) -> None:
    slurm.job(requeue="0")
    with pytest.raises(SlurmDown, match="presently disabled"):
        requeue_job(["node1"])
    assert slurm.verbs == ["show", "requeue"]
    record = SlurmQueue().record("7")
    assert (record["JobState"], record["Partition"], record["Requeue"]) == ("RUNNING", "spot", "0")
    assert "ExcNodeList" not in record


def test_the_signal_that_ends_the_job_does_not_end_what_puts_it_back(slurm: Slurm) -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    try:
        slurm.job(strict=True)
        requeue_job(["node1"])
        assert slurm.now["excluded"] == "node1"
        # Another thread of this process may take it, and pass it on to this one a moment later.
        until(lambda: heard, "the signal")
        assert heard == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_where_there_is_no_scontrol_the_batch_script_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    requeue_job(["node1"], 30.0, tmp_path / "requeue")
    SlurmQueue().put_back("7", ["6"], 30.0, tmp_path / "early")
    for name in ("requeue", "early"):
        assert json.loads((tmp_path / name).read_text()) == {"requeue": "7"}
    with pytest.raises(SlurmDown, match="no scontrol"):
        SlurmQueue().record("7")
    assert SlurmQueue().exclusion_problem("7", ["node1"]) is None


# --- a job that started before its turn ----------------------------------------------------------------------------


@pytest.mark.parametrize("may_be_requeued", ["1", "0"])
def test_a_job_that_started_early_goes_behind_the_jobs_in_the_queue_with_one_squeue_also_if_it_may_not_be_requeued(
    slurm: Slurm, may_be_requeued: str
) -> None:
    slurm.job(requeue=may_be_requeued)
    slurm.replies("squeue", "5\n8_1\n8_3\n")
    SlurmQueue().put_back("7", ["4", "5", "8_1", "8_2"], 120.0, Path("/nowhere"))
    now = slurm.now
    assert (now["state"], now["after"], now["starts"]) == ("PENDING", "afterany:5:8_1", "now")
    # It must not start again for any other reason then.
    assert now["requeue"] == may_be_requeued
    assert len(slurm.calls("squeue")) == 1


@pytest.mark.parametrize("after", [["4"], []])
def test_a_job_behind_no_job_in_the_queue_looks_again_later(slurm: Slurm, after: list[str]) -> None:
    slurm.fails("squeue", "slurm_load_jobs error: Unable to contact slurm controller")
    SlurmQueue().put_back("7", after, 239.5, Path("/nowhere"))
    assert (slurm.now["state"], slurm.now["after"], slurm.now["starts"]) == ("PENDING", "", "now+240")
    slurm.fails("scontrol", "scontrol: error: Unable to contact slurm controller")
    with pytest.raises(SlurmDown, match="Unable to contact"):
        SlurmQueue().put_back("7", after, 120.0, Path("/nowhere"))


# --- leaving nodes out --------------------------------------------------------------------------------------------


def test_a_node_can_be_left_out_if_slurm_would_start_the_job_without_it(slurm: Slurm) -> None:
    slurm.job(excluded="node7")
    assert SlurmQueue().exclusion_problem("7", ["node1"]) is None
    [call] = slurm.calls("sbatch")
    # What the script says itself comes from there; the rest may have come from the submitter's environment.
    assert call.args == ["--test-only", "--exclude=node[1,7]", "--partition=spot", "--qos=normal"]
    assert slurm.calls("sinfo") == []


def test_a_job_that_may_not_be_requeued_cannot_start_again(slurm: Slurm) -> None:
    slurm.job(requeue="0")
    assert SlurmQueue().exclusion_problem("7", ["node1"]) == "its job may not be requeued (Requeue=0)"
    assert slurm.calls("sbatch") == []


IDLE = "idle idle idle"


@pytest.mark.parametrize(
    ("refusal", "excluded", "states", "why"),
    [
        ("Requested node configuration is not available", "node2", IDLE, "2 nodes are needed and 1 would be left"),
        # One is down.
        ("Requested node configuration is not available", "(null)", "idle mixed down*",
         "2 nodes are needed and 1 would be left"),
        # What cannot be counted is in Slurm's own words.
        ("Requested node configuration is not available", "(null)", IDLE,
         "Slurm says: allocation failure: Requested node configuration is not available"),
        ("Invalid node name specified", "(null)", "idle", "Slurm knows no node node1"),
        # This is not about nodes.
        ("Job violates accounting/QOS policy (job submit limit)", "(null)", IDLE, None),
    ],
)  # fmt: skip
def test_a_node_that_cannot_be_left_out_is_told_with_the_reason(
    slurm: Slurm, refusal: str, excluded: str, states: str, why: str | None
) -> None:
    slurm.job(excluded=excluded)
    slurm.replies("sinfo", "".join(f"node{i}|spot|{s}|8|1|x|x\n" for i, s in enumerate(states.split())))
    slurm.replies("sbatch", stderr=f"allocation failure: {refusal}\n", code=1)
    assert SlurmQueue().exclusion_problem("7", ["node1"]) == (why and f"node1 cannot be excluded: {why}")


# --- releasing ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reason", ["JobHeldUser", "job_requeued_in_held_state"])
def test_a_held_job_is_released_without_the_nodes(slurm: Slurm, reason: str) -> None:
    slurm.job(state="PENDING", reason=reason, excluded="node3")
    assert release_held("7", ["node1"], always=False)
    assert slurm.verbs == ["show", "update", "release"]
    assert slurm.now["excluded"] == "node[1,3]"


def test_a_job_that_a_person_holds_stays_held(slurm: Slurm) -> None:
    slurm.job(state="PENDING", reason="JobHeldUser", excluded="node[0-2]")
    assert not release_held("7", ["node1"], always=False)
    assert slurm.verbs == ["show"]
    assert release_held("7", ["node1"], always=True)
    assert slurm.verbs == ["show", "show", "release"]


@pytest.mark.parametrize(
    ("state", "reason"), [("RUNNING", "None"), ("PENDING", "Priority"), ("PENDING", "JobHeldAdmin")]
)
def test_a_job_that_its_user_cannot_release_is_left_alone(slurm: Slurm, state: str, reason: str) -> None:
    slurm.job(state=state, reason=reason)
    assert not release_held("7", ["node1"], always=True)
    assert slurm.verbs == ["show"]
