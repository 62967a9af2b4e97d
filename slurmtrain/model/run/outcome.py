"""Whether, when and why an attempt ended: what its nodes said, and what was observed from outside, merged.

What the job says of itself outranks what was observed. The scheduler decides where the job said nothing, and where the
job knows no more than that a signal asked it to stop: a preemption and a cancel look alike from inside.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from slurmtrain.model.run.events.base import AnyEvent
from slurmtrain.model.run.job_state import CAUSE_OF_STATE, GONE, base, in_words, is_final
from slurmtrain.model.run.layout import node_of
from slurmtrain.model.run.requeue import PREFLIGHT, RequeueRecord, requeue_of
from slurmtrain.model.run.run import STATE_OF_CAUSE, Attempt

# A job that ends this long before its limit did not time out, though Slurm says so of one that leaves in its grace.
_LIMIT_MARGIN_S = 60.0
# Ends of which it is worth saying how far the attempt had come.
_AT_A_STEP = frozenset({"preempted", "timeout", "cancelled"})


def with_outcome(attempt: Attempt, events: Sequence[AnyEvent], cancels: Sequence[float]) -> Attempt:
    """The attempt as these events of its own, and the times at which a person cancelled the run, leave it."""
    # What a node says that was lost, while the others went on, is of no account.
    lost = {str(node) for event in events if event.kind == "restart" for node in event.data.get("lost", ())}
    ends = [event for event in events if event.kind == "end" and node_of(event.source) not in lost]
    seen = _last_word(events)
    nodes = max((int(event.data.get("nodes", 1)) for event in events if event.kind == "agent"), default=0)
    all_said = nodes > 0 and len({event.source for event in ends}) >= nodes - len(lost)
    back = requeue_of(events)
    if back is not None and back.asked:
        # Putting a job back ends its other nodes, some of them before they have said a last word.
        return _put_back(attempt, back, events, seen, last_end=max((event.time for event in ends), default=back.at))
    if not (all_said or seen):
        return attempt
    last_end = max((event.time for event in ends), default=0.0)
    if ends and all(end.data.get("cause") == "completed" for end in ends) and (all_said or _is(seen, "COMPLETED")):
        return closed(attempt, "completed", "", last_end, confirmed=True)
    cancelled_at = next((time for time in cancels if time >= begin(attempt)), None)
    if back is not None and (cancelled_at is None or back.at < cancelled_at):
        return _closed_by(back, attempt, last_end or back.at)
    root = min((event for event in ends if event.data.get("cause") != "completed"), key=_blame, default=None)
    if root is not None and (cancelled_at is None or _when_failed(root) < cancelled_at):
        if seen is None and _is_asked(root) and _is_slurms(events):
            # Preempted, cancelled, put back into the queue? Its nodes cannot tell, and Slurm has not said yet.
            return replace(attempt, reason=f"{root.data.get('reason')}; Slurm has not said why yet")
        return _told_by_node(attempt, root, seen, last_end)
    # Slurm's times are whole seconds.
    if (
        seen is not None
        and seen.data["state"] != GONE
        and (cancelled_at is None or _ended_at(seen) < int(cancelled_at))
    ):
        cause, reason = _told_by_slurm(seen)
        return closed(attempt, cause, reason + _at_step(attempt), _ended_at(seen), confirmed=True)
    if cancelled_at is not None:
        at = max(last_end or (_ended_at(seen) if seen else 0.0), cancelled_at)
        return closed(attempt, "cancelled", "cancelled" + _at_step(attempt), at, confirmed=True)
    assert seen is not None
    reason = str(seen.data.get("reason", "")) + _at_step(attempt)
    return closed(attempt, "lost", reason, last_end or _ended_at(seen), confirmed=True)


def superseded(attempt: Attempt, events: Sequence[AnyEvent]) -> Attempt:
    """An attempt whose job Slurm has started again since, which it does of no job that a person cancelled.

    That alone confirms nothing: Slurm can still say why, a node's failure for one.
    """
    ends = [event for event in events if event.kind == "end"]
    back = requeue_of(events)
    if back is not None and attempt.cause != back.cause:
        return replace(_closed_by(back, attempt, back.at), excluded=back.excluded)
    if attempt.ended and not (attempt.cause == "cancelled" and ends and all(_is_asked(end) for end in ends)):
        return attempt
    at = max((event.time for event in events if event.source.startswith("attempts/")), default=0.0)
    if any(_is_asked(end) for end in ends):
        return closed(attempt, "preempted", in_words("PREEMPTED") + _at_step(attempt), at, confirmed=attempt.confirmed)
    said = "it ended without a word, and Slurm started it again"
    return closed(attempt, "lost", said + _at_step(attempt), at, confirmed=False)


def closed(attempt: Attempt, cause: str, reason: str, at: float, *, confirmed: bool) -> Attempt:
    """The attempt, ended for this cause."""
    state = STATE_OF_CAUSE.get(cause, "failed")
    return replace(attempt, state=state, cause=cause, reason=reason, ended_at=at or None, confirmed=confirmed)


def begin(attempt: Attempt) -> float:
    """From when on a person's cancel means this attempt."""
    return attempt.submitted_at or attempt.started_at or 0.0


