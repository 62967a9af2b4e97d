"""Whether a run that was interrupted is started again by itself, and when: pure.

The one place that decides it, by a list of ends of the run (:class:`PriorEnd`), which :func:`prior_ends` alone makes. A
node's agent asks it inside the job, of ranks that may start again in place and of the job; a command asks it for what
no agent can start again, and for what people read.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from slurmtrain.model.interruption.exit_report import ExitReport
from slurmtrain.model.interruption.statistics import UNNOTICED, interruption_kind
from slurmtrain.model.run.run import Attempt, Checkpoint
from slurmtrain.model.spec.spec import RequeueSpec, read_requeue

# What fails for longer than that is not waited for but looked at.
MAX_DELAY_S = 3600.0
# So many ends in a row without a new checkpoint, or failures at one step, are the program's doing or the data's.
POISON_STREAK = 3

# What counts against max_failures, and what may be the program's doing.
_FAILURES = frozenset({"crash", "hang"})
_OF_PROGRAM = frozenset({"crash", "hang", "timeout"})
# A preflight trains nothing, and a preemption is announced: neither says that a run cannot get past its checkpoint.
_NO_POISON = frozenset({"completed", "cancelled", "preempted", "preflight"})
# All others count against max_node_failures, among them causes that only a newer version knows.
_HANDLED_CAUSES = frozenset({"completed", "cancelled", "preempted", "timeout", "oom", "crash", "hang"})
_NODE_REASONS = {
    "node_fail": "a node failed",
    "lost": "it ended without a word",
    "preflight": "its preflight failed",
}
# Addresses and hashes; a word counts as one if it has digits among its letters.
_HEX = re.compile(r"0[xX][0-9a-fA-F]+|\b(?=[0-9a-fA-F]*[0-9])(?=[0-9a-fA-F]*[a-fA-F])[0-9a-fA-F]{8,}\b")
_NUMBER = re.compile(r"\d+(?:\.\d+)*(?:[eE][+-]?\d+)?")
# Messages may hold whole tensors.
_SIGNATURE_LENGTH = 200
# From here on a doubled pause is at its longest anyway, whatever it began with.
_MAX_DOUBLINGS = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class PriorEnd:
    """One end of a run's ranks: of an attempt, or of a round of it that was followed by another in the same job.

    ``at``: when it ended, in seconds since 1970. ``began_at_step``: the step that its ranks started from, 0 for the
    beginning. ``committed``: the step of the newest checkpoint at its end, 0 for none. ``reached``: the last finished
    step; None where nobody knows, as of a script without a session. ``where``: the signature of what failed
    (:func:`signature`), empty for nothing. ``foreign``: the failure came from outside the program
    (``model/interruption/statistics.kind``). ``in_place``: its ranks were started again inside the allocation.
    """

    cause: str
    at: float
    began_at_step: int = 0
    committed: int = 0
    reached: int | None = None
    where: str = ""
    foreign: bool = False
    in_place: bool = False

    @classmethod
    def of_report(
        cls,
        report: ExitReport,
        *,
        at: float,
        began_at_step: int,
        committed: int,
        reached: int | None,
        in_place: bool = False,
    ) -> PriorEnd:
        """The end that ``report`` tells of, as the agent knows it that has just seen it.

        ``at``, ``began_at_step``, ``committed``, ``reached`` and ``in_place`` are the fields of the same names.
        """
        return cls(
            cause=report.cause,
            at=at,
            began_at_step=began_at_step,
            committed=committed,
            reached=reached,
            where=failure_signature(report.failures),
            foreign=is_foreign(report.cause, report.failures),
            in_place=in_place,
        )

    @classmethod
    def from_restart(cls, plain: Mapping[str, Any], at: float) -> PriorEnd:
        """The end of ranks that were started again in place, from what :meth:`to_dict` gave of it."""
        reached = plain.get("reached")
        return cls(
            cause=str(plain["cause"]),
            at=at,
            began_at_step=int(plain["began_at_step"]),
            committed=int(plain["committed"]),
            reached=None if reached is None else int(reached),
            where=str(plain.get("where", "")),
            foreign=bool(plain.get("foreign", False)),
            in_place=True,
        )

    def to_dict(self) -> dict[str, Any]:
        """As the journal has it, whose event tells the time."""
        return {
            "cause": self.cause,
            "began_at_step": self.began_at_step,
            "committed": self.committed,
            "reached": self.reached,
            "where": self.where,
            "foreign": self.foreign,
        }


@dataclass(frozen=True, slots=True)
class Decision:
    """What becomes of a run. ``why`` is a sentence without its full stop; ``delay_s``: seconds to wait before."""

    action: Literal["requeue", "stop"]
    why: str
    delay_s: float = 0.0

    @property
    def again(self) -> bool:
        """Whether the run is started again."""
        return self.action == "requeue"


def prior_ends(
    attempts: Sequence[Attempt],
    checkpoints: Sequence[Checkpoint],
    latest: PriorEnd | None = None,
    latest_attempt: str = "",
) -> list[PriorEnd]:
    """All that a run has been through since a person last started it, the newest end last: what :func:`decide` weighs.

    These are the ends of its attempts, and of their ranks inside the allocation.

    ``attempts`` and ``checkpoints``: those of the run, as far as its journals tell. ``latest``: an end that has just
    happened, as an agent knows it before it is journaled. ``latest_attempt``: the key of its attempt; what journals
    say of that attempt's end does not count, since other nodes may have journaled it already.
    """
    by_hand = max(
        (i for i, attempt in enumerate(attempts) if attempt.asked_by != "sync" and not attempt.restart), default=0
    )
    ends: list[PriorEnd] = []
    for attempt in attempts[by_hand:]:
        # Restarts in place came before the end of their attempt, and count while it is under way, too.
        ends += [
            PriorEnd.from_restart(restart["past"], float(restart["at"]))
            for restart in attempt.restarts
            if "past" in restart
        ]
        if attempt.ended and (latest is None or attempt.key != latest_attempt):
            ends.append(_end_of(attempt, checkpoints))
    return ends if latest is None else [*ends, latest]


def decision(attempts: Sequence[Attempt], checkpoints: Sequence[Checkpoint]) -> Decision:
    """What becomes of a run after the last of these attempts, which has ended."""
    return decide(prior_ends(attempts, checkpoints), policy_of(attempts[-1]))


def policy_of(attempt: Attempt) -> RequeueSpec:
    """The spec's ``requeue`` that the attempt was started with."""
    return read_requeue(attempt.policy or {})


