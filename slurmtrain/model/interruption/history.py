"""What a run has been through since a person last started it, as the policy weighs it: pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from slurmtrain.model.interruption.policy import Decision, PriorEnd, decide, signature
from slurmtrain.model.interruption.statistics import UNNOTICED, kind
from slurmtrain.model.run.run import Attempt, Checkpoint
from slurmtrain.model.spec.spec import RequeueSpec, read_requeue


def decision(attempts: Sequence[Attempt], checkpoints: Sequence[Checkpoint]) -> Decision:
    """What becomes of a run after the last of these attempts, which has ended."""
    return decide(past_of(attempts, checkpoints), policy_of(attempts[-1]))


def policy_of(attempt: Attempt) -> RequeueSpec:
    """The spec's ``requeue`` that the attempt was started with."""
    return read_requeue(attempt.policy or {})


def past_of(attempts: Sequence[Attempt], checkpoints: Sequence[Checkpoint]) -> list[PriorEnd]:
    """The ends of these attempts, and of their ranks inside the allocation, since a person last started the run."""
    by_hand = max(
        (i for i, attempt in enumerate(attempts) if attempt.asked_by != "sync" and not attempt.restart), default=0
    )
    past: list[PriorEnd] = []
    for attempt in attempts[by_hand:]:
        past += [
            past_in_place(restart["past"], float(restart["at"])) for restart in attempt.restarts if "past" in restart
        ]
        if attempt.ended:
            past.append(_end(attempt, checkpoints))
    return past


def past_in_place(plain: Mapping[str, Any], at: float) -> PriorEnd:
    """The end of ranks that were started again where they were, from what :func:`plain` gave of it."""
    reached = plain.get("reached")
    return PriorEnd(
        cause=str(plain["cause"]),
        at=at,
        began_at_step=int(plain["began_at_step"]),
        committed=int(plain["committed"]),
        reached=None if reached is None else int(reached),
        where=str(plain.get("where", "")),
        foreign=bool(plain.get("foreign", False)),
        in_place=True,
    )


def plain(past: PriorEnd) -> dict[str, Any]:
    """As JSON has it."""
    return {
        "cause": past.cause,
        "began_at_step": past.began_at_step,
        "committed": past.committed,
        "reached": past.reached,
        "where": past.where,
        "foreign": past.foreign,
    }


def where_of(failures: Sequence[Mapping[str, Any]]) -> str:
    """By what the first failure is known again: its error, or the last thing that it said."""
    if not failures:
        return ""
    said = [line for line in failures[0].get("last_lines") or () if str(line).strip()]
    how = failures[0].get("signal") or failures[0].get("exit_code")
    return signature(f"{how} {failures[0].get('error') or (said[-1] if said else '')}")


def is_foreign(cause: str, failures: Sequence[Mapping[str, Any]]) -> bool:
    """Whether such an end came from outside the program."""
    return kind(cause, failures) == UNNOTICED


def committed(checkpoints: Sequence[Checkpoint], until: float) -> int:
    """The newest step that was saved by then, whether or not it has been deleted since; 0 if there is none."""
    return max((c.step for c in checkpoints if c.step is not None and c.complete and c.saved_at <= until), default=0)


def _end(attempt: Attempt, checkpoints: Sequence[Checkpoint]) -> PriorEnd:
    at, cause = attempt.ended_at or 0.0, _cause(attempt)
    return PriorEnd(
        cause=cause,
        at=at,
        began_at_step=attempt.round_step or 0,
        # A save that the end has waited for is published a moment before it; clocks of nodes differ.
        committed=committed(checkpoints, at + 1.0),
        reached=attempt.last_step,
        where=where_of(attempt.failures),
        foreign=is_foreign(cause, attempt.failures),
        in_place=False,
    )


def _cause(attempt: Attempt) -> str:
    """Why it ended. A local job of which no agent spoke has failed in its setup lines; Slurm says so of its own.

    Of agents that were killed before a last word Slurm says that the job failed, too.
    """
    if attempt.cause == "lost" and attempt.executor == "local" and not attempt.hosts:
        return "crash"
    if attempt.cause == "crash" and attempt.hosts and not attempt.last_word:
        return "lost"
    return attempt.cause or "lost"
