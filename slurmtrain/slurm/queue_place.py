"""What Slurm says about one waiting job, and when it would start variants of it, within a few seconds.

``sbatch --test-only`` says when a job would start beside those that run, and submits none. It adds the time that
the waiting jobs of the partition with no lower priority would take, one after the other, on all of its CPUs, whether or
not they can run (_delayed_job_start_time in slurmctld/job_scheduler.c). It is taken off here: this job is one of them.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace

from slurmtrain.errors import SlurmDown
from slurmtrain.model.diagnosis.answers import ALTERABLE, IN_LINE, Alternative, QueueFacts
from slurmtrain.model.hostlist import expand_hostlist
from slurmtrain.model.run.job_state import bare_reason
from slurmtrain.slurm.parse import read_duration, read_job, read_partitions
from slurmtrain.slurm.slurm_commands import command_environment, run_command

Partitions = Mapping[str, Mapping[str, str]]
# "sbatch: Job 4 to start at 1795941430 using 32 processors on nodes ...", and a line with the jobs that it preempts.
_START = re.compile(r"to start at (\d+) using")
_PREEMPTS = re.compile(r"Preempts:\s*(\S+)")
# Options that say when a job may start, not on what.
_NOT_ASKED = re.compile(r"#SBATCH --(array|begin|dependency|hold)\b")
# In the first line of the record, before its name.
_AT_ONCE = re.compile(r"^JobId=.*? ArrayTaskThrottle=(\d+) ")
# In the record of a job: ReqNodeNotAvail,_UnavailableNodes:node[1-2]
_UNAVAILABLE = re.compile(r"UnavailableNodes:(\S+)")
# Each question with --test-only has slurmctld plan a job.
_MOST_VARIANTS = 4
_MOST_PARTITIONS = 2
_LEAST_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A request with one change: in ``words``, as a spec says it, as an ``option`` of sbatch; all empty: unchanged.

    ``dropped``: the option that it leaves out. ``partition``: the other one, if it is in another.
    """

    words: str = ""
    override: str = ""
    option: str = ""
    dropped: str = ""
    partition: str = ""


def ask_queue(job_id: str, code: str, script: str, starts_at: float | None, patience_s: float) -> QueueFacts:
    """Ask Slurm about a waiting job. Never raises: the result says what has no answer.

    Args:
        job_id: The job.
        code: The reason why it waits.
        script: Its batch script; empty: what would start sooner is not asked.
        starts_at: When Slurm expects to start it, in seconds since 1970; None: it does not say.
        patience_s: How many seconds all answers may take.
    """
    with ThreadPoolExecutor(_MOST_VARIANTS) as pool:
        questions = _Questions(pool, time.monotonic() + patience_s)
        reason = bare_reason(code)
        about = questions.ask("scontrol", "show", "job", job_id)
        queue = questions.ask("squeue", "--noheader", "--states=PENDING", _PENDING_FORMAT)
        shown = questions.ask("scontrol", "--oneliner", "show", "partition")
        idle = questions.ask("sinfo", "--noheader", "--states=idle", "--format=%R|%D")
        try:
            record = read_job(about.result())
            partitions = read_partitions(shown.result())
            line = _Line(job_id, int(record.get("Priority") or 0), _read_pending(queue.result()), partitions)
        except SlurmDown as error:
            return QueueFacts(job_id=job_id, unanswered=str(error))
        own = record.get("Partition", "").split(",")
        facts = QueueFacts(
            job_id=job_id,
            record=record,
            ahead=min((line.before(name) for name in own if name in partitions), default=None),
            waiting={name: line.before(name) for name in partitions},
            notes=[*questions.notes(about.result(), record, reason, partitions)],
        )
        if not script or reason not in ALTERABLE:
            return facts
        with suppress(SlurmDown):
            rows = (row.partition("|") for row in idle.result().splitlines())
            idle_nodes = {name: int(count) for name, _, count in rows if count.isdecimal()}
            variants = [*_variants(facts, reason, partitions, idle_nodes.get(own[0], 0))]
            if starts_at is None and reason in IN_LINE:
                # Without any change it starts some time, though Slurm has not said when.
                variants.insert(0, Variant())
            facts = questions.with_alternatives(facts, script, variants[:_MOST_VARIANTS], line)
        return facts


