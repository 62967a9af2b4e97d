"""Whether an interrupted run is started again automatically, and when: pure.

This is the only place that decides it, from a list of the run's ends (:class:`PriorEnd`), which only :func:`prior_ends`
makes. Inside the job, the agent of a node uses it for restarts of ranks in place and for requeues. Commands use it for
runs that no agent can start again, and to describe a run to people (:func:`with_next_start`).

What the next attempt gets is decided here, too: more memory after it ran out of that, a checkpoint of its script's that
its ranks do not crash from; and how long nodes are kept after a failure.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import zip_longest
from typing import Any, ClassVar, Literal

from slurmtrain.model.experiment.sections import RequeueSpec, read_requeue
from slurmtrain.model.experiment.values import parse_memory, write_size
from slurmtrain.model.interruption.exit_report import NODE_0_COMPLETED, ExitReport, is_of_gpu_memory
from slurmtrain.model.interruption.interval import UNNOTICED, interruption_kind
from slurmtrain.model.run.run import Attempt, Checkpoint, Run, replace

# A failure that lasts longer than this needs a person rather than more waiting.
MAX_DELAY_S = 3600.0
# This many ends in a row without a new checkpoint, or node failures at one step, are blamed on the program or its data.
POISON_STREAK = 3

# Causes that count against max_failures, and causes that may be the program's fault.
_FAILURES = frozenset({"crash", "hang"})
_OF_PROGRAM = frozenset({"crash", "hang", "timeout"})
# A preflight trains nothing, and a preemption is announced: neither means that a run cannot get past its checkpoint.
_NO_POISON = frozenset({"completed", "cancelled", "preempted", "preflight", "early", "upstream"})
# All other causes count against max_node_failures, including causes that only a newer version knows.
_HANDLED_CAUSES = frozenset(
    {"completed", "cancelled", "preempted", "timeout", "oom", "crash", "hang", "early", "upstream"}
)
_NODE_REASONS = {
    "node_fail": "a node failed",
    "lost": "it ended without reporting a cause",
    "preflight": "its preflight failed",
}
# After these ends a person may want to look at the nodes: not what was announced, nor what a signal has ended.
_KEEPING = frozenset({"crash", "hang", "oom", "node_fail", "preflight"})
# A job needs this long to end by itself before Slurm ends it.
_BEFORE_LIMIT_S = 30.0
# Causes whose reasons say all there is to say.
_SAY_WHY = frozenset({"preflight", "upstream"})
# Addresses and hashes; a word counts as a hash if it mixes digits and letters.
_HEX = re.compile(r"0[xX][0-9a-fA-F]+|\b(?=[0-9a-fA-F]*[0-9])(?=[0-9a-fA-F]*[a-fA-F])[0-9a-fA-F]{8,}\b")
_NUMBER = re.compile(r"\d+(?:\.\d+)*(?:[eE][+-]?\d+)?")
# Messages may contain whole tensors.
_SIGNATURE_LENGTH = 200

DIFFERENT_REPLICAS = "is not the same tensor on ranks"
"""What the message of a failure has if ranks train models of their own."""
# After this many doublings a pause has reached its maximum, whatever it began with.
_MAX_DOUBLINGS = 60


@dataclass(frozen=True, slots=True)
class Newest:
    """The newest complete checkpoint at some moment.

    ``step``: 0 if there is none, or its step is unknown. ``fingerprint``: its identity by its content, for a script
    that saves its own; None if there is none, or it is unknown.
    """

    step: int = 0
    fingerprint: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PriorEnd:
    """One end of a run's ranks: the end of an attempt, or of a round that was followed by another in the same job.

    ``at``: when it ended, in seconds since 1970. ``began_at_step``: the step that its ranks started from, 0 for the
    beginning. ``committed``: the step of the newest checkpoint at its end, 0 for none. ``reached``: the last finished
    step; None if unknown, as for a script without a session. ``where``: the signature of the failure
    (:func:`signature`), empty if nothing failed. ``foreign``: the failure came from outside the program
    (:func:`is_foreign`). ``in_place``: its ranks were restarted inside the allocation. ``began_from`` and ``left``: the
    fingerprints of the checkpoint that its ranks started from, and of the newest at its end, for a script that saves by
    itself; None if there was none, or it is unknown. Where they are known, they decide about progress: such checkpoints
    may have no step, or a misleading one. ``of_gpu``: GPU memory was exhausted. ``shared``: the exhausted memory
    belonged to several runs that share a job (:func:`shares_memory`). ``node_0_completed``: the command of node 0 had
    completed long before, and the commands of other nodes did not end.
    """

    cause: str
    at: float
    began_at_step: int = 0
    committed: int = 0
    reached: int | None = None
    where: str = ""
    foreign: bool = False
    in_place: bool = False
    began_from: str | None = None
    left: str | None = None
    of_gpu: bool = False
    shared: bool = False
    node_0_completed: bool = False

    _JOURNALED: ClassVar = (
        "cause", "began_at_step", "committed", "reached", "where", "foreign", "began_from", "left",
    )  # fmt: skip

    @classmethod
    def of_report(
        cls, report: ExitReport, *, at: float, began: Newest, left: Newest, reached: int | None, in_place: bool = False
    ) -> PriorEnd:
        """The end that ``report`` describes, as known to the agent that has just observed it.

        ``began`` and ``left``: the newest checkpoint when the ranks started and at their end. ``at``, ``reached`` and
        ``in_place`` are the fields of the same names.
        """
        return cls(
            cause=report.cause,
            at=at,
            began_at_step=began.step,
            committed=left.step,
            reached=reached,
            where=failure_signature(report.failures),
            foreign=is_foreign(report.cause, report.failures),
            in_place=in_place,
            began_from=began.fingerprint,
            left=left.fingerprint,
            of_gpu=is_of_gpu_memory(report.failures),
            node_0_completed=NODE_0_COMPLETED in report.evidence,
        )

    @classmethod
    def from_restart(cls, plain: Mapping[str, Any], at: float) -> PriorEnd:
        """The end of ranks that were restarted in place at time ``at``; ``plain`` is the result of :meth:`to_dict`."""
        # Of a journal of another version: unknown keys are ignored, missing ones have their defaults.
        fields = {name: plain[name] for name in cls._JOURNALED if name in plain}
        return cls(**{**fields, "at": at, "in_place": True})

    @classmethod
    def of_attempt(cls, attempt: Attempt, following: Attempt | None, checkpoints: Sequence[Checkpoint]) -> PriorEnd:
        """The end of an ``attempt`` by the run's journals.

        ``following``: the attempt after it, None if there is none. ``checkpoints``: the run's.
        """
        at, cause, of_gpu = attempt.ended_at or 0.0, attempt.cause or "lost", is_of_gpu_memory(attempt.failures)
        if cause == "lost" and attempt.executor == "local" and not attempt.hosts:
            # Its agents journaled nothing: its setup commands have failed. Slurm reports this for its own jobs.
            cause = "crash"
        elif cause == "crash" and attempt.hosts and not attempt.last_word:
            # Slurm also reports a failed job if the agents were killed before they could journal an end.
            cause = "lost"
        left = attempt.left
        if not attempt.last_word and following is not None and not following.passed_over:
            # Its agents were killed before they could look: the next attempt's agents have found its last checkpoint.
            left = following.began_from or left
        return cls(
            cause=cause,
            at=at,
            began_at_step=attempt.round_step or 0,
            # A last save is published just before the end, and the clocks of nodes differ: allow a second.
            committed=committed(checkpoints, at + 1.0),
            reached=attempt.last_step,
            where=failure_signature(attempt.failures),
            foreign=is_foreign(cause, attempt.failures),
            began_from=attempt.began_from,
            left=left,
            of_gpu=of_gpu,
            shared=shares_memory(attempt.pack, share_gpu=attempt.share_gpu, of_gpu=of_gpu),
            node_0_completed=NODE_0_COMPLETED in attempt.evidence,
        )

    def to_dict(self) -> dict[str, Any]:
        """This as journaled, without the time, which is the event's."""
        return {name: getattr(self, name) for name in self._JOURNALED}


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchMemory:
    """What decides whether a batch fits into memory.

    ``memory``: how much an attempt requests per node, in MiB; None if nothing limits it to that. ``accumulation``: into
    how many parts the script divides its batch.
    """

    memory: int | None = None
    accumulation: int = 1

    @classmethod
    def of_attempt(cls, executor: str, resources: Mapping[str, Any]) -> BatchMemory:
        """The batch memory of a run's newest attempt.

        Args:
            executor: what started the run: ``local`` limits no memory.
            resources: the ``resources`` of the attempt, as journaled.
        """
        accumulation, memory = resources.get("accumulation"), None
        if executor != "local":
            with suppress(ValueError):
                memory = parse_memory(resources.get("mem"))
        return cls(
            memory=memory, accumulation=accumulation if isinstance(accumulation, int) and accumulation > 0 else 1
        )

    def __str__(self) -> str:
        parts = [] if self.memory is None else [write_size(self.memory << 20)]
        if self.accumulation > 1:
            parts.append(f"its batch in {self.accumulation} parts")
        return " and ".join(parts)

    def overrides(self, before: BatchMemory) -> list[str]:
        """The overrides that give the next attempt this batch memory, after an attempt with ``before``."""
        memory = [f"resources.mem={self.memory}M"] if self.memory != before.memory else []
        parts = [f"resources.accumulation={self.accumulation}"] if self.accumulation != before.accumulation else []
        return memory + parts


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do with a run.

    ``why``: a sentence without a full stop. ``delay_s``: seconds to wait before a requeue. ``memory``: what the next
    attempt gets instead of what the last one had, which needs a new job; None: the same.
    """

    action: Literal["requeue", "stop"]
    why: str
    delay_s: float = 0.0
    memory: BatchMemory | None = None

    @property
    def again(self) -> bool:
        """Whether the run is started again."""
        return self.action == "requeue"


# What follows from ends that somebody meant, or that came before anything was done.
_MEANT = {
    "completed": Decision("stop", "it completed"),
    "cancelled": Decision("stop", "it was cancelled"),
    "upstream": Decision("stop", "a run that it starts after did not complete"),
    "early": Decision("requeue", "it has not begun"),
}


def prior_ends(
    attempts: Sequence[Attempt],
    checkpoints: Sequence[Checkpoint],
    latest: PriorEnd | None = None,
    latest_attempt: str = "",
) -> list[PriorEnd]:
    """All ends of a run since a person last started it, the newest last: the input of :func:`decide`.

    These are the ends of its attempts, and the ends of rounds that were followed by a restart in place.

    ``attempts`` and ``checkpoints``: the run's, according to its journals. ``latest``: an end that has just happened,
    as an agent knows it before it is journaled. ``latest_attempt``: the key of its attempt; a journaled end of that
    attempt is ignored, since other nodes may have journaled it already.
    """
    # Whoever starts a run again by hand may have cured it: earlier ends count no longer.
    by_hand = max(
        (i for i, attempt in enumerate(attempts) if attempt.asked_by != "sync" and not attempt.restart), default=0
    )
    ends: list[PriorEnd] = []
    for attempt, following in zip_longest(attempts[by_hand:], attempts[by_hand + 1 :]):
        # Restarts in place come before the end of their attempt, and also count while it is in progress.
        ends += [
            PriorEnd.from_restart(restart["past"], float(restart["at"]))
            for restart in attempt.restarts
            if "past" in restart
        ]
        if attempt.ended and (latest is None or attempt.key != latest_attempt):
            ends.append(PriorEnd.of_attempt(attempt, following, checkpoints))
    return ends if latest is None else [*ends, latest]


def decision(
    attempts: Sequence[Attempt], checkpoints: Sequence[Checkpoint], memory: BatchMemory | None = None
) -> Decision:
    """What to do with a run after the last of these attempts, which has ended.

    ``attempts`` and ``checkpoints``: the run's. ``memory``: as in :func:`decide`.
    """
    return decide(prior_ends(attempts, checkpoints), policy_of(attempts[-1]), memory)


def policy_of(attempt: Attempt) -> RequeueSpec:
    """The spec's ``requeue`` that the attempt was started with."""
    return read_requeue(attempt.policy or {})


