"""The lease of a run: which submission may start attempts, and which of its attempts may train and publish.

Commands grant it to a submission, under the run's lock. The agent of node 0 claims it for its attempt. So a job that
comes to life late, and a rank that lives on after its job was requeued, can neither train nor publish anything.
"""

from __future__ import annotations

from slurmtrain.model.layout import AttemptDir, RunDir, SubmissionDir, split_attempt
from slurmtrain.system.files import read_json, write_json


def grant(submission: SubmissionDir) -> None:
    """Give the lease to a submission; whatever held it before is fenced off. Raises OSError."""
    write_json(submission.run.lease, {"submission": submission.number})


def granted_to(run: RunDir) -> int | None:
    """The number of the submission that has the lease."""
    number = (read_json(run.lease) or {}).get("submission")
    return None if number is None else int(number)


def claim(attempt: AttemptDir, submission: int) -> bool:
    """Take the lease for an attempt of this submission; False where another one, or a later start, has it."""
    held = read_json(attempt.run.lease) or {}
    if held.get("submission") != submission or _restart(str(held.get("attempt"))) > _restart(attempt.path.name):
        return False
    write_json(attempt.run.lease, {"submission": submission, "attempt": attempt.path.name})
    return True


def holds(attempt: AttemptDir) -> bool:
    """Whether this attempt may still publish."""
    return (read_json(attempt.run.lease) or {}).get("attempt") == attempt.path.name


def _restart(attempt: str) -> int:
    found = split_attempt(attempt)
    return -1 if found is None else found[1]
