"""Slurm's queue, as the agents of a pack use it for the job that they share.

None of them may requeue the job, or forbid that, while others train. Each leaves a file in the directory of its
attempt; the batch script goes on once all agents have ended, and requeues the job if any of them wants that
(``templates/epilogue.sh.j2``). The agents of runs that are over then end at once. If the batch script is killed before
that, the job is over, and commands start the runs again one by one, as with any job that was not requeued.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from slurmtrain.model.run.layout import SubmissionDir
from slurmtrain.runtime.job import lease
from slurmtrain.slurm.requeue import SlurmQueue
from slurmtrain.system.files import write_json


class PackQueue:
    """The queue of one run of a pack (``slurmtrain.runtime.agent.finish.JobQueue``)."""

    def __init__(self, submission: SubmissionDir) -> None:
        """``submission``: directory of the run's submission."""
        self._submission = submission
        self._queue = SlurmQueue()

    def record(self, job_id: str) -> Mapping[str, str]:
        """What Slurm knows about the job, unless only this run was cancelled. Raises SlurmDown."""
        if lease.final_state(self._submission.run, self._submission.number) == "cancelled":
            return {"JobState": "CANCELLED"}
        return self._queue.record(job_id)

    def exclusion_problem(self, _job_id: str, _without: Sequence[str]) -> str | None:
        """Nothing: a run that must not start on some nodes leaves the job (``AttemptFinish``)."""
        return None

    def requeue_job(self, job_id: str, _without: Sequence[str], _delay_s: float, intent: Path) -> None:
        """Have the batch script requeue the job once all of its agents have ended.

        Args:
            job_id: the job.
            _without: none: a run that must not start on some nodes leaves the job.
            _delay_s: not used, since it would delay other runs.
            intent: the file that the batch script looks for.
        """
        write_json(intent, {"requeue": job_id})

    def forbid_requeue(self, job_id: str, intent: Path) -> None:
        """Have the batch script keep Slurm from starting the job again, if no run of the pack is to go on.

        Args:
            job_id: the job.
            intent: the file that the batch script looks for.
        """
        write_json(intent, {"forbid_requeue": job_id})

    def put_back(self, job_id: str, _after: Sequence[str], delay_s: float, intent: Path) -> None:
        """As :meth:`requeue_job`: runs that start after others share no job.

        Args:
            job_id: the job.
            _after: not used.
            delay_s: not used either.
            intent: the file that the batch script looks for.
        """
        self.requeue_job(job_id, (), delay_s, intent)