def decide(history: Sequence[PriorEnd], requeue: RequeueSpec, memory: BatchMemory | None = None) -> Decision:
    """Whether to start the run again after the last end of ``history``, which begins when a person last started it.

    ``requeue``: the rules. ``memory``: what the last attempt had; None if that is unknown. Raises nothing. By the cause
    of the last end:

    * ``completed`` and ``cancelled`` were intended, and with ``upstream`` a run that it needs will not complete: never.
    * ``early``: it started before that run had completed, and has done nothing: always.
    * All other causes only if ``requeue.enabled``.
    * ``preempted`` costs nothing and is nobody's fault: always, however often.
    * ``oom``: with more memory, or its batch in more parts, as long as ``requeue.oom`` allows that; otherwise never,
      since the same would happen again.
    * ``timeout``: if it left a new checkpoint, or its progress is unknown; otherwise the next attempt would end alike.
      So it would if the command of node 0 had completed, and the commands of other nodes did not end.
    * ``node_fail``, ``lost``, ``preflight``, and unknown causes: ``max_node_failures`` times in a row, since the
      cluster may have problems for a while; a new checkpoint resets the count.
    * ``crash`` and ``hang``, foreign or not: ``max_failures`` times in all, each time after a pause that doubles until
      there is a new checkpoint, since the problem may pass (a restart in place needs no pause: it has its nodes).
      A crash before any step was ever finished is a mistake in the script and ends the run at once, unless it came
      from outside: a typo is not worth another wait in the queue.
    * A crash because ranks train models of their own ends the run at once: a restart would only hide it.
    * Poison, meaning that the run cannot get past some point: two failures in a row with the same signature at the
      same step; or three ends in a row, ignoring preemptions and preflights, without a new checkpoint. Three node
      failures are poison only at the same step; otherwise the cluster is at fault, which ``max_node_failures`` covers.
    """
    if not history:
        return Decision("requeue", "it has not run yet")
    last = history[-1]
    if last.cause in _MEANT:
        return _MEANT[last.cause]
    if not requeue.enabled:
        return Decision("stop", "requeue.enabled is false")
    if last.cause == "preempted":
        return Decision("requeue", f"a preemption costs nothing; it continues {_from(last)}")
    if last.cause == "oom" and last.shared and requeue.oom is None:
        return Decision(
            "requeue", f"it shared its memory with other runs; it continues {_from(last)} with a job of its own"
        )
    if last.cause == "oom":
        # Checked before poison, since no number of tries would help.
        return _after_oom(last, requeue, memory)
    stop = _poison(history)
    if stop is not None:
        return Decision("stop", stop)
    if last.cause == "timeout":
        return _after_timeout(history)
    if last.cause in _FAILURES:
        return _after_failure(history, requeue)
    return _after_nodes(history, requeue)


