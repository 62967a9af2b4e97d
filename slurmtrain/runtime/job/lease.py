"""The lease of a run: which submission may start attempts, and which of its attempts may train and publish.

Commands grant it to a submission, under the run's lock. The agent of node 0 acquires it for its attempt. Thus a job
that starts late, or a rank that outlives the requeue of its job, can neither train nor publish anything.

In addition there are claims: a process that restarts a run after an attempt takes one first, so that no other process
does.
"""

from __future__ import annotations

import contextlib
import secrets
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slurmtrain.model.run.layout import AttemptDir, RunDir, SubmissionDir, split_attempt
from slurmtrain.runtime.environment.variables import ATTEMPT_DIR, SETUP_OF
from slurmtrain.system.files import link_json, make_directory, read_json, write_json
from slurmtrain.system.process import Process, identify, marked_processes, name_of, this_process

# What a lease is closed with if the run goes on with another job.
REPLACED = "replaced"


def grant(submission: SubmissionDir) -> None:
    """Give the lease to a submission; its previous holder is fenced off. Raises OSError."""
    write_json(submission.run.lease, {"submission": submission.number})


def granted_to(run: RunDir) -> int | None:
    """The number of the submission that has the lease."""
    number = _read_lease(run).get("submission")
    return None if number is None else int(number)


def acquire(attempt: AttemptDir, submission: int) -> bool:
    """Take the lease for an attempt of this submission; False if another submission, or a later start, has it."""
    held = _read_lease(attempt.run)
    if held.get("submission") != submission or _restart(str(held.get("attempt"))) > _restart(attempt.path.name):
        return False
    # If the run was closed meanwhile, it stays closed.
    write_json(attempt.run.lease, {**held, "attempt": attempt.path.name})
    return True


def close(run: RunDir, submission: int | None, state: str) -> None:
    """Keep every job of this ``run`` from training again, even if it is requeued, until the lease is granted again.

    ``state``: ``completed``, ``failed``, ``cancelled`` or :data:`REPLACED`. ``submission``: the one that ended like
    that: nothing is closed if a later one has the lease by now; None to close the run in any case.
    """
    held = _read_lease(run)
    # Without a lease nothing was ever submitted, so nothing can start.
    if held and (submission is None or held.get("submission") == submission):
        write_json(run.lease, {**held, "over": state})


def ended_as(run: RunDir, submission: int) -> str | None:
    """How the run ended for this submission, if it has while that held the lease: as :func:`close` was told."""
    held = _read_lease(run)
    return str(held["over"]) if held.get("submission") == submission and held.get("over") else None


def claim_restart(attempt: AttemptDir, by: str, about: Mapping[str, Any] | None = None) -> bool:
    """Claim the right to restart the run after an ``attempt``; False if it is already claimed as ``by``.

    Exactly one of several contenders succeeds (:func:`.link_json`). Each ``by`` has its own claim, so that commands can
    claim a restart that an agent has claimed, once Slurm says that it did not happen. ``about``: what else to store in
    the claim.
    """
    run = attempt.run
    make_directory(run.claims)
    claim = {"t": time.time(), "process": this_process().to_dict(), **(about or {})}
    return link_json(_claim_file(attempt, by), claim)


def read_claim(attempt: AttemptDir, by: str) -> dict[str, Any] | None:
    """The content of a claim: ``t``, when it was made, ``process``, and what its owner added; None if there is none."""
    types = {"t": "float", "process": "Mapping[str, Any]", "submission": "int"}
    return read_json(_claim_file(attempt, by), types=types)


def release_claim(attempt: AttemptDir, by: str) -> bool:
    """Give up a claim that led to no start; False if another process just did, and may have made a new one.

    The file is renamed first, so that exactly one of several contenders removes this claim, and none a newer one.
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
    return _read_lease(attempt.run).get("attempt") == attempt.path.name


def _read_lease(run: RunDir) -> dict[str, Any]:
    """What the lease says; empty if there is none. Raises PathError."""
    types = {"submission": "int", "attempt": "str | None", "over": "str | None"}
    return read_json(run.lease, types=types) or {}


def _claim_file(attempt: AttemptDir, by: str) -> Path:
    return attempt.run.claims / f"{attempt.path.name}.{by}.json"


def _restart(attempt: str) -> int:
    parts = split_attempt(attempt)
    return -1 if parts is None else parts[1]


# --- processes of earlier attempts ------------------------------------------------------------------------------------
# While an agent lives, it ends everything that its ranks have started. If it is killed, the kernel signals the ranks,
# but not their children, and another attempt would train beside them. They are found by a variable in the environment
# that they were started with. A process that was started with an empty environment is not found.


_POLL_S = 0.05
# A killed process ends at once, unless it is in a system call that cannot be interrupted.
_KILL_S = 10.0
# How long what setup has left running has to end by itself.
_END_S = 2.0


def runs_with_processes() -> set[str]:
    """The ids of all runs, in any runs root, with processes on this machine: this user's ranks, or their children."""
    return {attempt.parent.parent.name for attempt in _marked_attempts().values()}


def find_leftovers(run: RunDir, *, except_of: AttemptDir | None = None) -> list[Process]:
    """The processes of this user on this machine that ranks of ``run``, or their children, have started.

    ``except_of``: an attempt whose processes are not meant.
    """
    processes = []
    for pid, attempt in _marked_attempts().items():
        owner = attempt.parent.parent
        is_same = owner == run.path
        with contextlib.suppress(OSError):
            # Users and jobs may reach it by different names.
            is_same = is_same or (owner.name == run.path.name and owner.samefile(run.path))
        if is_same and (except_of is None or attempt.name != except_of.path.name):
            processes.append(identify(pid))
    return [process for process in processes if process is not None]


def kill_leftovers(run: RunDir, *, except_of: AttemptDir | None = None) -> list[str]:
    """Kill the leftovers of the ``run``, and processes that they start meanwhile; returns a description of each.

    ``except_of``: an attempt whose processes are left alone.
    """
    killed: dict[Process, str] = {}
    deadline = time.monotonic() + _KILL_S
    while (leftovers := find_leftovers(run, except_of=except_of)) and time.monotonic() < deadline:
        for process in leftovers:
            killed.setdefault(process, f"{name_of(process.pid)} (pid {process.pid})")
            process.send(signal.SIGKILL)
        time.sleep(_POLL_S)
    return list(killed.values())


def end_processes_of_setup(attempt: AttemptDir) -> list[str]:
    """End what the setup of an attempt has started on this machine and left running; returns what had to be killed."""

    def find() -> list[Process]:
        pids = [
            pid
            for pid, values in marked_processes((SETUP_OF,)).items()
            if Path(values[SETUP_OF]).name == attempt.path.name
        ]
        return [process for pid in pids if (process := identify(pid)) is not None]

    processes = find()
    for process in processes:
        process.send(signal.SIGTERM)
    deadline = time.monotonic() + _END_S
    while processes and time.monotonic() < deadline:
        time.sleep(_POLL_S)
        processes = find()
    killed = [f"{name_of(process.pid)} (pid {process.pid})" for process in processes]
    for process in processes:
        process.send(signal.SIGKILL)
    return killed


def _marked_attempts() -> dict[int, Path]:
    """The directory of the attempt of each process of this user that ranks, setup, or their children have started."""
    processes = marked_processes((ATTEMPT_DIR, SETUP_OF))
    return {pid: Path(values.get(ATTEMPT_DIR) or values[SETUP_OF]) for pid, values in processes.items()}