def decide(history: Sequence[PriorEnd], requeue: RequeueSpec) -> Decision:
    """What is to follow the last end of ``history``, which has all since a person last started the run; raises nothing.

    * ``completed`` and ``cancelled`` are what was wanted: never again. All else only if ``requeue.enabled``.
    * ``preempted`` costs nothing and is nobody's fault: always, however often.
    * ``oom``: never, the same would happen again.
    * ``timeout``: if it has left a new checkpoint, or nobody knows what it did; else the next would end like it.
    * ``node_fail``, ``lost``, ``preflight``, and causes that are not known: ``max_node_failures`` times in a row, since
      the cluster may be ill for a while; a new checkpoint counts anew.
    * ``crash`` and ``hang``, foreign or not: ``max_failures`` times in all, each time after a pause that doubles until
      there is a new checkpoint, for what failed it may pass (a restart in place needs no pause: it has its nodes).
      A crash before any step was ever finished is a mistake in the script and ends the run at once, unless it came
      from outside: no queue is waited in for a typing error.
    * Poison, ends that tell of a run that cannot get past a place: two failures in a row with the same signature at the
      same step; or three ends in a row, but for preemptions and preflights, without a new checkpoint. Three of nodes
      alone are poison only at the same step: else it is the cluster that is ill, for which there is
      ``max_node_failures``.
    """
    if not history:
        return Decision("requeue", "it has not run yet")
    last = history[-1]
    if last.cause in ("completed", "cancelled"):
        return Decision("stop", "it completed" if last.cause == "completed" else "it was cancelled")
    if not requeue.enabled:
        return Decision("stop", "requeue.enabled is false")
    if last.cause == "preempted":
        return Decision("requeue", f"a preemption costs nothing; it goes on {_from(last)}")
    if last.cause == "oom":
        # Before poison, since no number of tries would change it.
        return Decision("stop", "it ran out of memory, and would again")
    stop = _poison(history)
    if stop is not None:
        return Decision("stop", stop)
    if last.cause == "timeout":
        return _after_timeout(history)
    if last.cause in _FAILURES:
        return _after_failure(history, requeue)
    return _after_nodes(history, requeue)


