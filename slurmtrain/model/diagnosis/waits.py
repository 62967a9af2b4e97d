"""Why a job waits in Slurm's queue, and what would start sooner, in words. Pure: what Slurm says is asked elsewhere."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from slurmtrain.model.hostlist import name_some
from slurmtrain.model.interruption.outlook import format_span
from slurmtrain.model.query.fields import iso
from slurmtrain.model.run.job_state import bare_reason

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
