"""Why a run is in its state, in one sentence, with what is known beside it and what to do. Pure.

The input is RUN of the JSON contract, which lists, the live page and Python have. Times are in ISO 8601, which whoever
prints a sentence replaces by local ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from slurmtrain.model.diagnosis.hang import LEAST_S, TIMES
from slurmtrain.model.hostlist import name_some
from slurmtrain.model.interruption.outlook import format_span
from slurmtrain.model.run.job_state import HELD, HELD_BY_USER, bare_reason
from slurmtrain.model.run.run import APART, Attempt

# Busy for less than this share of the time, in percent, GPUs idle; processors that are busier may be why.
IDLE_GPU = 10.0
_BUSY_CPU = 90.0
# Saves that take a larger share of the time of training are slow.
_SLOW_SAVES = 0.1
# A run that has not finished a step for this long after its start is worth a word.
_LONG_START_S = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StateAnswer:
    """Why a run is in its state.

    ``headline``: in one sentence, without a full stop. ``details``: what is known beside it. ``advice``: what to do.
    """

    headline: str
    details: Sequence[str] = ()
    advice: Sequence[str] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Activity:
    """What the files of a run show while it trains. Times are in seconds since 1970, use is in percent.

    ``last_step_at``: when a step was last logged. ``widest_gap_s``: the longest time between two of the last steps.
    ``gpus``: how busy each GPU was lately, by node and number; ``cpus``: each node's processors.
    """

    last_step_at: float | None = None
    widest_gap_s: float | None = None
    gpus: Mapping[str, float] | None = None
    cpus: Mapping[str, float] | None = None


def waiting(run: Mapping[str, Any]) -> StateAnswer:
    """Why a run waits: for its job to start, for other runs, or for somebody to start it again.

    Args:
        run: RUN of the JSON contract.
    """
    if run["state"] == "created":
        return StateAnswer(
            headline=f"it has no job: {run['reason']}", advice=["`slurmtrain sync` submits what is missing"]
        )
    pending = run["pending"] or {}
    reason = run["reason"]
    if run["state"] == "requeued":
        return StateAnswer(headline=f"it was interrupted, and waits to go on: {reason}")
    if reason.startswith("cannot start"):
        return StateAnswer(headline=f"it {reason}", advice=[f"`slurmtrain cancel {run['id']}` ends it"])
    # What a chain says of the runs before one: "after pretrain (running, step 120)".
    headline = (
        f"it starts {reason}" if reason.startswith("after ") else f"it waits: {reason or 'nothing says for what'}"
    )
    if bare_reason(pending.get("code", "")) in HELD_BY_USER or pending.get("state") in HELD:
        return StateAnswer(headline=headline, advice=[f"`scontrol release {run['job_id']}` lets it start"])
    return StateAnswer(headline=headline)


def running(
    run: Mapping[str, Any], attempt: Attempt, activity: Activity, now: float, *, cancelled: bool
) -> StateAnswer:
    """What a run is doing, and what is wrong with it.

    Args:
        run: RUN of the JSON contract.
        attempt: Its newest attempt.
        activity: What its files show.
        now: The current time, in seconds since 1970.
        cancelled: Whether a person has asked it to end.
    """
    if cancelled:
        return StateAnswer(headline="it was cancelled, and is ending: its ranks save, and exit")
    advice: list[str] = []
    progress = _progress(run, attempt, now)
    problems = [*_problems(run, attempt, activity, now, advice)]
    headline = "; ".join([*problems[:1], progress] if problems else [progress])
    saved = _saved(run, attempt, now)
    details = [*problems[1:], saved, *_times(run, attempt), *_nodes(attempt, activity)]
    return StateAnswer(headline=headline, details=[each for each in details if each], advice=advice)


def ended(run: Mapping[str, Any], attempts: Sequence[Attempt]) -> StateAnswer:
    """How a run ended that did not fail.

    Args:
        run: RUN of the JSON contract.
        attempts: All of its attempts, the oldest first.
    """
    took = _took(run)
    steps = "" if run["step"] is None else f"{run['step']} step{'s' * (run['step'] != 1)}"
    if run["deleted_at"] is not None:
        return StateAnswer(headline=f"it is {run['state']}, and {run['reason']}")
    if run["state"] == "completed":
        did = " ".join(filter(None, (steps, took and f"in {took}")))
        parts = [f"it completed{': ' * bool(did)}{did}", *_interruptions(attempts), _lost(run)]
        return StateAnswer(headline=", ".join(filter(None, parts)), advice=_not_together(attempts))
    if run["state"] == "cancelled":
        at = f" at {run['ended_at']}" if run["ended_at"] else ""
        reason = "" if run["reason"] in ("", "cancelled") else f": {run['reason']}"
        newest = run["checkpoint"]
        saved = "without a checkpoint" if newest is None else f"its newest checkpoint has step {newest['step']}"
        again = f"`slurmtrain resume {run['id']}{' --from-start' * (newest is None)}` starts it again"
        return StateAnswer(headline=f"it was cancelled{at}{reason}; {saved}", advice=[again])
    return StateAnswer(headline=run["reason"] or f"it is {run['state']}")


def expected_limit(run: Mapping[str, Any], attempt: Attempt) -> float | None:
    """When a running attempt reaches its time limit, in seconds since 1970; None if its spec sets none.

    Args:
        run: RUN of the JSON contract.
        attempt: The attempt.
    """
    limit_s = run["resources"].get("time")
    if attempt.started_at is None or not isinstance(limit_s, int | float) or limit_s <= 0:
        return None
    return attempt.started_at + float(limit_s)


def _progress(run: Mapping[str, Any], attempt: Attempt, now: float) -> str:
    """How far it is, and how long it takes yet."""
    if run["step"] is None or (attempt.last_step is None and not run["steps_per_second"]):
        since = "" if attempt.started_at is None else f" for {format_span(max(0.0, now - attempt.started_at))}"
        return f"it has been running{since}, and no step was logged" + (f"; {run['reason']}" if run["reason"] else "")
    total = run["total_steps"]
    step = f"step {run['step']}" + (f" of {total} ({100 * run['step'] / total:.0f} %)" if total else "")
    rate = f", {run['steps_per_second']:.3g} steps/s" if run["steps_per_second"] else ""
    to_go = f", {format_span(run['eta_seconds'])} to go" if run["eta_seconds"] else ""
    return f"it trains: {step}{rate}{to_go}"


def _problems(
    run: Mapping[str, Any], attempt: Attempt, activity: Activity, now: float, advice: list[str]
) -> Iterator[str]:
    """What is wrong with a run that trains, the worst first; appends what to do to ``advice``."""
    if run["reason"] and run["step"] is not None:
        yield run["reason"]
    at, gap_s = activity.last_step_at, activity.widest_gap_s
    if at is not None and gap_s is not None and now - at > max(LEAST_S, TIMES * gap_s):
        advice.append(f"`slurmtrain logs {run['id']}` shows what its ranks print; requeue.hang_after limits a step")
        yield f"no step was finished for {format_span(now - at)}: it may hang"
    limit_at = expected_limit(run, attempt)
    if limit_at is not None and run["eta_seconds"] and now + run["eta_seconds"] > limit_at:
        is_requeued = attempt.policy is not None and attempt.policy.get("enabled", True)
        then = "is then requeued, and goes on from its checkpoint" if is_requeued else "ends there (requeue.enabled)"
        if not is_requeued:
            advice.append(f"`slurmtrain resume {run['id']} resources.time=...` continues it with a longer limit")
        yield f"it reaches its time limit in {format_span(max(0.0, limit_at - now))}, before its last step, and {then}"
    idle = {name: use for name, use in (activity.gpus or {}).items() if use < IDLE_GPU}
    if idle and run["step"] is not None:
        are = f"{len(idle)} of {len(activity.gpus or ())} GPUs are idle"
        cpus = max((activity.cpus or {}).values(), default=0.0)
        if cpus > _BUSY_CPU:
            advice.append("raise resources.cpus_per_node, or do less per sample in the data loader")
            are += f" while processors are {cpus:.0f} % busy, so that the data loader may be too slow"
        yield f"{are} (at least {min(idle.values()):.0f} % busy: {name_some(list(idle))})"
    for straggler in attempt.stragglers[-1:]:
        slow = f"{straggler.get('ratio') or 0:.3g} times as slow as others"
        yield f"rank {straggler.get('rank')} on {straggler.get('host')} is {slow}"
    stall, train = (attempt.spent.get(kind, 0.0) for kind in ("stall", "train"))
    if stall > _SLOW_SAVES * (stall + train):
        advice.append("checkpoint.every sets how often it saves")
        yield f"training waits for saves for {100 * stall / (stall + train):.0f} % of its time"


def _saved(run: Mapping[str, Any], attempt: Attempt, now: float) -> str:
    newest = run["checkpoint"]
    if newest is None:
        return "no checkpoint yet: an interruption now would cost all of its work" if run["step"] else ""
    age = f"{format_span(max(0.0, now - datetime.fromisoformat(newest['saved_at']).timestamp()))} ago"
    behind = (run["step"] or 0) - (newest["step"] or 0) if newest["step"] is not None else 0
    lost = f"; {behind} steps since then" if behind > 0 else ""
    every = attempt.interval.get("seconds")
    return f"last save: step {newest['step']}, {age}{lost}" + (f"; it saves every {every:.0f} s" if every else "")


def _times(run: Mapping[str, Any], attempt: Attempt) -> Iterator[str]:
    if run["goodput"] is not None:
        spent = [f"{kind} {format_span(seconds)}" for kind, seconds in attempt.spent.items() if seconds >= 1]
        yield f"goodput {100 * run['goodput']:.0f} %" + (f": {', '.join(spent)}" if spent else "")
    if attempt.hangs:
        yield f"its ranks hung {len(attempt.hangs)} times in this attempt, and were started again"


def _nodes(attempt: Attempt, activity: Activity) -> Iterator[str]:
    use = [f"{kind} {sum(each.values()) / len(each):.0f} % busy" for kind, each in
           (("GPUs", activity.gpus), ("processors", activity.cpus)) if each]  # fmt: skip
    on = f"attempt {attempt.number} on {name_some(attempt.nodes, 4)}"
    yield on + (f": {', '.join(use)}" if use else "")


def _took(run: Mapping[str, Any]) -> str:
    if not (run["started_at"] and run["ended_at"]):
        return ""
    begin, end = (datetime.fromisoformat(run[name]).timestamp() for name in ("started_at", "ended_at"))
    return format_span(max(0.0, end - begin))


def _interruptions(attempts: Sequence[Attempt]) -> Iterator[str]:
    causes = Counter(attempt.cause for attempt in attempts[:-1] if attempt.cause not in (None, "completed"))
    if causes:
        yield f"{len(attempts)} attempts ({', '.join(f'{count} {cause}' for cause, count in causes.items())})"


def _lost(run: Mapping[str, Any]) -> str:
    return f"{run['lost_steps']} steps trained twice" if run["lost_steps"] else ""


def _not_together(attempts: Sequence[Attempt]) -> list[str]:
    apart = str(attempts[-1].evidence.get(APART) or "") if attempts else ""
    return [apart] if apart else []