def signature(error: str) -> str:
    """The text of a failure without what differs from one time to the next: numbers, addresses, hashes, pids, spaces.

    Two failures with the same signature are taken for the same one.
    """
    text = _NUMBER.sub("#", _HEX.sub("#", error))
    return " ".join(text.split())[:_SIGNATURE_LENGTH].rstrip()


def failure_signature(failures: Sequence[Mapping[str, Any]]) -> str:
    """By what the first of these failures is recognized: its error, or else the last line of its log."""
    if not failures:
        return ""
    lines = [line for line in failures[0].get("last_lines") or () if str(line).strip()]
    status = failures[0].get("signal") or failures[0].get("exit_code")
    return signature(f"{status} {failures[0].get('error') or (lines[-1] if lines else '')}")


def is_foreign(cause: str, failures: Sequence[Mapping[str, Any]]) -> bool:
    """Whether such an end came from outside the program."""
    return interruption_kind(cause, failures) == UNNOTICED


def committed(checkpoints: Sequence[Checkpoint], until: float) -> int:
    """The newest step that was saved by then, whether or not it has been deleted since; 0 if there is none."""
    return max((c.step for c in checkpoints if c.step is not None and c.complete and c.saved_at <= until), default=0)


def past_failures(history: Sequence[PriorEnd]) -> int:
    """How many crashes and hangs there were, restarts in place included."""
    return sum(past.cause in _FAILURES for past in history)


def _after_timeout(history: Sequence[PriorEnd]) -> Decision:
    last = history[-1]
    if last.committed > _attempt(history)[0].began_at_step:
        return Decision("requeue", f"the time limit was reached; it goes on {_from(last)}")
    if last.reached is None:
        return Decision("requeue", "the time limit was reached, and nobody knows how far it came")
    return Decision("stop", "the time limit does not suffice for a checkpoint: raise resources.time or save more often")


def _after_failure(history: Sequence[PriorEnd], requeue: RequeueSpec) -> Decision:
    last, count = history[-1], past_failures(history)
    if last.cause == "crash" and not last.foreign and not any(map(_finished_a_step, history)):
        return Decision("stop", "it failed before it finished a step, and would again")
    if count > requeue.max_failures:
        return Decision("stop", f"it failed {_times(count)}, and requeue.max_failures is {requeue.max_failures}")
    doublings = min(past_failures(_since_progress(history)) - 1, _MAX_DOUBLINGS)
    delay_s = min(MAX_DELAY_S, max(0.0, requeue.backoff_s) * 2.0**doublings)
    return Decision("requeue", f"failure {count} of {requeue.max_failures}; it goes on {_from(last)}", delay_s)


def _after_nodes(history: Sequence[PriorEnd], requeue: RequeueSpec) -> Decision:
    last = history[-1]
    count = sum(past.cause not in _HANDLED_CAUSES for past in _since_progress(history))
    if count > requeue.max_node_failures:
        return Decision(
            "stop",
            f"nodes failed it {_times(count)} in a row without a new checkpoint {_after(last)}, and "
            f"requeue.max_node_failures is {requeue.max_node_failures}: have the nodes looked at",
        )
    reason = _NODE_REASONS.get(last.cause, f"it ended by {last.cause}")
    return Decision(
        "requeue",
        f"{reason} ({count} of {requeue.max_node_failures} without a new checkpoint); it goes on {_from(last)}",
    )