def shares_memory(pack: int, *, share_gpu: bool, of_gpu: bool) -> bool:
    """Whether the exhausted memory belonged to several runs, so that any run may have taken it.

    ``pack``: how many runs share the job. ``share_gpu``: whether they share its GPUs too. ``of_gpu``: it was a GPU's.
    """
    return pack > 1 and (share_gpu or not of_gpu)


def signature(error: str) -> str:
    """The text of a failure without parts that vary between occurrences: numbers, addresses, hashes, pids, spaces.

    Two failures with the same signature count as the same failure.
    """
    text = _NUMBER.sub("#", _HEX.sub("#", error))
    return " ".join(text.split())[:_SIGNATURE_LENGTH].rstrip()


def failure_signature(failures: Sequence[Mapping[str, Any]]) -> str:
    """The signature of the first of these failures: of its error, or else of the last line of its log."""
    if not failures:
        return ""
    lines = [line for line in failures[0].get("last_lines") or () if str(line).strip()]
    status = failures[0].get("signal") or failures[0].get("exit_code")
    return signature(f"{status} {failures[0].get('error') or (lines[-1] if lines else '')}")


def is_foreign(cause: str, failures: Sequence[Mapping[str, Any]]) -> bool:
    """Whether an end with this cause and these failures came from outside the program."""
    return interruption_kind(cause, failures) == UNNOTICED


