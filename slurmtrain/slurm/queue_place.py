"""What Slurm says about one waiting job, and when it would start variants of it, within a few seconds.

``sbatch --test-only`` says when a job would start, and submits none. Seen on 22.05: it knows the jobs that run, and not
the jobs that wait.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace

from slurmtrain.errors import SlurmDown
from slurmtrain.model.diagnosis.waits import ALTERABLE, Alternative, QueueFacts
from slurmtrain.model.hostlist import expand_hostlist
from slurmtrain.model.run.job_state import HELD_BY_ADMIN, HELD_BY_SLURM, HELD_BY_USER, bare_reason
from slurmtrain.slurm.parse import read_duration, read_job, read_partitions
from slurmtrain.slurm.slurm_commands import command_environment, run_command

Partitions = Mapping[str, Mapping[str, str]]
# "sbatch: Job 4 to start at 1795941430 using 32 processors on nodes ...", and a line with the jobs that it preempts.
_START = re.compile(r"to start at (\d+) using")
_PREEMPTS = re.compile(r"Preempts:\s*(\S+)")
# Options that say when a job may start, not on what.
_NOT_ASKED = re.compile(r"#SBATCH --(array|begin|dependency|hold)\b")
# Jobs that wait for these reasons are before nobody.
_NOT_IN_LINE = {*HELD_BY_USER, *HELD_BY_SLURM, HELD_BY_ADMIN, "Dependency", "BeginTime"}
# Each question with --test-only has slurmctld plan a job.
_MOST_VARIANTS = 4
_MOST_PARTITIONS = 2
_LEAST_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A request with one change: in ``words``, as a spec says it, as an ``option`` of sbatch; all empty: unchanged."""

    words: str = ""
    override: str = ""
    option: str = ""
    partition: str = ""


def ask_queue(job_id: str, code: str, script: str, starts_at: float | None, patience_s: float) -> QueueFacts:
    """Ask Slurm about a waiting job. Never raises: what it did not answer is in the result.

    Args:
        job_id: The job.
        code: The reason why it waits.
        script: Its batch script; empty: what would start sooner is not asked.
        starts_at: When Slurm expects to start it, in seconds since 1970; None: it does not say.
        patience_s: How many seconds all answers may take.
    """
    with ThreadPoolExecutor(_MOST_VARIANTS) as pool:
        questions = _Questions(pool, time.monotonic() + patience_s)
        about = questions.ask("scontrol", "show", "job", job_id)
        queue = questions.ask("squeue", "--noheader", "--states=PENDING", "--format=%i|%Q|%r|%P")
        shown = questions.ask("scontrol", "--oneliner", "show", "partition")
        try:
            record = read_job(about.result())
            partitions = read_partitions(shown.result())
            facts = _with_place(QueueFacts(job_id=job_id, record=record), queue.result(), partitions)
        except SlurmDown as error:
            return QueueFacts(job_id=job_id, unanswered=str(error))
        facts = replace(facts, notes=[*_partition_notes(record, code, partitions), *questions.limits(record, code)])
        if not script or bare_reason(code) not in ALTERABLE:
            return facts
        variants = [] if starts_at is not None else [Variant()]
        variants += _variants(facts, partitions)
        return questions.with_alternatives(facts, script, variants[:_MOST_VARIANTS])


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

    def limits(self, record: Mapping[str, str], code: str) -> list[str]:
        """The limits that a job waits for, if a QOS or an account has them."""
        reason = bare_reason(code)
        if not reason.startswith(("QOS", "Assoc")):
            return []
        about = ("assoc", "accounts", "Account") if reason.startswith("Assoc") else ("qos", "qos", "QOS")
        flag, filtered, key = about
        with suppress(SlurmDown):
            answer = self.ask("scontrol", "show", "assoc_mgr", f"flags={flag}", f"{filtered}={record.get(key, '')}")
            return describe_limits(answer.result(), reason, record.get("UserId", ""))
        return []

    def with_alternatives(self, facts: QueueFacts, script: str, variants: Sequence[Variant]) -> QueueFacts:
        """The facts, with when each of these ``variants`` of the job of a batch ``script`` would start."""
        lines = [line for line in script.splitlines() if line.startswith("#") and not _NOT_ASKED.match(line)]
        stdin = "\n".join([*lines, "true", ""])
        # What the job has outranks the script, and the variables of the shell that asks.
        environ = {name: value for name, value in command_environment().items() if not name.startswith("SBATCH_")}
        own = [f"--{key.lower()}={facts.record[key]}" for key in ("Partition", "Account", "QOS") if key in facts.record]
        command = ("sbatch", "--test-only", *own)
        answers = [self.ask(*command, *filter(None, (each.option,)), stdin=stdin, environ=environ) for each in variants]
        alternatives, unchanged_at = [], None
        for variant, answer in zip(variants, answers, strict=True):
            # Refused: no such job can be submitted.
            with suppress(SlurmDown):
                text = answer.result()
                start, preempts = _START.search(text), _PREEMPTS.search(text)
                if start is None:
                    continue
                if not variant.option:
                    unchanged_at = float(start[1])
                    continue
                alternatives.append(
                    Alternative(
                        words=variant.words,
                        override=variant.override,
                        partition=variant.partition,
                        starts_at=float(start[1]),
                        preempts=preempts[1].split(",") if preempts else (),
                    )
                )
        return replace(facts, alternatives=alternatives, unchanged_at=unchanged_at)


