"""Parsing the output of squeue, sacct and scontrol, why a job is pending, and the names and ids of jobs.

Pure; text formats only, identical from 22.05 to 26.05.

Names of jobs carry the id of their run, by which the job of a killed submission is found. A person's other jobs may
carry it too, as ``eval-digits-<id>`` does: what is known of the name counts whole.
"""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from slurmtrain.model.run.job_state import base

# squeue's fields and their requested widths: with fixed widths a field may contain any character, even separators.
# Longer fields are cut; the name comes last, since the user chooses it.
QUEUE_FIELDS = (
    ("JobArrayID", 40), ("State", 24), ("Reason", 48), ("RestartCnt", 12), ("StartTime", 24), ("EndTime", 24),
    ("TimeLimit", 24), ("exit_code", 12), ("PriorityLong", 16), ("NodeList", 400), ("Name", 300),
)  # fmt: skip
ACCOUNTING_FIELDS = ("JobID", "State", "ExitCode", "Submit", "Start", "End", "TimelimitRaw", "NodeList", "JobName")
# sinfo's fields of a node in a partition: name, partition, state, CPUs, memory in MiB, generic resources, features.
# Features come last, since a site may put any characters into them.
NODE_FORMAT = "%N|%R|%T|%c|%m|%G|%f"
# Nodes in these states get no jobs, nor do unresponsive ones, which have an asterisk (sinfo(1), 22.05 to 25.11).
_UNUSABLE = frozenset({"down", "drained", "draining", "error", "fail", "failing", "future", "inval", "unknown"})
# Lines of a job's record that contain free text from the user.
_FREE_TEXT = ("JobId", "Command", "WorkDir", "StdErr", "StdIn", "StdOut", "Comment", "AdminComment", "SystemComment",
              "Extra")  # fmt: skip
