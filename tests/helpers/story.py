"""What happens to one run whose jobs are Slurm's, told event by event, and what is known of it then."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from helpers.journal_events import event
from slurmtrain.model.run.events.base import AnyEvent
from slurmtrain.model.run.events.command import JobObserved
from slurmtrain.model.run.fold import fold
from slurmtrain.model.run.progress import Progress
from slurmtrain.model.run.run import Attempt, Run
from slurmtrain.slurm.parse import Job
from slurmtrain.slurm.reconcile import is_open, news, wants_accounting
from slurmtrain.slurm.scheduler import Accounting, Queue

JOB = "7"
# Where every story begins, in seconds since 1970, and the time limit of its jobs.
BEGIN = 1_000.0
LIMIT_S = 3_600.0
DOWN = Queue(problem="squeue: Unable to contact slurm controller")


@dataclass
class Story:
    """Events of one run, each a second after the one before unless ``now`` is set."""

    now: float = BEGIN
    job: str = JOB
    events: list[AnyEvent] = field(default_factory=list)
    steps: dict[str, int] = field(default_factory=dict)

    def tell(self, source: str, kind: str, /, **data: Any) -> Story:
        self.now += 1
        self.events.append(event(self.now, kind, data, source, len(self.events) * 10))
        return self

    def command(self, kind: str, /, **data: Any) -> Story:
        return self.tell("journal/submit.jsonl", kind, **data)

    def node(self, kind: str, node: int = 0, restart: int = 0, /, **data: Any) -> Story:
        return self.tell(f"attempts/{self.job}.{restart}/node-{node}.jsonl", kind, **data)

    def submitted(self, submission: int = 1, **more: Any) -> Story:
        """``more``: of the submission, such as ``requeue``, its policy, and ``by``, the command that made it."""
        if submission == 1:
            self.command("created", name="n", executor="slurm")
        said = {"submission": submission, "attempt": submission, "executor": "slurm", "host": "login", **more}
        self.command("submitting", **said)
        return self.command("submitted", submission=submission, job_id=self.job)

    def started(self, restart: int = 0, nodes: int = 1, submission: int = 1) -> Story:
        for node in range(nodes):
            self.node(
                "agent",
                node,
                restart,
                node=node,
                nodes=nodes,
                host=f"n{node}",
                executor="slurm",
                submission=submission,
                attempt=submission + restart,
            )
        return self

    def ended(self, cause: str, node: int = 0, restart: int = 0, **data: Any) -> Story:
        return self.node("end", node, restart, cause=cause, **{"reason": "", "signal": None, **data})

    def asked(self, node: int = 0, restart: int = 0) -> Story:
        """A node says that a signal ended it: it does not know why."""
        return self.ended(
            "preempted", node, restart, reason="stopped by SIGTERM", signal="SIGTERM", failed_at=self.now + 1
        )

    def cancel(self) -> Story:
        return self.command("cancel")

    def later(self, seconds: float) -> Story:
        self.now += seconds
        return self

    def observed(self, job: Job, restart: int = 0) -> Story:
        """Slurm's word, as a command journals it."""
        return self.tell(
            "journal/observe.jsonl",
            "observed",
            job_id=job.id,
            restart=restart,
            source="sacct",
            state=job.state,
            nodes=job.nodes,
            started_at=job.starts_at,
            ended_at=job.ends_at,
            time_limit_s=job.time_limit_s,
            exit_code=job.exit_code,
            signal=job.signal,
        )

    @property
    def run(self) -> Run:
        return fold("RUN", self.events, {key: Progress(step, self.now, {}) for key, step in self.steps.items()})

    @property
    def newest(self) -> Attempt:
        newest = self.run.newest
        assert newest is not None
        return newest

    @property
    def causes(self) -> list[str | None]:
        return [attempt.cause for attempt in self.run.attempts]

    def look(self, queue: Queue, accounting: Accounting | None = None) -> list[JobObserved]:
        """Look at the run as a command does: ask, journal what is new, and find that asking again adds nothing."""
        observations = self._news(queue, accounting)
        for observed in observations:
            self.tell("journal/observe.jsonl", "observed", **observed.to_json())
        assert self._news(queue, accounting) == []
        return observations

    def _news(self, queue: Queue, accounting: Accounting | None) -> list[JobObserved]:
        run = self.run
        if not is_open(run):
            return []
        return news(run, queue, accounting if wants_accounting(run, queue) else None, self.now)

    def queue(self, *jobs: Job) -> Queue:
        """squeue's answer now."""
        return Queue({job.id: job for job in jobs}, at=self.now + 0.5)

    def accounting(self, *starts: Job) -> Accounting:
        """sacct's answer now: all starts of the job."""
        return Accounting({self.job: list(starts)} if starts else {}, at=self.now + 0.5)

    def slurm(self, state: str, *, lasted: float = 100.0, **more: Any) -> Job:
        """The job as Slurm tells of it now, ``lasted`` seconds after it began."""
        told: dict[str, Any] = {"id": self.job, "name": "n-RUN", "state": state, "time_limit_s": LIMIT_S, "nodes": "n0"}
        if state != "PENDING":
            told |= {"starts_at": self.now - lasted, "ends_at": self.now, "exit_code": 0}
        return Job(**{**told, **more})