def _variants(facts: QueueFacts, partitions: Partitions) -> Iterator[Variant]:
    """What to change in a job's request."""
    record = facts.record
    least = record.get("NumNodes", "").partition("-")[0]
    if least.isdecimal() and int(least) > 1:
        fewer = int(least) // 2
        words = f"on {fewer} node{'s' * (fewer > 1)}"
        yield Variant(words=words, override=f"resources.nodes={fewer}", option=f"--nodes={fewer}")
    limit_s = read_duration(record.get("TimeLimit", ""))
    if limit_s is not None and limit_s >= 120:
        minutes = int(limit_s // 120)
        words = f"with a time limit of {minutes} min"
        yield Variant(words=words, override=f"resources.time={minutes}", option=f"--time={minutes}")
    own = record.get("Partition", "").split(",")
    others = [name for name, fields in partitions.items() if name not in own and fields.get("State", "UP") == "UP"]
    for name in sorted(others, key=lambda name: facts.waiting.get(name, 0))[:_MOST_PARTITIONS]:
        option = f"--partition={name}"
        yield Variant(words=f"in partition {name}", override=f"slurm.partition={name}", option=option, partition=name)


def _with_place(facts: QueueFacts, text: str, partitions: Partitions) -> QueueFacts:
    """The facts with how many jobs wait before this one, by what squeue says of all jobs that it shows.

    Slurm goes through all waiting jobs by the tiers of their partitions, and then by their priorities.
    """
    array, priority = facts.job_id.partition("_")[0], int(facts.record.get("Priority") or 0)
    nodes = {name: frozenset(_nodes_of(fields)) for name, fields in partitions.items()}
    waiting = dict.fromkeys(partitions, 0)
    for line in text.splitlines():
        other, _, rest = line.partition("|")
        its_priority, _, rest = rest.partition("|")
        reason, _, listed = rest.rpartition("|")
        if other.partition("_")[0] == array or bare_reason(reason) in _NOT_IN_LINE or not its_priority.isdecimal():
            continue
        theirs = [name for name in listed.split(",") if name in partitions]
        for name, own in nodes.items():
            tiers = [_tier(partitions[each]) - _tier(partitions[name]) for each in theirs if nodes[each] & own]
            waiting[name] += any(tier > 0 or (tier == 0 and int(its_priority) > priority) for tier in tiers)
    before = [waiting[name] for name in facts.record.get("Partition", "").split(",") if name in waiting]
    return replace(facts, waiting=waiting, ahead=min(before, default=None))


def _nodes_of(partition: Mapping[str, str]) -> Sequence[str]:
    with suppress(ValueError):
        return expand_hostlist(partition.get("Nodes", ""))
    return ()


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


def _partition_notes(record: Mapping[str, str], code: str, partitions: Partitions) -> Iterator[str]:
    """What the job's partitions allow, if that is why it waits."""
    key, words = _PARTITION_LIMITS.get(bare_reason(code), ("", ""))
    for name in record.get("Partition", "").split(",") if key else ():
        if value := partitions.get(name, {}).get(key):
            yield f"partition {name} {words.format(value)}"


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
