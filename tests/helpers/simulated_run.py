"""The only builder of runs for tests: events in memory, and the same in a run directory, for commands to read.

Each call appends what a writer would have written, a second after the previous event, and returns the run::

    sim = SimulatedRun().submitted().started(nodes=2).later(100).stopped()
    assert sim.newest.cause == "preempted"                      # what the fold makes of it
    sim.look(sim.queue(), sim.accounting(sim.slurm("PREEMPTED")))    # and of what Slurm says

    sim = SimulatedRun(workspace.root.run(RUN_ID), spec={"requeue": {"max_failures": 1}})
    sim.submitted().started().crashed()
    sync(workspace)                                             # what a command makes of the files
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Self

import pytest

from helpers.journal_events import event, read_run
from slurmtrain.model.experiment.plan import Plan, make_plan
from slurmtrain.model.experiment.sections import write_requeue
from slurmtrain.model.experiment.spec import read_spec
from slurmtrain.model.run.events.base import AnyEvent, encode
from slurmtrain.model.run.events.command_events import JobObserved
from slurmtrain.model.run.journal_lines import Progress
from slurmtrain.model.run.layout import AttemptDir, RunDir
from slurmtrain.model.run.run import Attempt, Run
from slurmtrain.runtime.environment.node import Launch
from slurmtrain.runtime.job import lease
from slurmtrain.slurm.parse import Job
from slurmtrain.slurm.scheduler import Accounting, Queue, may_change, needs_accounting, new_observations
from slurmtrain.system.files import write_json

RUN_ID = "0123456789"
JOB = "7"
# When every run begins, in seconds since 1970: so long ago that all timeouts have passed. And its jobs' time limit.
BEGIN = 1_000.0
LIMIT_S = 3_600.0
# A process of another machine: its end cannot be observed here.
ELSEWHERE = {"host": "elsewhere", "boot": "b", "pid": 5, "start": 9}
CRASHED = "rank 0 exited with code 1"
DOWN = Queue(problem="squeue: Unable to contact slurm controller")


def make_test_plan(**keys: Any) -> Plan:
    """The plan of a small spec with these keys."""
    data = {"name": "x", "command": "python x.py", "tracking": {"mlflow": {"enabled": False}}, **keys}
    spec = read_spec(data, lambda place, message: pytest.fail(f"{place}: {message}"))
    return make_plan(spec, workdir="/w", python="python", template=data)[0]


class SimulatedRun:
    """One run, by default with Slurm jobs."""

    def __init__(
        self,
        directory: RunDir | None = None,
        *,
        spec: Mapping[str, Any] | None = None,
        executor: str = "slurm",
        job: str = JOB,
        now: float = BEGIN,
    ) -> None:
        """``directory``: where to write journals too; None: events stay in memory.

        ``spec``: keys of the spec in the directory's plan; None: no plan. ``job``: the id of its next
        jobs. ``now``: the time one second before the first event, in seconds since 1970.
        """
        self.directory = directory
        self.executor = executor
        self.job = job
        self.now = now
        self.events: list[AnyEvent] = []
        self.steps: dict[str, int] = {}
        """The last finished step, by the name of the attempt's directory."""
        self._plan = None if spec is None else make_test_plan(**spec)
        if directory is not None:
            for path in (directory.journals, directory.attempts, directory.checkpoints):
                path.mkdir(parents=True, exist_ok=True)
            if self._plan is not None:
                write_json(directory.plan, self._plan.to_json())

    # --- writers ------------------------------------------------------------------------------------------------------

    def write(self, source: str, kind: str, /, at: float | None = None, **fields: Any) -> Self:
        """Append an event to the journal ``source``, at this time or a second after the previous event."""
        self.now = self.now + 1 if at is None else at
        self.events.append(event(self.now, kind, fields, source, len(self.events) * 10))
        if self.directory is not None:
            path = self.directory.path / source
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("ab") as file:
                file.write(encode(self.now, kind, fields))
        return self

    def command(self, kind: str, /, **fields: Any) -> Self:
        """Write an event as a command on the login node."""
        return self.write("journal/submit.jsonl", kind, **fields)

    def node(self, kind: str, node: int = 0, restart: int = 0, /, **fields: Any) -> Self:
        """Write an event as a node's agent."""
        return self.write(f"attempts/{self.job}.{restart}/node-{node}.jsonl", kind, **fields)

    def rank(self, kind: str, rank: int = 0, restart: int = 0, /, **fields: Any) -> Self:
        """Write an event as a rank."""
        return self.write(f"attempts/{self.job}.{restart}/rank-{rank}.jsonl", kind, **fields)

    def later(self, seconds: float) -> Self:
        """Let time pass."""
        self.now += seconds
        return self

    # --- what happens -------------------------------------------------------------------------------------------------

    def created(self, **fields: Any) -> Self:
        """The run directory is complete."""
        name = "n" if self._plan is None else self._plan.spec.name
        return self.command("created", **{"name": name, "executor": self.executor, **fields})

    def submitting(self, submission: int = 1, **fields: Any) -> Self:
        """A command is about to submit the run: its first event, unless it was ``created`` before.

        ``fields``: of the event, such as ``requeue``, the policy (by default the plan's), and ``by``, the command.
        """
        if not self.events:
            self.created()
        defaults: dict[str, Any] = {"submission": submission, "attempt": submission, "executor": self.executor}
        if self.executor == "local":
            defaults["job_id"] = self.job
        if self._plan is not None:
            defaults["requeue"] = write_requeue(self._plan.spec.requeue)
        return self.command("submitting", **{**defaults, "host": "login", **fields})

    def submitted(self, submission: int = 1, *, process: Mapping[str, Any] | None = None, **fields: Any) -> Self:
        """The scheduler has accepted the job. ``process``: of a local job; ``fields``: of the event ``submitting``."""
        self.submitting(submission, **fields)
        if self.directory is not None and self._plan is not None:
            files = self.directory.submission(submission)
            files.path.mkdir(parents=True)
            write_json(files.plan, self._plan.to_json())
            write_json(files.launch, Launch(attempt=submission).to_dict())
            lease.grant(files)
        defaults = {"process": dict(process)} if process else {}
        return self.command("submitted", submission=submission, job_id=self.job, **defaults)

    def started(self, restart: int = 0, nodes: int = 1, submission: int = 1, **fields: Any) -> Self:
        """Agents run on this many nodes. ``fields``: further fields of the event."""
        for node in range(nodes):
            defaults = {"node": node, "nodes": nodes, "host": f"n{node}", "executor": self.executor}
            defaults |= {"submission": submission, "attempt": submission + restart}
            self.node("agent", node, restart, **{**defaults, **fields})
        return self

    def reached(self, step: int, restart: int = 0, at: float | None = None, **metrics: float) -> Self:
        """Training has finished this many steps, and rank 0 has logged these metrics, at this time or now."""
        attempt = f"{self.job}.{restart}"
        self.steps[attempt] = step
        if self.directory is not None:
            line = {"t": self.now if at is None else at, "step": step, "metrics": metrics}
            with AttemptDir(self.directory.attempts / attempt).metrics.open("ab") as file:
                file.write(json.dumps(line).encode() + b"\n")
        return self

    def saved(self, step: int, restart: int = 0, **fields: Any) -> Self:
        """A checkpoint was published."""
        defaults = {"path": f"checkpoints/step-{step}", "bytes": 1, "seconds": 1.0, "stall_s": 0.0, "why": "interval"}
        defaults |= {"saved_at": self.now + 1, "metrics": {}}
        return self.rank("saved", 0, restart, step=step, **{**defaults, **fields})

    def ended(self, cause: str, node: int = 0, restart: int = 0, **fields: Any) -> Self:
        """A node's agent has ended, with a reason."""
        return self.node("end", node, restart, **{"cause": cause, "reason": "", "signal": None, **fields})

    def crashed(self, restart: int = 0, at: float | None = None, error: str = "ValueError") -> Self:
        """Rank 0 has raised an exception."""
        failed_at = self.now + 1 if at is None else at
        failure = {"rank": 0, "exit_code": 1, "error": error}
        return self.ended("crash", 0, restart, at=failed_at, reason=CRASHED, failed_at=failed_at, failures=[failure])

    def stopped(self, node: int = 0, restart: int = 0, **fields: Any) -> Self:
        """A signal has ended a node's agent, which does not know the reason."""
        defaults = {"reason": "stopped by SIGTERM", "signal": "SIGTERM", "failed_at": self.now + 1}
        return self.ended("preempted", node, restart, **{**defaults, **fields})

    def cancel(self, at: float | None = None) -> Self:
        """A user asks for the run to be cancelled."""
        return self.command("cancel", at=at)

    def observed(self, job: Job, restart: int = 0, at: float | None = None) -> Self:
        """A command has journaled what sacct says about a job."""
        return self.write(
            "journal/observe.jsonl",
            "observed",
            at=at,
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

    # --- the resulting run --------------------------------------------------------------------------------------------

    @property
    def run(self) -> Run:
        """The run as computed by the fold."""
        return read_run("RUN", self.events, {key: Progress(step, self.now, {}) for key, step in self.steps.items()})

    @property
    def newest(self) -> Attempt:
        """Its newest attempt."""
        newest = self.run.newest
        assert newest is not None
        return newest

    @property
    def causes(self) -> list[str | None]:
        """What ended each attempt."""
        return [attempt.cause for attempt in self.run.attempts]

    # --- what Slurm says about it -------------------------------------------------------------------------------------

    def look(self, queue: Queue, accounting: Accounting | None = None) -> list[JobObserved]:
        """Observe the run as a command does: query, journal what is new, and check that a second query adds nothing."""
        observations = self._news(queue, accounting)
        for observation in observations:
            self.write("journal/observe.jsonl", "observed", **observation.to_json())
        assert self._news(queue, accounting) == []
        return observations

    def _news(self, queue: Queue, accounting: Accounting | None) -> list[JobObserved]:
        run = self.run
        if not may_change(run):
            return []
        return new_observations(run, queue, accounting if needs_accounting(run, queue) else None, self.now)

    def queue(self, *jobs: Job) -> Queue:
        """squeue's answer now."""
        return Queue({job.id: job for job in jobs}, at=self.now + 0.5)

    def accounting(self, *starts: Job) -> Accounting:
        """sacct's answer now: all starts of the job."""
        return Accounting({self.job: list(starts)} if starts else {}, at=self.now + 0.5)

    def slurm(self, state: str, *, lasted: float = 100.0, **fields: Any) -> Job:
        """The job as Slurm shows it now, ``lasted`` seconds after it began."""
        defaults: dict[str, Any] = {
            "id": self.job,
            "name": "n-RUN",
            "state": state,
            "time_limit_s": LIMIT_S,
            "nodes": "n0",
        }
        if state != "PENDING":
            defaults |= {"starts_at": self.now - lasted, "ends_at": self.now, "exit_code": 0}
        return Job(**{**defaults, **fields})
