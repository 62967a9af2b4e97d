"""Fake Slurm in two forms: a scheduler in this process, and commands on PATH.

:class:`FakeScheduler` answers with :class:`Job` and :class:`NodeInfo` objects, for code that makes decisions::

    slurm = FakeScheduler()
    workspace = Workspace(config, scheduler=slurm)
    slurm.jobs = [job("PENDING", "7")]              # what squeue knows
    slurm.starts = {"7": [job("PREEMPTED", "7")]}   # what sacct knows
    observe(workspace)
    assert slurm.questions == ["squeue"]

:class:`SlurmCommands` is for tests of the command lines themselves, and of processes that call Slurm::

    slurm = SlurmCommands(tmp_path / "bin")
    monkeypatch.setenv("PATH", slurm.on_path())
    slurm.replies("sbatch", "Submitted batch job 8\\n")
    ...
    assert slurm.calls("sbatch")[0].args == ["--parsable", "x.sh"]
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurmtrain.errors import SlurmDown
from slurmtrain.slurm.parse import QUEUE_FIELDS, Job, NodeInfo, read_partitions
from slurmtrain.slurm.scheduler import Accounting, Queue, Scheduler

# One partition of four nodes, as `scontrol --oneliner show partition` prints it.
PARTITIONS = "PartitionName=spot Default=YES MaxTime=1:00:00 TotalNodes=4\n"


class FakeScheduler(Scheduler):
    """Returns the answers that a test sets, and records the queries in ``questions``, in order."""

    def __init__(self) -> None:
        super().__init__(math.inf, None)
        self.jobs: list[Job] = []
        """What squeue knows."""
        self.starts: dict[str, list[Job]] = {}
        """What sacct knows: all starts of each job, oldest first."""
        self.squeue_problem = ""
        self.sacct_problem = ""
        self.sinfo_problem = ""
        self.has_accounting = True
        """Whether this site has accounting; if not, ``sacct_problem`` says so."""
        self.age = 0.0
        """How old the answers are, in seconds."""
        self.questions: list[Any] = []

    def queue(self) -> Queue:
        self.questions.append("squeue")
        if self.squeue_problem:
            return Queue(problem=self.squeue_problem, at=self._answered_at)
        return Queue({job.id: job for job in self.jobs}, at=self._answered_at)

    def accounting(self, job_ids: Collection[str], by_name: bool, since: float) -> Accounting:
        self.questions.append(("sacct", sorted(job_ids), by_name, since))
        if self.sacct_problem:
            return Accounting(problem=self.sacct_problem, absent=not self.has_accounting, at=self._answered_at)
        return Accounting(self.starts, at=self._answered_at)

    def partitions(self) -> dict[str, dict[str, str]]:
        return read_partitions(PARTITIONS)

    def nodes(self) -> list[NodeInfo]:
        self.questions.append("sinfo")
        if self.sinfo_problem:
            raise SlurmDown(self.sinfo_problem)
        return [NodeInfo(name=f"n{i}", partition="spot") for i in range(4)]

    def cancel(self, job_ids: Collection[str], *, force: bool) -> None:
        self.questions.append(("scancel", sorted(job_ids), force))

    def forget(self) -> None:
        self.questions.append("forget")

    @property
    def _answered_at(self) -> float:
        return time.time() - self.age


def job(state: str, job_id: str = "7", run_id: str = "0123456789", **fields: Any) -> Job:
    """A job of a run as squeue or sacct describes it."""
    return Job(**{"id": job_id, "name": f"digits-{run_id}", "state": state, "restart": 0, **fields})


def squeue_line(job_id: str, reason: str = "Priority", restart: int = 0, run_id: str = "0123456789") -> str:
    """What squeue prints for a run's pending job."""
    cells = {"JobArrayID": job_id, "State": "PENDING", "Reason": reason, "RestartCnt": str(restart)}
    cells["Name"] = f"x-{run_id}"
    return "".join(f"{cells.get(name, ''):<{width}}" for name, width in QUEUE_FIELDS) + "\n"


_SCRIPT = """\
#!{python} -IS
import json, os, sys, time
name, here = os.path.basename(sys.argv[0]), os.path.dirname(os.path.abspath(sys.argv[0]))
call = {{"name": name, "args": sys.argv[1:], "env": dict(os.environ), "cwd": os.getcwd()}}
with open(here + "/calls.jsonl", "a") as file:
    file.write(json.dumps(call) + "\\n")
with open(here + "/" + name + ".reply") as file:
    reply = json.load(file)
while reply["until"] and not os.path.exists(reply["until"]):
    time.sleep(0.01)
sys.stderr.write(reply["stderr"])
sys.stdout.write(reply["stdout"])
sys.stdout.flush()
if reply["code"] < 0:
    os.kill(os.getpid(), -reply["code"])
sys.exit(reply["code"])
"""


@dataclass(frozen=True)
class Call:
    """One call of a command."""

    args: list[str]
    env: dict[str, str]
    cwd: str


class SlurmCommands:
    """A directory for PATH. Commands without a reply do not exist."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir()

    def replies(
        self, name: str, stdout: str = "", *, stderr: str = "", code: int = 0, until: Path | None = None
    ) -> None:
        """What the command prints from now on, and when it ends: at once, or once the file ``until`` exists."""
        reply = {"stdout": stdout, "stderr": stderr, "code": code, "until": str(until) if until else ""}
        (self.path / f"{name}.reply").write_text(json.dumps(reply))
        script = self.path / name
        script.write_text(_SCRIPT.format(python=sys.executable))
        script.chmod(0o755)

    def fails(self, name: str, stderr: str) -> None:
        """Let the command fail from now on."""
        self.replies(name, stderr=stderr, code=1)

    def calls(self, name: str) -> list[Call]:
        """Its calls so far, oldest first."""
        log = self.path / "calls.jsonl"
        if not log.exists():
            return []
        calls = [json.loads(line) for line in log.read_text().split("\n")[:-1]]
        return [Call(call["args"], call["env"], call["cwd"]) for call in calls if call["name"] == name]

    def on_path(self) -> str:
        """A PATH with this interpreter and no Slurm commands but these."""
        return os.pathsep.join([str(self.path), str(Path(sys.executable).parent)])
