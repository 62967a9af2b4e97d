"""Training without ranks: what a local run's agent and rank 0 write, written by the code that writes it in jobs.

Commands are real, and so are run directories, journals, metrics, checkpoints and leases. Only the processes do nothing:
:class:`IdleJobs` stands in for the jobs of this machine.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Mapping
from typing import Any

from slurmtrain.model.experiment.plan import Plan
from slurmtrain.model.run.events.agent_events import AgentStarted, NodeEnded, RanksRestarted, WorkersStarted
from slurmtrain.model.run.events.base import Payload
from slurmtrain.model.run.events.checkpoint_events import CheckpointRejected, CheckpointRestored, CheckpointSaved
from slurmtrain.model.run.events.rank_events import SessionStarted, TrainingCompleted
from slurmtrain.model.run.layout import AttemptDir, RunDir, SubmissionDir
from slurmtrain.model.run.run import Run
from slurmtrain.runtime.checkpoint import checkpoint_files
from slurmtrain.runtime.job import lease
from slurmtrain.runtime.job.metrics import MetricsFile
from slurmtrain.system.files import make_directory
from slurmtrain.system.journal import Journal
from slurmtrain.system.process import Process, identify

# Ranks take longer than this to start, and MLflow's times have no more digits.
_START_S = 0.002


class IdleJobs:
    """Jobs of this machine that wait until they are killed, or until this is closed."""

    def __init__(self) -> None:
        self._input, self._held = os.pipe()
        self._children: list[subprocess.Popen[bytes]] = []

    def launch(self, plan: Plan, submission: SubmissionDir, job_id: str, secrets: Mapping[str, str]) -> Process:
        """Stands in for :func:`slurmtrain.local.launch_here`."""
        # Its command line is what a command goes by that looks for the controller of a killed submission.
        command = ["cat", "-", "submitit.local._local", str(submission.submitit)]
        child = subprocess.Popen(
            command, stdin=self._input, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )
        self._children.append(child)
        process = identify(child.pid)
        assert process is not None
        return process

    def close(self) -> None:
        """End all of them."""
        os.close(self._held)
        os.close(self._input)
        for child in self._children:
            child.wait()


class Training:
    """One attempt of a run in training: its agent, and its only rank."""

    def __init__(self, directory: RunDir, run: Run) -> None:
        """Start the agent of the newest attempt of ``run``."""
        newest = run.newest
        assert newest is not None
        self.run = directory
        self.place = directory.attempt(newest.job_id or "", newest.restart)
        self.process = Process.from_dict(newest.processes[0])
        self.step = 0
        make_directory(self.place.path)
        assert lease.acquire(self.place, newest.submission)
        self._agent = Journal(self.place.node_journal(0), durable=False)
        agent = AgentStarted(host=socket.gethostname(), submission=newest.submission, attempt=newest.number)
        self._write(self._agent, agent)
        self._start_rank()

    def restart(self) -> None:
        """The rank has died, and the agent starts it again."""
        self._leave()
        # Times of metrics are rounded, and an agent takes longer to notice a death.
        time.sleep(_START_S)
        number = self.place.round + 1
        self._write(self._agent, RanksRestarted(round=number, members=[0], cause="crash", why="x", reached=self.step))
        self.place = AttemptDir(self.place.path, number)
        self._start_rank()

    def _start_rank(self) -> None:
        time.sleep(_START_S)
        self._write(self._agent, WorkersStarted(processes={}))
        self._rank = Journal(self.place.rank_journal(0), durable=False)
        self._metrics = MetricsFile(self.place.metrics)
        self._write(self._rank, SessionStarted(step=0, world_size=1, device="cpu"))
        self.step = 0

    def restore(self, damaged: int = 0) -> int:
        """Continue from the newest checkpoint whose files are good; returns its step, 0 if there is none.

        ``damaged``: how many of the newest are not, if there are others.
        """
        published = checkpoint_files.published(self.run.checkpoints)
        bad = published[: min(damaged, len(published) - 1)] if published else []
        for path in bad:
            step, place = checkpoint_files.read_manifest(path).step, checkpoint_files.relative_path(path)
            aside = checkpoint_files.relative_path(checkpoint_files.set_aside(path))
            self._write(self._rank, CheckpointRejected(step=step, path=place, reason="x", aside=aside))
        if not published:
            return 0
        good = published[len(bad)]
        manifest = checkpoint_files.read_manifest(good)
        restored = CheckpointRestored(**manifest.describe(good), world_size=1, lost_steps=0)
        self._write(self._rank, restored)
        self.step = manifest.step
        return self.step

    def log(self, metrics: Mapping[str, float]) -> None:
        """The ``metrics`` of one line, for the newest finished step."""
        self._metrics.write(self.step, metrics)

    def tear(self) -> None:
        """The rank is killed in the middle of a line."""
        with self.place.metrics.open("ab") as file:
            file.write(b'{"t":1.0,"step":%d,"metrics":{"lo' % (self.step + 1))

    def save(self, *, journaled: bool = True, whole: bool = True) -> None:
        """Save. ``whole``: else killed before; ``journaled``: else killed before the event was written."""
        staging = checkpoint_files.Staging(self.run.checkpoints, self.place.owner, self.step)
        make_directory(staging.path)
        (staging.path / "weights").write_bytes(b"%d" % self.step)
        if not whole:
            return
        hasher = checkpoint_files.new_hasher()
        hasher.update(b"%d" % self.step)
        size = len(b"%d" % self.step)
        manifest = checkpoint_files.Manifest(
            step=self.step,
            world_size=1,
            saved_at=time.time(),
            seconds=0.0,
            stall_s=0.0,
            plan_hash="h",
            attempt=self.place.path.name,
            why="steps",
            files={"weights": (size, hasher.hexdigest())},
        )
        published = staging.publish(manifest)
        if journaled:
            self._write(self._rank, CheckpointSaved(**manifest.describe(published)))

    def end(self, cause: str, **fields: Any) -> None:
        """The agent ends, with this cause."""
        if cause == "completed":
            self._write(self._rank, TrainingCompleted(step=self.step))
        self._write(self._agent, NodeEnded(cause=cause, reason="x", **fields))
        self.kill()

    def kill(self) -> None:
        """All processes are killed, if they still run."""
        self._leave()
        self._agent.close()
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, signal.SIGKILL)
        # As init does: a killed process must be gone, not only ended.
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.process.pid, 0)

    def _leave(self) -> None:
        self._rank.close()
        self._metrics.close()

    def _write(self, journal: Journal, event: Payload) -> None:
        journal.write(event)