def _put_back(
    attempt: Attempt, back: RequeueRecord, events: Sequence[AnyEvent], seen: AnyEvent | None, last_end: float
) -> Attempt:
    """The attempt whose job is to start again, without the nodes that its agent has named.

    No cancel of ours closes it: until Slurm says that the job is over, it may be in the queue. Somebody who has ended
    the job in Slurm wants it ended.
    """
    if seen is not None and CAUSE_OF_STATE.get(base(str(seen.data["state"]))) == "cancelled":
        cause, reason = _told_by_slurm(seen)
        return closed(attempt, cause, f"{reason}; before that, {back.reason}", _ended_at(seen), confirmed=True)
    ends = sorted((event for event in events if event.kind == "end"), key=_blame)
    failures = next((end.data["failures"] for end in ends if end.data.get("failures")), ())
    return replace(
        _closed_by(back, attempt, last_end),
        failures=tuple(failures),
        excluded=back.excluded,
        restarted_by=back.restarted_by,
        requeue_problem=back.problem,
    )


def _closed_by(back: RequeueRecord, attempt: Attempt, at: float) -> Attempt:
    reason = "; ".join(filter(None, (back.reason, back.given_up if back.cause == PREFLIGHT else "")))
    at_step = _at_step(attempt) if back.cause in _AT_A_STEP else ""
    return closed(attempt, back.cause, reason + at_step, at, confirmed=True)


def _told_by_node(attempt: Attempt, root: AnyEvent, seen: AnyEvent | None, last_end: float) -> Attempt:
    """The node that failed first has the reason, unless it only followed something that Slurm knows of."""
    cancelled = seen is not None and CAUSE_OF_STATE.get(base(str(seen.data["state"]))) == "cancelled"
    # Whoever cancels a job while it is being preempted wants it ended.
    overruled = cancelled and root.data.get("cause") in _AT_A_STEP
    follows = _is_asked(root) or bool(root.data.get("cascade", False)) or overruled
    told = replace(attempt, failures=tuple(root.data.get("failures", ())))
    if follows and seen is not None and seen.data["state"] != GONE:
        cause, reason = _told_by_slurm(seen)
        if cause in ("crash", "lost") and root.data.get("signal") == "SIGTERM":
            # Slurm ended it, but for no person, whose cancel it would name: it left within the grace of a preemption.
            cause, reason = "preempted", in_words("PREEMPTED")
        if cause not in ("crash", "lost"):  # exit codes, which the node itself knows better
            return closed(told, cause, reason + _at_step(attempt), last_end, confirmed=True)
    cause, reason = str(root.data.get("cause")), str(root.data.get("reason", ""))
    if root.data.get("sure", False):
        reason += _at_step(attempt)
    return closed(told, cause, reason, last_end, confirmed=seen is not None or not follows)


def _told_by_slurm(seen: AnyEvent) -> tuple[str, str]:
    """Cause and reason of what Slurm says, for an attempt that did not say more itself."""
    data, state = seen.data, base(str(seen.data["state"]))
    if state == "TIMEOUT" and _left_early(data):
        return "preempted", in_words("PREEMPTED")
    said = [in_words(state), str(data.get("reason") or "")]
    if state == "FAILED":
        how = f"signal {data['signal']}" if data.get("signal") else f"exit code {data.get('exit_code')}"
        said[0] = f"Slurm says FAILED with {how}"
    elif state == "COMPLETED":
        said[0] = "Slurm says that the job completed, but the job itself never did"
    elif state == "NODE_FAIL" and data.get("nodes"):
        said[0] = f"a node failed ({data['nodes']})"
    return CAUSE_OF_STATE[state], ": ".join(part for part in said if part)


def _left_early(data: Mapping[str, Any]) -> bool:
    limit, started, ended = data.get("time_limit_s"), data.get("started_at"), data.get("ended_at")
    return None not in (limit, started, ended) and ended - started + _LIMIT_MARGIN_S < limit  # type: ignore[operator]


def _last_word(events: Sequence[AnyEvent]) -> AnyEvent | None:
    """The last observation that the attempt is over; one of the scheduler's outranks that nothing is left of it."""
    final = [event for event in events if event.kind == "observed" and is_final(str(event.data.get("state")))]
    told = [event for event in final if event.data["state"] != GONE]
    return next(reversed(told or final), None)


def _is(seen: AnyEvent | None, state: str) -> bool:
    return seen is not None and base(str(seen.data["state"])) == state


def _is_asked(end: AnyEvent) -> bool:
    """Whether this node ended because of a signal, and does not know why."""
    return end.data.get("signal") is not None and not end.data.get("sure", False)


def _is_slurms(events: Sequence[AnyEvent]) -> bool:
    return any(event.kind == "agent" and event.data.get("executor") == "slurm" for event in events)


def _blame(end: AnyEvent) -> tuple[bool, bool, float]:
    """What failed first is to blame, but for what failed because something else had, or does not know why."""
    return (bool(end.data.get("cascade", False)), _is_asked(end), _when_failed(end))


def _when_failed(end: AnyEvent) -> float:
    return float(end.data.get("failed_at") or end.time)


def _ended_at(seen: AnyEvent) -> float:
    return float(seen.data.get("ended_at") or seen.data.get("last_seen") or seen.time)


def _at_step(attempt: Attempt) -> str:
    return f" after step {attempt.last_step}" if attempt.last_step is not None else ""
