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
import shlex
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


def squeue_line(
    job_id: str, reason: str = "Priority", restart: int = 0, run_id: str = "0123456789", name: str = "x"
) -> str:
    """What squeue prints for the pending job of a run of this name."""
    cells = {"JobArrayID": job_id, "State": "PENDING", "Reason": reason, "RestartCnt": str(restart)}
    cells["Name"] = f"{name}-{run_id}"
    return "".join(f"{cells.get(name, ''):<{width}}" for name, width in QUEUE_FIELDS) + "\n"


# Notes how it is called in a file of its own: words that zeros end, then its environment.
_SCRIPT = """\
#!/bin/sh
{{ printf '%s\\0' {name} "$(pwd -P)" $# "$@"; /bin/cat /proc/$$/environ; printf 'end\\0'; }} > {calls}/$$
{rest}
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
        self._calls = path / ".calls"
        self._calls.mkdir(parents=True)

    def replies(
        self, name: str, stdout: str = "", *, stderr: str = "", code: int = 0, until: Path | None = None
    ) -> None:
        """What the command prints from now on, and when it ends: at once, or once the file ``until`` exists."""
        rest = [f"while [ ! -e {shlex.quote(str(until))} ]; do /bin/sleep 0.01; done"] if until else []
        rest += [f"printf %s {shlex.quote(text)} {to}" for text, to in ((stderr, ">&2"), (stdout, "")) if text]
        rest += [f"kill {code} $$" if code < 0 else f"exit {code}"]
        script = _SCRIPT.format(name=name, calls=shlex.quote(str(self._calls)), rest="\n".join(rest))
        # A shell reads its script as it goes on.
        new = self._calls.with_name(".new")
        new.write_text(script)
        new.chmod(0o755)
        new.replace(self.path / name)

    def fails(self, name: str, stderr: str) -> None:
        """Let the command fail from now on."""
        self.replies(name, stderr=stderr, code=1)

    def calls(self, name: str) -> list[Call]:
        """Its calls so far, oldest first."""
        notes = sorted(self._calls.iterdir(), key=lambda note: (note.stat().st_mtime_ns, int(note.name)))
        noted = [call for note in notes if (call := _read_call(note.read_bytes(), name)) is not None]
        # What a stand-in of a test's own notes.
        log = self.path / "calls.jsonl"
        lines = [json.loads(line) for line in log.read_text().split("\n")[:-1]] if log.exists() else []
        return noted + [Call(line["args"], line["env"], line["cwd"]) for line in lines if line["name"] == name]

    def on_path(self) -> str:
        """A PATH with this interpreter and no Slurm commands but these."""
        return os.pathsep.join([str(self.path), str(Path(sys.executable).parent)])


def _read_call(note: bytes, name: str) -> Call | None:
    """What a command has noted of its call; None if it is another command, or has not written all of it."""
    if not note.startswith(f"{name}\0".encode()) or not note.endswith(b"\0end\0"):
        return None
    _, cwd, count, *words = os.fsdecode(note).split("\0")
    environ = dict(word.split("=", 1) for word in words[int(count) : -2])
    return Call(words[: int(count)], environ, cwd)
