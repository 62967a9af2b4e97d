"""The end of an attempt on Slurm, as its agent sees it, and Slurm as the agent asks it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from helpers.simulated_run import SimulatedRun
from slurmtrain.errors import SlurmDown
from slurmtrain.model.experiment.sections import RequeueSpec, write_requeue
from slurmtrain.model.experiment.sweep import Pack
from slurmtrain.model.interruption.exit_report import AttemptOutcome, ExitReport, report_signal
from slurmtrain.model.interruption.policy import Newest
from slurmtrain.model.run.layout import RunDir
from slurmtrain.runtime.agent.finish import AttemptFinish, state_of_finished_run
from slurmtrain.runtime.agent.job_query import JobQuery
from slurmtrain.runtime.environment.node import Launch, Node
from slurmtrain.runtime.job import lease
from slurmtrain.system.journal import Journal

RULES = RequeueSpec()
NODE = Node(
    index=0, count=2, host="n0", job_id="7", restart=0, executor="slurm", submission=1, launch=Launch(attempt=1)
)
COMPLETED = ExitReport(cause="completed", reason="")
CRASH = ExitReport(cause="crash", reason="rank 0 exited with code 1", failed_at=5.0)
SIGTERM = report_signal("SIGTERM", at=5.0)
PREFLIGHT = ExitReport(cause="preflight", reason="n1 has no GPU", failed_at=5.0, without=("n1",))
# What Slurm says of a job at the moments that matter; its times are words where they do not.
PREEMPTED = {"JobState": "PREEMPTED"}
RUNS_ON = {"JobState": "RUNNING", "PreemptTime": "None"}
REQUEUED = {"JobState": "COMPLETING", "EndTime": "9999999999"}


@dataclass
class Queue:
    """Slurm, as an agent asks it for its own job. ``log``: what the journal held when it was last asked."""

    journal: Path
    fields: Mapping[str, str] = field(default_factory=dict)
    problem: str | None = None
    down: bool = False
    requeued: list[tuple[list[str], float]] = field(default_factory=list)
    after: Sequence[str] = ()
    forbidden: int = 0
    log: list[str] = field(default_factory=list)

    def record(self, job_id: str) -> Mapping[str, str]:
        assert job_id == "7"
        return self.fields

    def exclusion_problem(self, job_id: str, without: Sequence[str]) -> str | None:
        assert (job_id, list(without)) == ("7", ["n1"])
        return self.problem

    def put_back(self, job_id: str, after: Sequence[str], delay_s: float, intent: Path) -> None:
        self.requeue_job(job_id, (), delay_s, intent)
        self.after = after

    def requeue_job(self, job_id: str, without: Sequence[str], delay_s: float, intent: Path) -> None:
        assert (job_id, intent.parent.resolve()) == ("7", self.journal.parent)
        if self.down:
            raise SlurmDown("scontrol: Unable to contact slurm controller")
        self.log = [event["kind"] for event in read(self.journal)]
        self.requeued.append((list(without), delay_s))

    def forbid_requeue(self, job_id: str, intent: Path) -> None:
        assert (job_id, intent.parent.resolve(), intent.name) == ("7", self.journal.parent, "no-requeue")
        if self.down:
            raise SlurmDown("scontrol: Unable to contact slurm controller")
        self.log = [event["kind"] for event in read(self.journal)]
        self.forbidden += 1


def read(journal: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in journal.read_text().splitlines()]


class End:
    """The end of the first start of a job."""

    def __init__(
        self,
        path: Path,
        *,
        node: Node = NODE,
        resources: Mapping[str, Any] | None = None,
        rules: RequeueSpec = RULES,
        pack: Pack | None = None,
        **queue: Any,
    ) -> None:
        self.run = SimulatedRun(RunDir(path), spec={}).created(resources=resources or {})
        self.run.submitted(requeue=write_requeue(rules), pack=pack.to_dict() if pack else None)
        self.directory = RunDir(path)
        self.attempt = self.directory.attempt("7", 0)
        self.attempt.path.mkdir(parents=True)
        assert lease.acquire(self.attempt, node.submission)
        self.node = node
        self.path = self.attempt.node_journal(node.index)
        self.queue = Queue(self.path, **queue)

    def finish(self, own: ExitReport, attempt: ExitReport | None = None, **more: Any) -> bool:
        """Whether the job starts again after these reports."""
        queue = self.queue if self.node.executor == "slurm" else None
        query = JobQuery((lambda: self.queue.record("7")) if queue and self.node.index == 0 else None, None)
        settings = {"requeue": RULES, "began": Newest(), "find_newest": lambda: Newest(20), **more}
        with Journal(self.path) as journal:
            finish = AttemptFinish(self.attempt, self.node, journal, queue, query)
            return finish.finish(AttemptOutcome(own, own if attempt is None else attempt), **settings)

    @property
    def events(self) -> list[dict[str, Any]]:
        return read(self.path)

    @property
    def end(self) -> dict[str, Any]:
        """The event that every node writes last."""
        assert self.events[-1]["kind"] == "end"
        return self.events[-1]


def next_start(end: End, index: int = 0) -> str | None:
    """What an agent of the job's next start finds: the state of the run, if that is over."""
    return state_of_finished_run(end.directory.attempt("7", 1), replace(NODE, index=index, restart=1))
