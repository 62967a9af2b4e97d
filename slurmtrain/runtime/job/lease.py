"""The lease of a run: which submission may start attempts, and which of its attempts may train and publish.

Commands grant it to a submission, under the run's lock. The agent of node 0 acquires it for its attempt. So a job that
starts late, and a rank that outlives the requeue of its job, can neither train nor publish anything.

Beside it there are claims: whoever starts a run again after an attempt takes one first, so that nobody else does.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Mapping
from pathlib import Path
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


def acquire(attempt: AttemptDir, submission: int) -> bool:
    """Take the lease for an attempt of this submission; False where another one, or a later start, has it."""
    held = read_json(attempt.run.lease) or {}
    if held.get("submission") != submission or _restart(str(held.get("attempt"))) > _restart(attempt.path.name):
        return False
    # If the run was closed meanwhile, it stays so.
    write_json(attempt.run.lease, {**held, "attempt": attempt.path.name})
    return True


def close(run: RunDir, submission: int | None, state: str) -> None:
    """Let no job of this ``run`` start again, whoever puts it back. Another grant opens it again.

    ``state``: ``completed`` or ``cancelled``. ``submission``: the one that ended like that, which closes nothing if a
    later one has the lease by now; None to close the run anyway.
    """
    held = read_json(run.lease) or {}
    # Without a lease nothing was ever submitted, and nothing can start.
    if held and (submission is None or held.get("submission") == submission):
        write_json(run.lease, {**held, "over": state})


def final_state(run: RunDir, submission: int) -> str | None:
    """How the run ended for good, if it has while this submission held the lease."""
    held = read_json(run.lease) or {}
    return str(held["over"]) if held.get("submission") == submission and held.get("over") else None


def claim_restart(attempt: AttemptDir, by: str, about: Mapping[str, Any] | None = None) -> bool:
    """Claim to start the run again after an ``attempt``; False where somebody has claimed it as ``by`` already.

    A hard link to a file is made or refused as a whole, also on NFS (open(2), O_EXCL), so that of several that try one
    succeeds, where locks do not work too. What an agent has claimed is for commands to claim as well, once Slurm says
    that nothing has come of it: each ``by`` has a claim of its own. ``about``: what else the claim is to hold.
    """
    run = attempt.run
    make_directory(run.claims)
    draft = run.claims / f".{secrets.token_hex(8)}"
    write_json(draft, {"t": time.time(), "process": this_process().to_dict(), **(about or {})})
    # Written first and linked whole: nobody ever reads half a claim.
    try:
        os.link(draft, _claim_file(attempt, by))
    except FileExistsError:
        return False
    finally:
        draft.unlink(missing_ok=True)
    return True


def read_claim(attempt: AttemptDir, by: str) -> dict[str, Any] | None:
    """What a claim holds: ``t``, when it was made, ``process``, and what its owner gave; None where there is none."""
    return read_json(_claim_file(attempt, by))


def release_claim(attempt: AttemptDir, by: str) -> bool:
    """Give up a claim that led to no start; False where somebody else just did, and may have made another.

    Renamed first, so that of several that try exactly one removes this claim, and not a newer one.
    """
    claim = _claim_file(attempt, by)
    aside = claim.with_name(f".{secrets.token_hex(8)}")
    try:
        claim.rename(aside)
    except FileNotFoundError:
        return False
    aside.unlink(missing_ok=True)
    return True


def holds(attempt: AttemptDir) -> bool:
    """Whether this attempt may still publish."""
    return (read_json(attempt.run.lease) or {}).get("attempt") == attempt.path.name


def _claim_file(attempt: AttemptDir, by: str) -> Path:
    return attempt.run.claims / f"{attempt.path.name}.{by}.json"


def _restart(attempt: str) -> int:
    parts = split_attempt(attempt)
    return -1 if parts is None else parts[1]