def _poison(history: Sequence[PriorEnd]) -> str | None:
    """Why the run cannot get past where it is; None if it may."""
    last = history[-1]
    if last.cause in _NO_POISON:
        return None
    same = _same_again(history)
    if same is not None:
        return same
    stuck = [past for past in _stuck(history) if past.cause not in _NO_POISON][-POISON_STREAK:]
    if len(stuck) < POISON_STREAK:
        return None
    causes = ", ".join(past.cause for past in stuck)
    if any(past.cause in _OF_PROGRAM for past in stuck):
        return f"it ended {_times(POISON_STREAK)} in a row ({causes}) without a new checkpoint {_after(last)}"
    if last.reached is not None and all(past.reached == last.reached > past.began_at_step for past in stuck):
        return f"it ended {_times(POISON_STREAK)} in a row at step {last.reached} ({causes}) without a new checkpoint"
    return None


def _same_again(history: Sequence[PriorEnd]) -> str | None:
    last = history[-1]
    failures = [past for past in _since_progress(history) if past.cause in _FAILURES]
    if last.cause not in _FAILURES or not last.where or len(failures) < 2:
        return None
    before = failures[-2]
    if (before.where, before.reached) != (last.where, last.reached):
        return None
    at = "" if last.reached is None else f" at step {last.reached}"
    return f"it failed twice{at} in the same way ({last.where})"


def _attempt(history: Sequence[PriorEnd]) -> Sequence[PriorEnd]:
    """The rounds of the last attempt."""
    first = len(history) - 1
    while first > 0 and history[first - 1].in_place:
        first -= 1
    return history[first:]


def _advanced(history: Sequence[PriorEnd], index: int) -> bool:
    """Whether this end left a newer checkpoint than it went on from, and than the one before it had left.

    A script of its own kind of checkpoints may not say what it went on from.
    """
    past = history[index]
    before = history[index - 1].committed if index else 0
    return past.committed > max(past.began_at_step, before)


def _stuck(history: Sequence[PriorEnd]) -> Sequence[PriorEnd]:
    """The last ends that left no newer checkpoint."""
    first = len(history)
    while first > 0 and not _advanced(history, first - 1):
        first -= 1
    return history[first:]


def _since_progress(history: Sequence[PriorEnd]) -> Sequence[PriorEnd]:
    """The last ends, from the one on that left the newest checkpoint."""
    return history[max(0, len(history) - len(_stuck(history)) - 1) :]


def _finished_a_step(past: PriorEnd) -> bool:
    """Whether it finished a step, as far as is known; a checkpoint proves that it can."""
    if past.reached is not None:
        return past.reached > past.began_at_step
    return past.committed > 0


def _from(past: PriorEnd) -> str:
    return f"from step {past.committed}" if past.committed else "from the beginning"


def _after(past: PriorEnd) -> str:
    return f"after step {past.committed}" if past.committed else "at all"


def _times(count: int) -> str:
    return {1: "once", 2: "twice", 3: "three times"}.get(count, f"{count} times")


def _end_of(attempt: Attempt, checkpoints: Sequence[Checkpoint]) -> PriorEnd:
    at, cause = attempt.ended_at or 0.0, _cause_of(attempt)
    return PriorEnd(
        cause=cause,
        at=at,
        began_at_step=attempt.round_step or 0,
        # A save that the end has waited for is published a moment before it; clocks of nodes differ.
        committed=committed(checkpoints, at + 1.0),
        reached=attempt.last_step,
        where=failure_signature(attempt.failures),
        foreign=is_foreign(cause, attempt.failures),
        in_place=False,
    )


def _cause_of(attempt: Attempt) -> str:
    """Why it ended. A local job whose agents journaled nothing has failed in its setup lines; Slurm says so of its own.

    Of agents that were killed before they could journal an end Slurm says that the job failed, too.
    """
    if attempt.cause == "lost" and attempt.executor == "local" and not attempt.hosts:
        return "crash"
    if attempt.cause == "crash" and attempt.hosts and not attempt.last_word:
        return "lost"
    return attempt.cause or "lost"
