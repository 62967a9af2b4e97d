"""Simulated local runs, each of whose submissions has its own job."""

from __future__ import annotations

from typing import Any, Self

from helpers.journal_events import read_run
from helpers.simulated_run import SimulatedRun
from slurmtrain.model.run.journal_lines import Progress
from slurmtrain.model.run.run import Run

PROCESS = {"host": "n0", "boot": "b", "pid": 5, "start": 9}


class LocalRun(SimulatedRun):
    """A local run that begins at 100 s: the job of its n-th submission is jn."""

    def __init__(self) -> None:
        super().__init__(executor="local", now=100.0)
        self.submission = 1

    def created(self) -> Self:
        return super().created(name="digits", plan_hash="h", by="me", git={"commit": "c"})

    def submitted(self, submission: int = 1, *, job: str = "", **fields: Any) -> Self:
        self.submission, self.job = submission, job or f"j{submission}"
        return super().submitted(submission, process=PROCESS, **fields)

    def started(self, nodes: int = 1, step: int = 0) -> Self:
        super().started(nodes=nodes, submission=self.submission, process=PROCESS)
        self.node("rendezvous", node=0, master_addr="10.0.0.1", master_port=2000, interface="eth0")
        self.node("workers", processes={"0": PROCESS}, resume_from=None)
        return self.rank("session", step=step, world_size=nodes, device="cpu")

    def saved(self, step: int) -> Self:
        path = f"checkpoints/step-{step}"
        return self.rank("saved", step=step, path=path, bytes=10, seconds=0.5, saved_at=self.now + 1)

    def fold(self, **steps: int) -> Run:
        """The run, with its jobs at these steps."""
        progress = {f"{job}.0": Progress(step, 1.0, {"loss": step / 10}) for job, step in steps.items()}
        return read_run("RUN", self.events, progress)
