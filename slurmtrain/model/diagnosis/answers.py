"""Why a run is in its state, in one sentence, with what is known beside it and what to do. Pure.

The input is RUN of the JSON contract, which lists, the live page and Python have. Times are in ISO 8601, which whoever
prints a sentence replaces by local ones. What Slurm says about a job that waits is asked elsewhere.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from slurmtrain.model.diagnosis.hang import LEAST_S, TIMES
from slurmtrain.model.hostlist import name_some
from slurmtrain.model.interruption.outlook import format_span
from slurmtrain.model.query.fields import iso
from slurmtrain.model.run.job_state import bare_reason
from slurmtrain.model.run.run import APART, Attempt

# Busy for less than this share of the time, in percent, GPUs idle; processors that are busier may be why.
IDLE_GPU = 10.0
_BUSY_CPU = 90.0
# Saves that take a larger share of the time of training are slow.
_SLOW_SAVES = 0.1


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
    ``limit_at``: when it reaches its time limit. ``gpus``: how busy each GPU was lately, by node and number; ``cpus``:
    each node's processors.
    """

    last_step_at: float | None = None
    widest_gap_s: float | None = None
    limit_at: float | None = None
    gpus: Mapping[str, float] | None = None
    cpus: Mapping[str, float] | None = None


def waiting(run: Mapping[str, Any]) -> StateAnswer:
    """Why a run waits: for its job to start, for other runs, or for somebody to start it again.

    Args:
        run: RUN of the JSON contract.
    """
    if run["state"] == "created":
        reason = run["reason"] or "it was not handed to the scheduler yet"
        return StateAnswer(headline=f"it has no job: {reason}", advice=["`slurmtrain sync` submits what is missing"])
    reason = run["reason"] or "nothing says for what"
    if run["state"] == "requeued":
        return StateAnswer(headline=f"it was interrupted, and waits to go on: {reason}")
    if reason.startswith("cannot start"):
        return StateAnswer(headline=f"it {reason}", advice=[f"`slurmtrain cancel {run['id']}` ends it"])
    # Some of Slurm's reasons are sentences. Chains say "after pretrain (running, step 120)", local runs "waits ...".
    own = {"it ": "", "waits ": "it ", "after ": "it starts "}
    subject = next((words for beginning, words in own.items() if reason.startswith(beginning)), "it waits: ")
    return StateAnswer(headline=f"{subject}{reason}")


def running(
    run: Mapping[str, Any], attempt: Attempt, activity: Activity, now: float, stopping: str = ""
) -> StateAnswer:
    """What a run is doing, and what is wrong with it.

    Args:
        run: RUN of the JSON contract.
        attempt: Its newest attempt.
        activity: What its files show.
        now: The current time, in seconds since 1970.
        stopping: Why its ranks were told to stop; empty: they were not.
    """
    if stopping:
        return StateAnswer(headline=f"it is ending, and its ranks save and exit: {stopping}")
    advice: list[str] = []
    # What keeps it from training comes first; of what makes it slow, the worst is worth the sentence.
    stops = [*_stops(run, activity, now, advice)]
    problems = [*_problems(run, attempt, activity, now, advice)]
    progress = _progress(run, attempt, now)
    sentence = [*stops, progress.removeprefix("trains: ") if stops else f"it {progress}", *problems][:2]
    details = [*[*stops, *problems][1:], _saved(run, attempt, now), *_times(run, attempt), *_nodes(attempt, activity)]
    return StateAnswer(headline="; ".join(sentence), details=[each for each in details if each], advice=advice)