# A job, an element of an array, several of them, or a component; anything else is a line of somebody's text.
_JOB_ID = re.compile(r"\d+(?:_(?:\d+|\[[^]]*\]?))?(?:\+\d+)?")
# Where the name of a job begins in a row of squeue.
_NAME_AT = sum(width for _, width in QUEUE_FIELDS[:-1])
# How commands spell a missing value.
_NULLS = {"", "(null)", "none", "none assigned", "unknown", "n/a", "invalid"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One start of a job, as Slurm describes it. Times are seconds since 1970.

    ``restart``: how often it was started before; None from sacct, whose rows do not say. ``starts_at``: Slurm's
    estimate for a pending job. ``nodes``: in Slurm's hostlist notation, ``n[1-3]``. ``elements``: the indices of the
    elements that it is about, if it is a row for several elements of the array ``id``; empty: it is one job.
    """

    id: str
    name: str
    state: str
    reason: str = ""
    restart: int | None = None
    submitted_at: float | None = None
    starts_at: float | None = None
    ends_at: float | None = None
    time_limit_s: float | None = None
    exit_code: int | None = None
    signal: int | None = None
    priority: int | None = None
    nodes: str = ""
    elements: tuple[range, ...] = ()

    def has_element(self, index: int) -> bool:
        """Whether it is a row for several elements of an array, this one among them."""
        return any(index in indices for indices in self.elements)


def queue_format() -> str:
    """The ``--Format`` of squeue that :func:`read_queue` reads."""
    return ",".join(f"{name}:{width}" for name, width in QUEUE_FIELDS)


def read_queue(text: str) -> dict[str, Job]:
    """Jobs by id, from ``squeue --noheader --Format``; lines that are too short are skipped.

    The name of a job may have line breaks: the lines after a break are shorter than the fields before the name in any
    row.

    Ids of an array's elements are ``ARRAY_INDEX``. A heterogeneous job has a row for each component, the leader's being
    ``LEADER+0``: it is one job, in the leader's state, on the nodes of all.
    """
    jobs: dict[str, Job] = {}
    nodes: dict[str, dict[int, str]] = {}
    newest = ""
    for line in text.split("\n"):  # a name may contain characters that splitlines() treats as line ends
        row, rest = {}, line
        for name, width in QUEUE_FIELDS:
            # The name, too, is filled up with blanks at its end, but begins as it is.
            row[name], rest = rest[:width].rstrip(" ") if name == "Name" else rest[:width].strip(), rest[width:]
        if len(line) < _NAME_AT or not _JOB_ID.fullmatch(row["JobArrayID"]) or not row["State"]:
            if line and newest in jobs:
                jobs[newest] = replace(jobs[newest], name=f"{jobs[newest].name}\n{line.rstrip(' ')}")
            continue
        job_id, component = _component(row["JobArrayID"])
        newest = "" if component else job_id
        nodes.setdefault(job_id, {})[component] = "" if row["NodeList"].lower() in _NULLS else row["NodeList"]
        if component:
            continue
        code, signal = _exit_code(row["exit_code"])
        jobs[job_id] = Job(
            id=job_id,
            name=row["Name"],
            state=row["State"],
            reason="" if row["Reason"].lower() in _NULLS else row["Reason"],
            restart=_whole_number(row["RestartCnt"]),
            starts_at=read_time(row["StartTime"]),
            ends_at=read_time(row["EndTime"]),
            time_limit_s=read_duration(row["TimeLimit"]),
            exit_code=code,
            signal=signal,
            priority=_whole_number(row["PriorityLong"]),
        )
    return {job_id: replace(job, nodes=_joined_nodes(nodes[job_id])) for job_id, job in jobs.items()}


def read_accounting(text: str) -> dict[str, list[Job]]:
    """All starts of each job, oldest first, from ``sacct --parsable2 --noheader --duplicates`` including steps.

    Elements of an array that wait, or that ended before they began, share a row: it is listed by the array's id, and
    names them (``Job.elements``). A heterogeneous job is one job, as for :func:`read_queue`.

    If a step ran out of memory, so did its job, also if the job's own row says that it failed or completed: the kernel
    kills a step's process, and the batch script ends with its own exit code. A job that a person cancelled was
    cancelled: its step may have lost a process, and gone on.
    """
    starts: dict[str, list[Job]] = {}
    for line in text.split("\n"):
        # The name comes last, and may contain the separator.
        cells = line.split("|", len(ACCOUNTING_FIELDS) - 1)
        if len(cells) < len(ACCOUNTING_FIELDS):
            continue
        row = dict(zip(ACCOUNTING_FIELDS, cells, strict=True))
        job_id, _, step = row["JobID"].partition(".")
        job_id, component = _component(job_id)
        job_id, _, elements = job_id.partition("_[")
        if not step:
            start = replace(_job_of_row(job_id, row), elements=_indices(elements))
            if not component:
                starts.setdefault(job_id, []).append(start)
            elif starts.get(job_id):
                # The rows of a start follow one another, the leader's first.
                leader = starts[job_id][-1]
                starts[job_id][-1] = replace(leader, nodes=_joined_nodes({0: leader.nodes, 1: start.nodes}))
        elif base(row["State"]) == "OUT_OF_MEMORY" and starts.get(job_id):
            last = starts[job_id][-1]
            if base(last.state) in ("FAILED", "COMPLETED"):
                starts[job_id][-1] = replace(last, state="OUT_OF_MEMORY")
    # Sorting is stable, so starts without a time keep sacct's order.
    return {
        job_id: sorted(rows, key=lambda job: float("inf") if job.starts_at is None else job.starts_at)
        for job_id, rows in starts.items()
    }


def read_partitions(text: str) -> dict[str, dict[str, str]]:
    """Fields of each partition by name, from ``scontrol show partition --oneliner``."""
    partitions = {}
    for line in text.splitlines():
        fields = dict(re.findall(r"(\S+?)=(\S*)", line))
        if "PartitionName" in fields:
            partitions[fields["PartitionName"]] = fields
    return partitions


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeInfo:
    """A node as a member of one of its partitions. Memory is in MiB.

    ``gpus_of_types``: how many GPUs it has of each type that has a name.
    """

    name: str
    partition: str
    state: str = "idle"
    cpus: int | None = None
    memory: int | None = None
    gpus: int = 0
    gpus_of_types: Mapping[str, int] = field(default_factory=dict)
    features: frozenset[str] = frozenset()

    @property
    def usable(self) -> bool:
        """Whether it may get a job, now or after others have ended.

        Slurm appends flags to states: ``*`` for a node that does not respond, others for powering up or down.
        """
        bare = re.match(r"[a-z]*", self.state.lower())
        return "*" not in self.state and bare is not None and bare[0] not in _UNUSABLE


def read_nodes(text: str) -> list[NodeInfo]:
    """Nodes by partition from ``sinfo --noheader --Node --format``; lines that are too short are skipped."""
    nodes = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split("|", NODE_FORMAT.count("|"))]
        if len(cells) <= NODE_FORMAT.count("|"):
            continue
        name, partition, state, cpus, memory, gres, features = cells
        nodes.append(
            NodeInfo(
                name=name,
                partition=partition,
                state=state,
                cpus=_whole_number(cpus.rstrip("+")),
                memory=_whole_number(memory.rstrip("+")),
                gpus=sum(count for _, count in _gpus_of_gres(gres)),
                gpus_of_types={kind: count for kind, count in _gpus_of_gres(gres) if kind},
                features=frozenset(() if features.lower() in _NULLS else features.split(",")),
            )
        )
    return nodes


def read_job(text: str) -> dict[str, str]:
    """Fields of a job's record, from ``scontrol show job``, except those that contain free text from the user.

    "(null)", "N/A" and the like are left out.
    """
    fields: dict[str, str] = {}
    for line in text.splitlines():
        if line.strip().startswith(tuple(f"{name}=" for name in _FREE_TEXT)):
            continue
        for key, value in re.findall(r"(\S+?)=(\S*)", line):
            if value.lower() not in _NULLS:
                fields.setdefault(key, value)
    return fields


def _gpus_of_gres(gres: str) -> list[tuple[str, int]]:
    """Types and numbers of GPUs in generic resources such as ``gpu:a100:4(S:0-1),shard:8``; an empty type: any."""
    counts = re.findall(r"(?:^|,)gpu((?::[^,:()]+)*?):(\d+)(?=[,(]|$)", gres)
    return [(kind.lstrip(":"), int(count)) for kind, count in counts]


def count_of(tres: str, name: str) -> int | None:
    """The amount of a resource in a TRES list such as ``cpu=8,mem=62G,gres/gpu=2``; None if it is not listed."""
    for part in tres.split(","):
        key, _, value = part.partition("=")
        if key == name:
            return _whole_number(value)
    return None


def _job_of_row(job_id: str, row: Mapping[str, str]) -> Job:
    code, signal = _exit_code(row["ExitCode"])
    minutes = _whole_number(row["TimelimitRaw"])
    return Job(
        id=job_id,
        name=row["JobName"],
        state=row["State"],
        submitted_at=read_time(row["Submit"]),
        starts_at=read_time(row["Start"]),
        ends_at=read_time(row["End"]),
        time_limit_s=None if minutes is None else minutes * 60.0,
        exit_code=code,
        signal=signal,
        nodes="" if row["NodeList"].lower() in _NULLS else row["NodeList"],
    )


def _component(job_id: str) -> tuple[str, int]:
    """The id of a job, and the number of its component of a heterogeneous job: ``7+1`` is component 1 of job 7."""
    leader, _, number = job_id.partition("+")
    return leader, int(number) if number.isdecimal() else 0


def _joined_nodes(nodes: Mapping[int, str]) -> str:
    """Slurm's lists of the nodes of all components, by their numbers, as one."""
    return ",".join(nodes[number] for number in sorted(nodes) if nodes[number])


def _indices(text: str) -> tuple[range, ...]:
    """The elements of an array in a row for several of them: ``0-3,7%2]``, or ``0-998:2]`` for every second one.

    What follows ``%`` is how many may run at once.
    """
    parts = re.findall(r"(?<![^,])(\d{1,9})(?:-(\d{1,9})(?::(\d{1,9}))?)?(?![^,])", re.split("[%\\]]", text)[0])
    return tuple(range(int(first), int(last or first) + 1, max(1, int(step or 1))) for first, last, step in parts)


def _exit_code(text: str) -> tuple[int | None, int | None]:
    """``1:0`` is exit code 1, ``0:9`` signal 9; squeue of 22.05 prints the status of wait(2), a plain number."""
    code, colon, signal = text.partition(":")
    status = _whole_number(text)
    if not colon and status is not None:
        return status >> 8, status & 0x7F or None
    return _whole_number(code), _whole_number(signal) or None


def _whole_number(text: str) -> int | None:
    with contextlib.suppress(ValueError):
        return int(text)
    return None


def read_time(text: str) -> float | None:
    """Slurm prints seconds since 1970 if SLURM_TIME_FORMAT is %s; 0 and words such as Unknown mean no time."""
    with contextlib.suppress(ValueError):
        return float(text) or None
    return None


_DURATION = re.compile(r"(?:(\d{1,9})-)?(\d{1,9})(?::(\d{1,9}))?(?::(\d{1,9}))?")


def read_duration(text: str) -> float | None:
    """Seconds from Slurm's ``days-hours:minutes:seconds``; None for UNLIMITED and anything that is not a duration.

    After days, the first number is hours; without days, one number is minutes and two are minutes and seconds
    (sbatch(1), ``--time``).
    """
    match = _DURATION.fullmatch(text)
    if match is None:
        return None
    days, *parts = match.groups()
    numbers = [int(part) for part in parts if part is not None]
    if days is not None:
        hours, minutes, seconds = [*numbers, 0, 0][:3]
    elif len(numbers) == 1:
        hours, minutes, seconds = 0, numbers[0], 0
    else:
        hours, minutes, seconds = [0, *numbers][-3:]
    return float(((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds)


# --- names and ids of jobs -------------------------------------------------------------------------------------------

# More elements of one array than this are named by the array itself: an option has its limits.
_MOST_ELEMENTS = 32
# The end of the names of second jobs, which wait for more nodes of a run (plugins/growth). They do not end with its id,
# unlike the names of its own jobs, so that none is ever taken for the job of a run.
_SECOND = "-more"


def job_name(name: str, identifier: str) -> str:
    """The name of the jobs of a run, or of a job array.

    Args:
        name: the spec's name.
        identifier: the id of the run, or of the array.
    """
    return f"{name}-{identifier}"


def is_named_after(job: Job, run_id: str, name: str) -> bool:
    """Whether a job has the name of a run's jobs.

    Args:
        job: the job.
        run_id: the run.
        name: the run's; empty: it is unknown, and the job's name ends with the id.
    """
    return job.name == job_name(name, run_id) if name else job.name.endswith(f"-{run_id}")


def find_unclaimed_job(jobs: Mapping[str, Job], run_id: str, name: str, claimed: Collection[str]) -> str | None:
    """The id of a job that has the name of a run's jobs, and belongs to no known submission.

    Args:
        jobs: the jobs to search, by id.
        run_id: the run.
        name: its name.
        claimed: ids of jobs that belong to the run's submissions.
    """
    unclaimed = (job.id for job in jobs.values() if is_named_after(job, run_id, name) and job.id not in claimed)
    return next(unclaimed, None)


def job_arrays(jobs: Mapping[str, Job]) -> dict[str, str]:
    """The ids of job arrays by the last word of their names, which in slurmtrain's arrays is an id of its own.

    Args:
        jobs: jobs, by id; elements that ended before they began share one, with the array's id.
    """
    arrays: dict[str, str] = {}
    for job in jobs.values():
        word, array = job.name.rpartition("-")[2], job.id.partition("_")[0]
        # Whatever else has this id in its name was submitted later: nobody knew it before.
        # By length first: ids are numbers written as text.
        arrays[word] = min(arrays.get(word, array), array, key=lambda job_id: (len(job_id), job_id))
    return arrays


def second_job_name(name: str, run_id: str) -> str:
    """The name of the second jobs of a run with this ``name`` and id."""
    return f"{job_name(name, run_id)}{_SECOND}"


def second_jobs(jobs: Collection[Job], name: str = "") -> dict[str, list[Job]]:
    """The second jobs among ``jobs``, by the ids of the runs that they are for.

    Args:
        jobs: a person's jobs.
        name: the run's name, if there is only one; empty: any run's.
    """
    result: dict[str, list[Job]] = {}
    for job in jobs:
        first, _, run_id = job.name.removesuffix(_SECOND).rpartition("-")
        if job.name.endswith(_SECOND) and name in ("", first):
            result.setdefault(run_id, []).append(job)
    return result


def describe_after(job_ids: Sequence[str]) -> str:
    """The dependency on the end of all of these jobs, however they end; empty without any.

    Not ``afterok``: it is never satisfied once a job has failed, also if its run goes on in another job, and it is
    satisfied by any job that Slurm has forgotten (seen on 22.05). A requeue, also of one element of an array, ends no
    job (seen on 22.05).
    """
    counts = Counter(job_id.partition("_")[0] for job_id in job_ids)
    named = [array if counts[array := job_id.partition("_")[0]] > _MOST_ELEMENTS else job_id for job_id in job_ids]
    return ":".join(["afterany", *dict.fromkeys(named)]) if named else ""


def join_elements(job_ids: Iterable[str]) -> list[str]:
    """The same jobs as arguments of Slurm's commands: several elements of an array are one, ``7_[0-3,5]``."""
    arrays: dict[str, list[int]] = {}
    for job_id in job_ids:
        array, _, index = job_id.partition("_")
        arrays.setdefault(array, []).extend([int(index)] if index.isdecimal() else [])
    joined = []
    for array, indices in arrays.items():
        present = set(indices)
        starts = sorted(index for index in present if index - 1 not in present)
        ends = sorted(index for index in present if index + 1 not in present)
        ranges = [str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True)]
        if len(present) > 1:
            joined.append(f"{array}_[{','.join(ranges)}]")
        else:
            joined.append("_".join([array, *ranges]))
    return joined
