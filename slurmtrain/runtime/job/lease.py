"""The lease of a run: which submission may start attempts, and which of its attempts may train and publish.

Commands grant it to a submission, under the run's lock. The agent of node 0 claims it for its attempt. So a job that
comes to life late, and a rank that lives on after its job was requeued, can neither train nor publish anything.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Mapping
from typing import Any

from slurmtrain.model.run.layout import AttemptDir, RunDir, SubmissionDir, split_attempt
from slurmtrain.system.files import make_directory, read_json, write_json
from slurmtrain.system.process import this_process


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
    # That the run is over meanwhile stays said.
    write_json(attempt.run.lease, {**held, "attempt": attempt.path.name})
    return True


def close(run: RunDir, submission: int | None, how: str) -> None:
    """The run has ``completed``, or was ``cancelled``: none of its jobs starts again, whoever puts it back.

    ``submission``: the one that says so, if any; a later one has the lease by now. Another grant opens it again.
    """
    held = read_json(run.lease) or {}
    if held and (submission is None or held.get("submission") == submission):
        write_json(run.lease, {**held, "over": how})


def over(run: RunDir, submission: int) -> str | None:
    """How the run ended for good, if it has while this submission held the lease."""
    held = read_json(run.lease) or {}
    return str(held["over"]) if held.get("submission") == submission and held.get("over") else None


def claim_next(attempt: AttemptDir, by: str, about: Mapping[str, Any] | None = None) -> bool:
    """Take it upon oneself to start the run again after an attempt; False where somebody has.

    A hard link to a file is made or refused as a whole, also on NFS (open(2), O_EXCL), so that of several that try one
    succeeds, where locks do not work too. What an agent has claimed is for commands to claim as well, once Slurm says
    that nothing has come of it: each ``by`` has a claim of its own.
    """
    run = attempt.run
    make_directory(run.claims)
    claim = run.claims / f"{attempt.path.name}.{by}.json"
    draft = run.claims / f".{secrets.token_hex(8)}"
    write_json(draft, {"t": time.time(), "process": this_process().to_dict(), **(about or {})})
    try:
        os.link(draft, claim)
    except FileExistsError:
        return False
    finally:
        draft.unlink(missing_ok=True)
    return True


def claimed(attempt: AttemptDir, by: str) -> dict[str, Any] | None:
    """What is said of a claim; None where there is none."""
    return read_json(attempt.run.claims / f"{attempt.path.name}.{by}.json")


def release(attempt: AttemptDir, by: str) -> bool:
    """Give up a claim of which nothing has come; False where somebody else just did, and may have made another."""
    claim = attempt.run.claims / f"{attempt.path.name}.{by}.json"
    gone = claim.with_name(f".{secrets.token_hex(8)}")
    try:
        claim.rename(gone)
    except FileNotFoundError:
        return False
    gone.unlink(missing_ok=True)
    return True


def holds(attempt: AttemptDir) -> bool:
    """Whether this attempt may still publish."""
    return (read_json(attempt.run.lease) or {}).get("attempt") == attempt.path.name


def _restart(attempt: str) -> int:
    found = split_attempt(attempt)
    return -1 if found is None else found[1]