def committed(checkpoints: Sequence[Checkpoint], until: float) -> int:
    """The newest step saved by time ``until``, whether or not it has been deleted since; 0 if there is none."""
    return max((c.step for c in checkpoints if c.step is not None and c.complete and c.saved_at <= until), default=0)


def past_failures(history: Sequence[PriorEnd]) -> int:
    """How many crashes and hangs there were, restarts in place included."""
    return sum(past.cause in _FAILURES for past in history)


def _after_oom(last: PriorEnd, requeue: RequeueSpec, before: BatchMemory | None) -> Decision:
    rule = requeue.oom
    if rule is None or before is None:
        return Decision("stop", "it ran out of memory and would do so again")
    more, limits = None, []
    # A job cannot request more memory of its GPUs.
    if not last.of_gpu and before.memory is not None and rule.at_most is not None:
        limits.append(f"requeue.oom.at_most is {write_size(rule.at_most << 20)}")
        if before.memory < rule.at_most:
            memory = min(math.ceil(before.memory * rule.mem), rule.at_most)
            more = BatchMemory(memory=memory, accumulation=before.accumulation)
    if rule.accumulation is not None:
        limits.append(f"requeue.oom.max_accumulation is {rule.max_accumulation}")
        parts = before.accumulation * rule.accumulation
        if more is None and 0 < parts <= rule.max_accumulation:
            more = BatchMemory(memory=before.memory, accumulation=parts)
    had = f" with {before}" if str(before) else ""
    if more is not None:
        return Decision("requeue", f"it ran out of memory{had}; it continues {_from(last)} with {more}", memory=more)
    had = "" if last.of_gpu and before.accumulation == 1 else had
    why = f"it ran out of {'GPU memory' if last.of_gpu else 'memory'}{had}"
    if not limits:
        return Decision("stop", f"{why}, which requeue.oom does not raise, and would do so again")
    return Decision("stop", f"{why}, and {' and '.join(limits)}")