# PriorityType=priority/basic counts down from 0xffff0000: a new job is the last.
_BASIC = 0xF0000000
# Of each job that waits: its id, priority, nodes, CPUs, time limit, partitions, and why it waits.
_PENDING_FORMAT = "--format=%i|%Q|%D|%C|%l|%P|%r"


@dataclass(frozen=True, slots=True)
class _Pending:
    """A job that waits. ``nodes`` and ``cpus``: the least that it asks for."""

    id: str
    priority: int
    nodes: int
    cpus: int
    limit_s: float
    partitions: Sequence[str]
    reason: str


def _read_pending(text: str) -> list[_Pending]:
    jobs = []
    for row in text.splitlines():
        cells = row.split("|", 6)
        # As in "2-4".
        numbers = [int(number[0]) for cell in cells[1:4] if (number := re.match(r"\d+", cell))]
        if len(cells) == 7 and len(numbers) == 3:
            priority, nodes, cpus = numbers
            limit_s = read_duration(cells[4]) or 0.0
            jobs.append(_Pending(cells[0], priority, nodes, cpus, limit_s, cells[5].split(","), bare_reason(cells[6])))
    return jobs


class _Line:
    """The jobs that wait for the nodes of a job's partition, or of others."""

    def __init__(self, job_id: str, priority: int, pending: Sequence[_Pending], partitions: Partitions) -> None:
        self._id = _number_of(job_id)
        self._priority = priority
        self._pending = pending
        self.partitions = partitions
        self._nodes = dict.fromkeys(partitions, frozenset[str]())
        for name, fields in partitions.items():
            with suppress(ValueError):
                self._nodes[name] = frozenset(expand_hostlist(fields.get("Nodes", "")))

    def before(self, name: str) -> int:
        """How many jobs Slurm tries to start before it on the nodes of a partition.

        It goes through all of them by the tiers of their partitions, and then by their priorities.
        """
        count = 0
        for job in self._pending:
            if _number_of(job.id) == self._id or job.reason not in IN_LINE:
                continue
            # Of equal ones, the one that was submitted first.
            is_earlier = (-job.priority, _number_of(job.id)) < (-self._priority, self._id)
            theirs = [each for each in job.partitions if self._nodes.get(each, frozenset()) & self._nodes[name]]
            tiers = [_tier(self.partitions[each]) - _tier(self.partitions[name]) for each in theirs]
            count += any(tier > 0 or (tier == 0 and is_earlier) for tier in tiers)
        return count

    def added_s(self, name: str) -> float:
        """How many seconds Slurm adds to the start of a new job in a partition, since others wait."""
        fields = self.partitions.get(name, {})
        cpus, nodes = (int(fields.get(key) or 0) for key in ("TotalCPUs", "TotalNodes"))
        if not cpus or not nodes:
            return 0.0
        each = max(1, cpus // nodes)
        least = 1 if self._priority > _BASIC else self._priority
        others = [job for job in self._pending if name in job.partitions and job.priority >= least]
        return sum(max(job.cpus, job.nodes * each) * (job.limit_s // 60) for job in others) // cpus * 60


class _Questions:
    """Questions to Slurm's commands, asked at the same time."""

    def __init__(self, pool: ThreadPoolExecutor, until: float) -> None:
        """``until``: when all answers must be there, on the monotonic clock."""
        self._pool = pool
        self._until = until

    def ask(self, *command: str, stdin: str = "", environ: Mapping[str, str] | None = None) -> Future[str]:
        """All that a command prints, once it has; the result raises SlurmDown."""
        left = max(_LEAST_S, self._until - time.monotonic())
        return self._pool.submit(
            run_command, *command, stdin=stdin, timeout_s=left, environ=environ, errors_too=True
        )  # fmt: skip

    def notes(self, about: str, record: Mapping[str, str], reason: str, partitions: Partitions) -> Iterator[str]:
        """What a job waits for exactly, as sentences.

        Args:
            about: What scontrol prints about it.
            record: The fields of that.
            reason: The code of its reason.
            partitions: The fields of each partition.
        """
        key, words = _PARTITION_LIMITS.get(reason, ("", ""))
        for name in record.get("Partition", "").split(",") if key else ():
            if value := partitions.get(name, {}).get(key):
                yield f"partition {name} {words.format(value)}"
        if reason == "JobArrayTaskLimit" and (most := _AT_ONCE.search(about)):
            yield f"of its array, at most {most[1]} run at once (sweep.parallel)"
        with suppress(SlurmDown):
            if reason in ("ReqNodeNotAvail", "NodeDown"):
                unavailable = _UNAVAILABLE.search(record.get("Reason", ""))
                nodes = unavailable[1] if unavailable else record.get("ReqNodeList", "")
                if nodes:
                    yield from describe_nodes(self.ask("scontrol", "--oneliner", "show", "node", nodes).result())
            if reason.startswith(("QOS", "Assoc")):
                names = ("assoc", "accounts", "Account") if reason.startswith("Assoc") else ("qos", "qos", "QOS")
                flag, filtered, key = names
                question = ("scontrol", "show", "assoc_mgr", f"flags={flag}", f"{filtered}={record.get(key, '')}")
                limits = self.ask(*question).result()
                yield from describe_limits(limits, reason, record.get("UserId", ""))

    def with_alternatives(self, facts: QueueFacts, script: str, variants: Sequence[Variant], line: _Line) -> QueueFacts:
        """The facts, with when each of these ``variants`` of the job of a batch ``script`` would start."""
        lines = [
            line for line in script.splitlines() if line.startswith(("#!", "#SBATCH")) and not _NOT_ASKED.match(line)
        ]
        # What the job has outranks the script, and the variables of the shell that asks.
        environ = {name: value for name, value in command_environment().items() if not name.startswith("SBATCH_")}
        named = [
            f"--{key.lower()}={facts.record[key]}" for key in ("Partition", "Account", "QOS") if key in facts.record
        ]
        command = ("sbatch", "--test-only", *named)
        answers = []
        for each in variants:
            kept = [line for line in lines if not each.dropped or not line.startswith(f"#SBATCH --{each.dropped}")]
            stdin = "\n".join([*kept, "true", ""])
            answers.append(self.ask(*command, *filter(None, (each.option,)), stdin=stdin, environ=environ))
        alternatives, unchanged_at, now = [], None, time.time()
        for variant, answer in zip(variants, answers, strict=True):
            # Refused: no such job can be submitted.
            with suppress(SlurmDown):
                text = answer.result()
                start, preempts = _START.search(text), _PREEMPTS.search(text)
                if start is None:
                    continue
                own = facts.record.get("Partition", "").partition(",")[0]
                starts_at = max(now, float(start[1]) - line.added_s(variant.partition or own))
                if not variant.words:
                    unchanged_at = starts_at
                    continue
                alternatives.append(
                    Alternative(
                        words=variant.words,
                        override=variant.override,
                        partition=variant.partition,
                        starts_at=starts_at,
                        preempts=preempts[1].split(",") if preempts else (),
                    )
                )
        return replace(facts, alternatives=alternatives, unchanged_at=unchanged_at)


def _variants(facts: QueueFacts, reason: str, partitions: Partitions, idle: int) -> Iterator[Variant]:
    """What to change in a request that waits for a ``reason``; ``idle``: how many nodes of its partition are free."""
    record = facts.record
    own = record.get("Partition", "").split(",")
    limits = partitions.get(own[0], {})
    least, limit_s = int(record.get("NumNodes", "0").partition("-")[0]), read_duration(record.get("TimeLimit", ""))
    most_s, most = read_duration(limits.get("MaxTime", "")), limits.get("MaxNodes", "")
    if "ReqNodeList" in record:
        yield Variant(words="without slurm.nodelist", override="slurm.nodelist=null", dropped="nodelist")
    if least > 1 and reason != "PartitionTimeLimit":
        fewer = min(idle if 0 < idle < least else least // 2, int(most) if most.isdecimal() else least)
        words = f"on {fewer} node{'s' * (fewer != 1)}"
        yield Variant(words=words, override=f"resources.nodes={fewer}", option=f"--nodes={fewer}")
    if limit_s is not None and limit_s >= 120 and reason != "PartitionNodeLimit":
        hours, minutes = divmod(int(min(limit_s / 2, most_s or limit_s) // 60), 60)
        time_limit = f"{hours}:{minutes:02}:00"
        words = f"with a time limit of {time_limit}"
        yield Variant(words=words, override=f"resources.time={time_limit}", option=f"--time={time_limit}")
    others = [name for name, each in partitions.items() if name not in own and _takes(each, least, limit_s)]
    for name in sorted(others, key=lambda name: facts.waiting.get(name, 0))[:_MOST_PARTITIONS]:
        option = f"--partition={name}"
        yield Variant(words=f"in partition {name}", override=f"slurm.partition={name}", option=option, partition=name)


def _takes(partition: Mapping[str, str], nodes: int, limit_s: float | None) -> bool:
    """Whether a partition takes jobs of so many nodes and seconds: --test-only does not look at that."""
    most, most_s = partition.get("MaxNodes", ""), read_duration(partition.get("MaxTime", ""))
    is_short = most_s is None or (limit_s is not None and limit_s <= most_s)
    return partition.get("State", "UP") == "UP" and is_short and not (most.isdecimal() and nodes > int(most))


def _number_of(job_id: str) -> int:
    """The number of a job, or of its array; 0 for anything else."""
    number = re.match(r"\d+", job_id)
    return int(number[0]) if number else 0


def _tier(partition: Mapping[str, str]) -> int:
    written = partition.get("PriorityTier", "")
    return int(written) if written.isdecimal() else 1


# What a partition allows, by the reason that its limit is.
_PARTITION_LIMITS = {
    "PartitionNodeLimit": ("MaxNodes", "allows {} nodes"),
    "PartitionTimeLimit": ("MaxTime", "allows {}"),
    "PartitionDown": ("State", "is {}"),
    "PartitionInactive": ("State", "is {}"),
}


_NODE = re.compile(r"NodeName=(\S+) .*?State=(\S+)")
_NODE_REASON = re.compile(r" Reason=(.*?)(?: \[(\w+)@\S*\])?(?: Comment=.*)?$")
_MOST_NODES = 3


def describe_nodes(text: str) -> list[str]:
    """The state of each node, and why an administrator has taken it out, as sentences.

    Args:
        text: What ``scontrol --oneliner show node`` prints.
    """
    sentences = []
    for line in text.splitlines():
        if node := _NODE.match(line):
            why = _NODE_REASON.search(line)
            by = f" (by {why[2]})" if why and why[2] else ""
            sentences.append(f"{node[1]} is {node[2].lower()}" + (f": {why[1]}{by}" if why else ""))
    more = len(sentences) - _MOST_NODES
    return [*sentences[:_MOST_NODES], *([f"and {more} more nodes"] if more > 0 else [])]


_LIMIT = re.compile(r"([\w/]+)=(\d+)\(([^)\s]*)\)")


def describe_limits(text: str, reason: str, user: str) -> list[str]:
    """The limits that a QOS or an account has, and how much of each is in use, as sentences.

    Args:
        text: What ``scontrol show assoc_mgr`` prints.
        reason: Why the job waits, such as ``QOSMaxJobsPerUserLimit``: limits of a group, or of each, alone.
        user: The job's user, as in its record: ``ada(1001)``.
    """
    kind = "Grp" if "Grp" in reason else "Max"
    name, _, number = user.rstrip(")").partition("(")
    owner, section, is_ours, sentences = "", "", True, []
    for line in text.splitlines():
        words = line.split()
        if line.startswith("QOS="):
            owner, section, is_ours = f"QOS {line.removeprefix('QOS=').partition('(')[0]}", "", True
        elif line.startswith("ClusterName="):
            fields = dict(word.partition("=")[::2] for word in words)
            whose, section = fields.get("UserName", "").partition("(")[0], ""
            owner = f"account {fields.get('Account', '')}" + (f", user {whose}" if whose else "")
            is_ours = whose in ("", name, number)
        elif words[1:] == ["Limits"]:
            section = words[0]
        elif section == "User" and len(words) == 1 and "=" not in line:
            is_ours = words[0].partition("(")[0] in (name, number)
        elif is_ours:
            for each, _, value in (word.partition("=") for word in words if word.startswith(kind)):
                limits = _LIMIT.findall(value) if "TRES" in each else _LIMIT.findall(f"={value}".replace("=", "n=", 1))
                for of_what, limit, used in limits:
                    limited = f"{each} {of_what}" if "TRES" in each else each
                    sentences.append(f"{owner} has the limit {limited}={limit}, and {used} of it is in use")
    return sentences
