"""What starts a run again after its newest attempt, and when at the earliest: the policy, applied to a run.

``restarted_by`` of the newest attempt is ``slurm`` as long as its job may be in the queue, ``sync`` once the job is
over and for local runs, and None if the policy, or a command that could not start the run, gave it up. ``status``
shows it, and ``sync`` acts on nothing else.
"""

from __future__ import annotations

from slurmtrain.model.interruption.after_oom import BatchMemory
from slurmtrain.model.interruption.policy import decision
from slurmtrain.model.run.fold import with_state
from slurmtrain.model.run.lineage import UPSTREAM
from slurmtrain.model.run.outcome import PREFLIGHT
from slurmtrain.model.run.run import Attempt, Run, replace

# Causes whose reasons say all there is to say.
_SAY_WHY = frozenset({PREFLIGHT, UPSTREAM})


def with_next_start(run: Run) -> Run:
    """The ``run`` of a fold, with what starts it again, and the state that follows from that."""
    if run.newest is None:
        return run
    return with_state(replace(run, attempts=[*run.attempts[:-1], _decided(run.newest, run)]))


def _decided(newest: Attempt, run: Run) -> Attempt:
    is_over = newest.executor == "local" or run.job_over
    is_requeued = newest.restarted_by is not None
    if not newest.ended or newest.policy is None or newest.cause in ("completed", "cancelled"):
        return replace(newest, restarted_by="sync") if is_requeued and is_over else newest
    decided = decision(run.attempts, run.checkpoints, BatchMemory.of_attempt(run.executor, run.resources))
    if not is_requeued and (newest.cause == PREFLIGHT or run.given_up or not decided.again):
        why = "" if newest.cause in _SAY_WHY else run.given_up or decided.why
        return replace(newest, reason="; ".join(filter(None, (newest.reason, why))))
    at = (newest.ended_at or 0.0) + decided.delay_s if decided.delay_s else None
    return replace(newest, restarted_by="sync" if is_over else "slurm", again_at=at)