def _after_timeout(history: Sequence[PriorEnd]) -> Decision:
    last = history[-1]
    if last.node_0_completed:
        return Decision(
            "stop",
            "node 0 had completed, but the other nodes would not end next time either: set 'completed_by: node0'",
        )
    # Whether the rounds of the attempt have left a newer checkpoint than the first of them started from.
    first = len(history) - 1
    while first > 0 and history[first - 1].in_place:
        first -= 1
    if last.left is not None:
        saved_more = any(_advanced(history, index) for index in range(first, len(history)))
    else:
        saved_more = last.committed > history[first].began_at_step
    if saved_more:
        return Decision("requeue", f"the time limit was reached; it continues {_from(last)}")
    if last.reached is None:
        return Decision("requeue", "the time limit was reached and its progress is unknown")
    return Decision(
        "stop", "the time limit is too short to reach a checkpoint: raise resources.time, or save more often"
    )


def _after_failure(history: Sequence[PriorEnd], requeue: RequeueSpec) -> Decision:
    last, count = history[-1], past_failures(history)
    # Where it is unknown whether a step was finished, a checkpoint is proof enough.
    trained = any(
        past.reached > past.began_at_step if past.reached is not None else past.committed > 0 or past.left is not None
        for past in history
    )
    if last.cause == "crash" and not last.foreign and not trained:
        return Decision("stop", "it failed before it finished a step and would do so again")
    if count > requeue.max_failures:
        return Decision("stop", f"it failed {_count_times(count)}, and requeue.max_failures is {requeue.max_failures}")
    doublings = min(past_failures(_since_progress(history)) - 1, _MAX_DOUBLINGS)
    delay_s = min(MAX_DELAY_S, max(0.0, requeue.backoff_s) * 2.0**doublings)
    return Decision("requeue", f"failure {count} of {requeue.max_failures}; it continues {_from(last)}", delay_s)