def ended(run: Mapping[str, Any], attempts: Sequence[Attempt], canceller: str = "") -> StateAnswer:
    """How a run ended that did not fail.

    Args:
        run: RUN of the JSON contract.
        attempts: All of its attempts, the oldest first.
        canceller: Who cancelled its job in Slurm; empty: unknown, or nobody.
    """
    steps = "" if run["step"] is None else f"{run['step']} step{'s' * (run['step'] != 1)}"
    if run["deleted_at"] is not None:
        return StateAnswer(headline=f"it is {run['state']}, and {run['reason']}")
    if run["state"] == "completed":
        took = ""
        if run["started_at"] and run["ended_at"]:
            begin, end = (datetime.fromisoformat(run[name]).timestamp() for name in ("started_at", "ended_at"))
            took = f"in {format_span(max(0.0, end - begin))}"
        completed = " ".join(filter(None, ("it completed", steps, took)))
        lost = f"{run['lost_steps']} steps trained twice" if run["lost_steps"] else ""
        apart = str(attempts[-1].evidence.get(APART) or "") if attempts else ""
        causes = Counter(attempt.cause for attempt in attempts[:-1] if attempt.cause not in (None, "completed"))
        counted = ", ".join(f"{count} {cause}" for cause, count in causes.items())
        interruptions = f"{len(attempts)} attempts ({counted})" if causes else ""
        headline = ", ".join(filter(None, (completed, interruptions, lost)))
        return StateAnswer(headline=headline, advice=[apart] if apart else [])
    if run["state"] == "cancelled":
        # As in "cancelled after step 7", "cancelled in Slurm"; a search says why it ended the run.
        reason = str(run["reason"])
        where = reason.removeprefix("cancelled") if reason.startswith("cancelled") else f": {reason}" if reason else ""
        by = f" by {canceller}" if canceller else ""
        at = f", {run['ended_at']}" if run["ended_at"] else ""
        newest = run["checkpoint"]
        saved = "it has no checkpoint" if newest is None else f"its newest checkpoint has step {newest['step']}"
        again = f"`slurmtrain resume {run['id']}{' --from-start' * (newest is None)}` starts it again"
        return StateAnswer(headline=f"it was cancelled{where}{by}{at}; {saved}", advice=[again])
    return StateAnswer(headline=run["reason"] or f"it is {run['state']}")


def _progress(run: Mapping[str, Any], attempt: Attempt, now: float) -> str:
    """How far it is, and how long it takes yet."""
    if run["step"] is None or (attempt.last_step is None and not run["steps_per_second"]):
        since = "" if attempt.started_at is None else f" for {format_span(max(0.0, now - attempt.started_at))}"
        return f"has been running{since}, and no step was logged" + (f"; {run['reason']}" if run["reason"] else "")
    total = run["total_steps"]
    step = f"step {run['step']}" + (f" of {total} ({100 * run['step'] / total:.0f} %)" if total else "")
    rate = f", {run['steps_per_second']:.3g} steps/s" if run["steps_per_second"] else ""
    to_go = f", {format_span(run['eta_seconds'])} to go" if run["eta_seconds"] else ""
    return f"trains: {step}{rate}{to_go}"


def _stops(run: Mapping[str, Any], activity: Activity, now: float, advice: list[str]) -> Iterator[str]:
    """Why a run does not train, or not as it should; appends what to do to ``advice``."""
    if run["reason"] and run["step"] is not None and not _is_growth(run["reason"]):
        yield run["reason"]
    if run["idle"] is not None:
        logs = f"`slurmtrain logs {run['id']}` shows its output"
        advice.append(f"{logs}; with 'idle_after: 30m' in the spec, `watch` ends such a run")
    at, gap_s = activity.last_step_at, activity.widest_gap_s
    is_paused = run["reason"].startswith("paused")
    if at is not None and gap_s is not None and not is_paused and now - at > max(LEAST_S, TIMES * gap_s):
        advice.append(f"`slurmtrain logs {run['id']}` shows what its ranks print; requeue.hang_after limits a step")
        yield f"no step was finished for {format_span(now - at)}, so that it may hang"


def _is_growth(reason: str) -> bool:
    """Whether a run trains, and a second job waits for more nodes."""
    return reason.startswith("job ") and "more node" in reason


