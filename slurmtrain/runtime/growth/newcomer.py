"""An agent of a second job: it announces itself to the attempt that needs nodes, and waits until it takes part.

The variable EXTENDS, which node 0 of that attempt has set for the job, names the attempt and the number of the job's
first agent. The agent leaves, and with it the job ends, as soon as nobody waits for it any more: a signal has come, the
run is over or has another attempt, or node 0 no longer looks for newcomers.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from slurmtrain.errors import LaunchError, PathError
from slurmtrain.model.interruption.growth import Newcomer, Stage
from slurmtrain.model.run.layout import AttemptDir, SubmissionDir, split_attempt
from slurmtrain.runtime.environment.node import Node
from slurmtrain.runtime.environment.variables import EXTENDS, take_variable
from slurmtrain.runtime.growth.files import announce, read_admission, withdraw
from slurmtrain.runtime.job import lease

# How often an agent announces itself, and looks whether it is admitted.
_ANNOUNCE_S = 2.0
_LOOK_S = 0.5
# For how long node 0 may not have looked for newcomers: it does every few seconds, but a file server may be slow.
_SILENCE_S = 90.0


@dataclass(frozen=True, slots=True)
class Extension:
    """What a second job is for: the attempt ``<job id>.<restart>``, and the number of the job's first agent there."""

    attempt: str
    first: int

    def __str__(self) -> str:
        return f"{self.attempt}:{self.first}"


def pop_extension() -> Extension | None:
    """What this agent's job is for, according to its environment; None unless it is such a second job.

    Raises LaunchError if the variable says something else.
    """
    text = take_variable(EXTENDS)
    attempt, _, first = text.rpartition(":")
    if not text:
        return None
    if split_attempt(attempt) is None or not first.isdecimal():
        raise LaunchError(f"{EXTENDS} is {text!r}, which names no attempt; it is set by slurmtrain alone")
    return Extension(attempt, int(first))


@dataclass(frozen=True, slots=True)
class Admission:
    """Where a newcomer takes part: in a ``stage`` of an ``attempt``, as a ``node`` of it."""

    attempt: AttemptDir
    node: Node
    stage: Stage


def wait_for_admission(
    submission: SubmissionDir, node: Node, extension: Extension, give_up: Callable[[], bool]
) -> Admission | None:
    """Announce this agent to the attempt that it could join, and wait until it is admitted. Raises PathError, OSError.

    Args:
        submission: The run's submission, which both jobs have in common.
        node: This node of the second job.
        extension: What that job is for.
        give_up: Whether a signal has come.

    Returns:
        Where it takes part; None if nobody needs it.
    """
    job_id, restart = split_attempt(extension.attempt) or ("", 0)
    attempt = submission.run.attempt(job_id, restart)
    number = extension.first + node.index
    newcomer = Newcomer(number=number, host=node.host, job_id=node.job_id, job_nodes=node.count)
    heard, heard_at, count, announced_at = 0, time.monotonic(), 0, 0.0
    try:
        while not give_up() and _is_current(attempt, node.submission):
            now = time.monotonic()
            if now - announced_at >= _ANNOUNCE_S:
                count, announced_at = count + 1, now
                announce(attempt, newcomer, count)
            stage, pulse = read_admission(attempt)
            if stage is not None and stage.place_of(number) is not None:
                own = replace(node, index=number, count=len(stage.roster), job_id=job_id, restart=restart)
                return Admission(attempt, own, stage)
            heard, heard_at = (pulse, now) if pulse != heard else (heard, heard_at)
            if now - heard_at > _SILENCE_S:
                return None
            time.sleep(_LOOK_S)
        return None
    finally:
        withdraw(attempt, number)


def _is_current(attempt: AttemptDir, submission: int) -> bool:
    """Whether the run goes on in this attempt of that submission."""
    with contextlib.suppress(PathError):
        return lease.holds(attempt) and lease.final_state(attempt.run, submission) is None
    return False
