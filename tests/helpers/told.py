"""One run, as files tell of it, without any job: for tests of what commands make of it."""

from __future__ import annotations

from typing import Any

import pytest

from slurmtrain.model.run.events.base import encode
from slurmtrain.model.run.layout import RunDir
from slurmtrain.model.run.run import Run
from slurmtrain.model.spec.plan import Plan, make_plan
from slurmtrain.model.spec.spec import read_spec, write_requeue
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.ops.sync import Synced, sync
from slurmtrain.runtime.job import lease
from slurmtrain.runtime.job.environment import Launch
from slurmtrain.slurm.parse import QUEUE_FIELDS
from slurmtrain.system.files import write_json

RUN_ID = "0123456789"
# Long ago, as times of sacct's in these tests.
LONG_AGO = 200.0
WHY = "rank 0 exited with code 1"


def plan(**keys: Any) -> Plan:
    tracking = {"mlflow": {"enabled": False}}
    data = {"name": "x", "command": "python x.py", "tracking": tracking, **keys}
    spec = read_spec(data, lambda at, message: pytest.fail(f"{at}: {message}"))
    return make_plan(spec, workdir="/w", python="python", template=data)[0]


class Told:
    """One run, as files tell of it."""

    def __init__(self, workspace: Workspace, executor: str = "slurm", job: str = "7", **keys: Any) -> None:
        self.run: RunDir = workspace.root.run(RUN_ID)
        self.executor, self.job, self.keys = executor, job, keys
        for path in (self.run.journals, self.run.checkpoints):
            path.mkdir(parents=True)
        write_json(self.run.plan, plan(**keys).to_json())
        self.command("created", name="x", executor=executor)

    def submitted(self, number: int = 1, by: str = "submit", **more: Any) -> Told:
        wanted = plan(**self.keys)
        submission = self.run.submission(number)
        submission.path.mkdir(parents=True)
        write_json(submission.plan, wanted.to_json())
        write_json(submission.launch, Launch(attempt=number).to_dict())
        named: dict[str, Any] = {"submission": number, **({"job_id": self.job} if self.executor == "local" else {})}
        policy = write_requeue(wanted.spec.requeue)
        self.command("submitting", **named, attempt=number, executor=self.executor, host="h", by=by, requeue=policy)
        self.command("submitted", **{**named, "job_id": self.job, **more})
        lease.grant(submission)
        return self

    def started(self, number: int = 1, restart: int = 0, **more: Any) -> Told:
        place = self.run.attempt(self.job, restart)
        place.path.mkdir(parents=True)
        said = {"node": 0, "nodes": 1, "host": "n0", "executor": self.executor, "submission": number, "attempt": number}
        self.node("agent", restart, **said, **more)
        place.metrics.write_text(f'{{"t": {LONG_AGO}, "step": 5, "metrics": {{}}}}\n')
        return self

    def crashed(self, restart: int = 0, at: float = LONG_AGO, error: str = "ValueError") -> Told:
        failure = {"rank": 0, "exit_code": 1, "error": error}
        return self.node("end", restart, t=at, cause="crash", reason=WHY, failed_at=at, failures=[failure])

    def command(self, kind: str, /, t: float = 100.0, **data: Any) -> Told:
        with (self.run.journals / "submit.jsonl").open("ab") as file:
            file.write(encode(t, kind, data))
        return self

    def node(self, kind: str, restart: int = 0, /, t: float = 150.0, **data: Any) -> Told:
        with self.run.attempt(self.job, restart).node_journal(0).open("ab") as file:
            file.write(encode(t, kind, data))
        return self


def waiting(job_id: str, reason: str = "Priority", restart: int = 0) -> str:
    cells = {"JobArrayID": job_id, "State": "PENDING", "Reason": reason, "RestartCnt": str(restart),
             "Name": f"x-{RUN_ID}"}  # fmt: skip
    return "".join(f"{cells.get(name, ''):<{width}}" for name, width in QUEUE_FIELDS) + "\n"


def again(workspace: Workspace) -> Synced:
    """What another command finds and does."""
    return sync(Workspace(workspace.config), track=False)


def loaded(workspace: Workspace) -> Run:
    run = workspace.store.load(RUN_ID)
    assert run is not None
    return run