def _problems(
    run: Mapping[str, Any], attempt: Attempt, activity: Activity, now: float, advice: list[str]
) -> Iterator[str]:
    """What makes a run slow or ends it early, the worst first; appends what to do to ``advice``."""
    limit_at = activity.limit_at
    if limit_at is not None and run["eta_seconds"] and now + run["eta_seconds"] > limit_at:
        is_requeued = attempt.policy is not None and attempt.policy.get("enabled", True)
        then = "is then requeued, and goes on from its checkpoint" if is_requeued else "ends there (requeue.enabled)"
        if not is_requeued:
            advice.append(f"`slurmtrain resume {run['id']} resources.time=...` continues it with a longer limit")
        yield f"it reaches its time limit in {format_span(max(0.0, limit_at - now))}, and {then}"
    idle = {name: use for name, use in (activity.gpus or {}).items() if use < IDLE_GPU}
    # For long: then that is the reason already.
    if idle and run["step"] is not None and run["idle"] is None:
        verb = "is" if len(idle) == 1 else "are"
        are = f"{len(idle)} of {len(activity.gpus or ())} GPUs {verb} idle"
        cpus = max((activity.cpus or {}).values(), default=0.0)
        if cpus > _BUSY_CPU:
            advice.append("raise resources.cpus_per_proc, or do less per sample in the data loader")
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
    if run["goodput"] is not None and run["step"]:
        spent = [f"{kind} {format_span(seconds)}" for kind, seconds in attempt.spent.items() if seconds >= 1]
        yield f"goodput {100 * run['goodput']:.0f} %" + (f": {', '.join(spent)}" if spent else "")
    if _is_growth(run["reason"]):
        yield run["reason"]
    if attempt.hangs:
        times = "once" if len(attempt.hangs) == 1 else f"{len(attempt.hangs)} times"
        yield f"its ranks hung {times} in this attempt, and were started again"


def _nodes(attempt: Attempt, activity: Activity) -> Iterator[str]:
    use = [f"{kind} {sum(each.values()) / len(each):.0f} % busy" for kind, each in
           (("GPUs", activity.gpus), ("processors", activity.cpus)) if each]  # fmt: skip
    on = f"attempt {attempt.number} on {name_some(attempt.nodes, 4)}"
    yield on + (f": {', '.join(use)}" if use else "")