def _after_nodes(history: Sequence[PriorEnd], requeue: RequeueSpec) -> Decision:
    last = history[-1]
    count = sum(past.cause not in _HANDLED_CAUSES for past in _since_progress(history))
    if count > requeue.max_node_failures:
        return Decision(
            "stop",
            f"its nodes failed {_count_times(count)} in a row without a new checkpoint {_after(last)}, and "
            f"requeue.max_node_failures is {requeue.max_node_failures}: ask the administrators to check the nodes",
        )
    reason = _NODE_REASONS.get(last.cause, f"it ended by {last.cause}")
    return Decision(
        "requeue",
        f"{reason} ({count} of {requeue.max_node_failures} without a new checkpoint); it continues {_from(last)}",
    )


def _poison(history: Sequence[PriorEnd]) -> str | None:
    """Why the run cannot get past where it is; None if it may."""
    last = history[-1]
    if last.cause in _NO_POISON:
        return None
    if last.cause == "crash" and DIFFERENT_REPLICAS in last.where:
        # All ranks would begin with the weights of one of them, and drift apart unnoticed.
        return "each rank trains its own model, without DDP, and a restart would not change that"
    failures = [past for past in _since_progress(history) if past.cause in _FAILURES]
    if last.cause in _FAILURES and last.where and len(failures) > 1:
        before = failures[-2]
        if (before.where, before.reached) == (last.where, last.reached):
            at = "" if last.reached is None else f" at step {last.reached}"
            return f"it failed twice{at} in the same way ({last.where})"
    stuck = [past for past in _stuck(history) if past.cause not in _NO_POISON][-POISON_STREAK:]
    if len(stuck) < POISON_STREAK:
        return None
    causes = ", ".join(past.cause for past in stuck)
    in_a_row = f"it ended {_count_times(POISON_STREAK)} in a row"
    if any(past.cause in _OF_PROGRAM for past in stuck):
        return f"{in_a_row} ({causes}) without a new checkpoint {_after(last)}"
    if last.reached is not None and all(past.reached == last.reached > past.began_at_step for past in stuck):
        return f"{in_a_row} at step {last.reached} ({causes}) without a new checkpoint"
    return None


def _advanced(history: Sequence[PriorEnd], index: int) -> bool:
    """Whether this end left a newer checkpoint than the one it started from and the one left by the end before it.

    A script that saves its own checkpoints may not say which one it started from.
    """
    past = history[index]
    if past.left is not None:
        # One that was there before is no progress, even if it is the newest again.
        earlier = {fingerprint for end in history[:index] for fingerprint in (end.began_from, end.left)}
        return past.left not in {past.began_from, *earlier}
    before = history[index - 1].committed if index else 0
    return past.committed > max(past.began_at_step, before)


def _stuck(history: Sequence[PriorEnd]) -> Sequence[PriorEnd]:
    """The last ends that left no newer checkpoint."""
    first = len(history)
    while first > 0 and not _advanced(history, first - 1):
        first -= 1
    return history[first:]


def _since_progress(history: Sequence[PriorEnd]) -> Sequence[PriorEnd]:
    """The last ends, starting with the one that left the newest checkpoint."""
    return history[max(0, len(history) - len(_stuck(history)) - 1) :]


def _from(past: PriorEnd) -> str:
    if past.committed:
        return f"from step {past.committed}"
    return "from the beginning" if past.left is None else "from its newest checkpoint"


def _after(past: PriorEnd) -> str:
    if past.committed:
        return f"after step {past.committed}"
    return "at all" if past.left is None else "after the one that it has"