# A start is sooner if it is by more than this.
_MARGIN_S = 60.0
# Reasons for which a change of the request may help: others wait for a job, a person or a time.
ALTERABLE = frozenset(
    {
        "", "None", "Resources", "Priority", "ReqNodeNotAvail", "NodeDown", "PartitionDown", "PartitionInactive",
        "PartitionNodeLimit", "PartitionTimeLimit", "BadConstraints",
    }
)  # fmt: skip
IN_LINE = frozenset({"", "None", "Resources", "Priority"})
"""Reasons of jobs that Slurm starts as soon as it is their turn and there are nodes for them."""
_DEPENDENCY = re.compile(r"(after\w*):(\d+(?:_\d+)?)")
_ENDS = {"after": "the start", "afterok": "the success", "afterany": "the end", "afternotok": "the failure"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """The same job with one option changed, as Slurm would start it.

    Attributes:
        words: What is changed: ``on 2 nodes``.
        override: How a spec says it: ``resources.nodes=2``.
        partition: The other partition; empty: the job's own.
        starts_at: When it would start, in seconds since 1970.
        preempts: The ids of jobs that it would preempt.
    """

    words: str
    override: str
    starts_at: float
    partition: str = ""
    preempts: Sequence[str] = ()

    def to_dict(self) -> dict[str, Any]:
        """This as JSON."""
        return {"change": self.override, "starts_at": iso(self.starts_at), "preempts": list(self.preempts)}


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueFacts:
    """What Slurm says about a job that waits, beside its reason.

    Attributes:
        job_id: Its id.
        record: Fields of its record.
        ahead: How many waiting jobs Slurm tries to start before it on the same nodes; None: unknown.
        waiting: How many would be before it in another partition, by the partition's name.
        unchanged_at: When Slurm would start the same job anew, in seconds since 1970, if it has no estimate for it.
        alternatives: What Slurm would do with other requests.
        notes: What else is known about its reason, as sentences.
        unanswered: Why Slurm did not answer a question; empty if it did.
    """

    job_id: str
    record: Mapping[str, str] = field(default_factory=dict)
    ahead: int | None = None
    waiting: Mapping[str, int] = field(default_factory=dict)
    unchanged_at: float | None = None
    alternatives: Sequence[Alternative] = ()
    notes: Sequence[str] = ()
    unanswered: str = ""


def describe_queue(facts: QueueFacts, code: str, waits_s: float | None, names: Mapping[str, str]) -> Iterator[str]:
    """What is known about a waiting job beside its reason, as sentences.

    Args:
        facts: From Slurm.
        code: The reason.
        waits_s: Since when it waits, in seconds.
        names: Of the user's own jobs, by id.
    """
    record = facts.record
    if record:
        # "4-4" is 4.
        values = {name: re.sub(r"^(\d+)-\1$", r"\1", record[key]) for name, key in _REQUESTED if key in record}
        asks = [f"{name} {value}" for name, value in values.items()]
        since = "" if waits_s is None else f", for {format_span(waits_s)} now"
        yield f"job {facts.job_id} waits in partition {record.get('Partition')}{since}: {', '.join(asks)}"
    if facts.ahead is not None and bare_reason(code) in IN_LINE:
        jobs = f"{facts.ahead or 'no'} other job{' waits' if facts.ahead <= 1 else 's wait'}"
        yield f"{jobs} before it for the same nodes"
    for condition, job in _DEPENDENCY.findall(record.get("Dependency", "")):
        yield f"it waits for {_ENDS.get(condition, condition)} of job {_named(job, names)}"
    yield from facts.notes


def _named(job: str, names: Mapping[str, str]) -> str:
    return f"{job} ({names[job]})" if job in names else job


_REQUESTED = (("nodes", "NumNodes"), ("CPUs", "NumCPUs"), ("time limit", "TimeLimit"), ("account", "Account"),
          ("QOS", "QOS"))  # fmt: skip


def sooner(facts: QueueFacts, code: str, starts_at: float | None, now: float) -> list[Alternative]:
    """The alternatives that would really start sooner, the soonest first.

    Slurm's answers leave out the jobs that wait before a new one: where some do, they promise too much.

    Args:
        facts: From Slurm.
        code: The reason why the job waits.
        starts_at: When Slurm expects to start it, in seconds since 1970; None: it does not say.
        now: The current time, in seconds since 1970.
    """
    expected = starts_at if starts_at is not None and starts_at > now else facts.unchanged_at
    first_in_line = bare_reason(code) != "Priority" and not facts.ahead
    chosen = [
        each
        for each in facts.alternatives
        if (expected is None or each.starts_at + _MARGIN_S < expected)
        and (not facts.waiting.get(each.partition, 0) if each.partition else first_in_line)
    ]
    return sorted(chosen, key=lambda each: (each.starts_at // _MARGIN_S, len(each.preempts)))


def describe_alternative(alternative: Alternative, now: float, names: Mapping[str, str]) -> str:
    """When it would start, as a sentence.

    Args:
        alternative: A request.
        now: The current time, in seconds since 1970.
        names: Of the user's own jobs, by id.
    """
    at = "now" if alternative.starts_at <= now + _MARGIN_S else f"{iso(alternative.starts_at)}"
    victims = [_named(job, names) for job in alternative.preempts]
    preempting = f", preempting job{'s' * (len(victims) > 1)} {name_some(victims)}" if victims else ""
    return f"{alternative.words} it would start {at}{preempting}"