def _count_times(count: int) -> str:
    return {1: "once", 2: "twice", 3: "three times"}.get(count, f"{count} times")


def suspects(history: Sequence[PriorEnd]) -> Mapping[str, str]:
    """The fingerprints of a script's own checkpoints to pass over after a crash, each with the reason as a phrase.

    A checkpoint may be damaged in a way that its format does not show: then the one before it is better.
    Suspected is what ranks started from and crashed, from within the program, without a new checkpoint; interruptions
    and hangs say nothing about it. If ranks crashed in the same way from two checkpoints, neither was the reason.

    ``history``: the ends of the run since a person last started it, who may have cured the problem.
    """
    by_failure: defaultdict[str, set[str]] = defaultdict(set)
    for past in history:
        made_nothing = past.left is None or past.left == past.began_from
        if past.cause == "crash" and not past.foreign and made_nothing and past.began_from is not None:
            by_failure[past.where].add(past.began_from)
    suspected: dict[str, str] = {}
    for where, begun_from in by_failure.items():
        if len(begun_from) == 1:
            signature = f" ({where})" if where else ""
            suspected |= dict.fromkeys(begun_from, f"its ranks crashed{signature} before they had made another")
    return suspected


def kept_s(report: ExitReport, keep_s: int | None, left_s: float | None) -> float:
    """For how many seconds the nodes are kept; 0: not at all.

    Args:
        report: how the attempt ended.
        keep_s: how long to keep them, in seconds, by the spec; None: not at all.
        left_s: the seconds until the job's time limit; None if it has none.
    """
    if keep_s is None or report.cause not in _KEEPING or report.signal is not None:
        return 0.0
    return max(0.0, keep_s if left_s is None else min(keep_s, left_s - _BEFORE_LIMIT_S))


def describe_kept(report: ExitReport, job_id: str, until: float) -> str:
    """Why the attempt has not ended yet, as a sentence without a full stop.

    Args:
        report: how the attempt ended.
        job_id: its job's id, as Slurm's commands take it.
        until: when the nodes are let go, in seconds since 1970.
    """
    at = datetime.fromtimestamp(until, UTC).strftime("%H:%M:%S UTC")
    return (
        f"{report.reason}; its nodes are kept until {at}: 'srun --jobid={job_id} --overlap --pty bash' enters the "
        f"first, 'scancel --signal=USR2 {job_id}' lets them go"
    )


def with_next_start(run: Run) -> Run:
    """The ``run`` of a fold, with what starts it again, and the state that follows from that.

    ``restarted_by`` of the newest attempt is ``slurm`` as long as its job may be in the queue, ``sync`` once the job is
    over and for local runs, and None if the policy, or a command that could not start the run, gave it up. ``status``
    shows it, and ``sync`` acts on nothing else.
    """
    # Agents decide with this module and never fold: they do without all kinds of events.
    from slurmtrain.model.run.fold import with_state

    newest = run.newest
    if newest is None:
        return run
    is_requeued = newest.restarted_by is not None
    starter = "sync" if newest.executor == "local" or run.job_over else "slurm"
    if not newest.ended or newest.policy is None or newest.cause in ("completed", "cancelled"):
        newest = replace(newest, restarted_by=starter) if is_requeued and starter == "sync" else newest
    else:
        decided = decision(run.attempts, run.checkpoints, BatchMemory.of_attempt(run.executor, run.resources))
        if not is_requeued and (newest.cause == "preflight" or run.given_up or not decided.again):
            why = "" if newest.cause in _SAY_WHY else run.given_up or decided.why
            newest = replace(newest, reason="; ".join(filter(None, (newest.reason, why))))
        else:
            # When at the earliest: only a pause makes a start wait.
            at = (newest.ended_at or 0.0) + decided.delay_s if decided.delay_s else None
            newest = replace(newest, restarted_by=starter, again_at=at)
    return with_state(replace(run, attempts=[*run.attempts[:-1], newest]))
