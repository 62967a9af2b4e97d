"""Where the files of a run are: the only place that knows their names. Paths are computed, never accessed."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

MANIFEST = "MANIFEST.json"
JOURNALS = "journal"
ATTEMPTS = "attempts"
ENVIRONMENTS = "environments"
METRICS = "metrics.jsonl"
SNAPSHOTS = ".code"
SLOTS = ".slots"
# Numbers are bounded: anybody can name a file, and what is read here goes into a database.
_ATTEMPT = re.compile(r"(.+)\.([0-9]{1,9})")
_NODE = re.compile(r"attempts/[^/]+/node-([0-9]{1,9})\.jsonl")


class _HasPath(Protocol):
    @property
    def path(self) -> Path: ...


class FixedPath:
    """A file or directory of a fixed name in a directory: an attribute of the directory's class."""

    def __init__(self, name: str) -> None:
        """``name``: its path relative to that directory."""
        self._name = name

    def __get__(self, owner: _HasPath, _: type | None = None) -> Path:
        return owner.path / self._name


@dataclass(frozen=True, slots=True)
class SnapshotDir:
    """One snapshot of code, ``.code/<hash>``, which never changes."""

    path: Path

    manifest = FixedPath("manifest.json")
    """The files that it holds; its hash is the snapshot's."""
    contents = FixedPath("contents.gz")
    """The contents of these files, one after the other in the manifest's order, compressed."""


@dataclass(frozen=True, slots=True)
class RunDir:
    """One run's directory."""

    path: Path

    @property
    def id(self) -> str:
        """The run's id, which is the directory's name."""
        return self.path.name

    spec = FixedPath("spec.yaml")
    """The spec as the user wrote it, with the overrides of the first submission."""
    plan = FixedPath("plan.json")
    """The plan of the first submission, which never changes."""
    code_difference = FixedPath("code.diff")
    """How the code that is in git differs from its revision, without secrets, as of the first submission."""
    environment = FixedPath("environment.txt")
    """Python and the packages that it has, as of the first submission."""

    def software(self, name: str) -> Path:
        """Python and the packages that attempts had on their nodes; ``name``: the hash of this list."""
        return self.path / ENVIRONMENTS / f"{name}.txt"

    code = FixedPath("code")
    """Where the run's own copy of its snapshot is, and links to what is next to the repository."""
    code_state = FixedPath("code.json")
    """Names the snapshot that the copy was made from, once the copy is complete."""

    def snapshot(self, name: str) -> SnapshotDir:
        """The snapshot of code with this hash, in the same runs root."""
        return SnapshotDir(self.path.parent / SNAPSHOTS / name)

    def slots(self, host: str) -> Path:
        """What the runs of sweeps on this machine have locked while they run, in the same runs root."""
        return self.path.parent / SLOTS / host

    journals = FixedPath(JOURNALS)
    """Journals of commands, one for each command that wrote any event."""
    attempts = FixedPath(ATTEMPTS)
    """The directories of the attempts, ``<job id>.<restart>`` each."""
    checkpoints = FixedPath("checkpoints")
    """The published checkpoints, next to checkpoints being built or deleted, and damaged ones moved aside."""
    start = FixedPath("start")
    """The checkpoint of another run that it begins with, if any: as it was published there."""
    submissions = FixedPath("submissions")
    """The directories of the submissions, by number."""
    lock = FixedPath(".lock")
    """Held by the command that starts, resumes or cancels this run."""
    lease = FixedPath("lease.json")
    """Names the one attempt that may train and publish."""
    claims = FixedPath("claims")
    """A file for each attempt that another submission follows: the process that creates it must submit."""
    upstreams = FixedPath("upstreams.json")
    """The runs that must end before this one starts; missing if there are none."""
    upstream_facts = FixedPath("upstream-facts.json")
    """What is known of them: written when they had ended, as the run's first attempt began."""
    dependents = FixedPath("dependents")
    """An empty file for each run that starts after this one, named by its id."""
    request = FixedPath("checkpoint-request.json")
    """A person's request for a checkpoint now."""
    live_metrics = FixedPath("mlflow-live.json")
    """What was sent to MLflow from a node of the run."""
    sent = FixedPath("sent.json")
    """What trackers have of it."""
    mlflow_runs = FixedPath("mlflow")
    """Which MLflow runs have shown it, one file for each."""

    def attempt(self, job_id: str, restart: int) -> AttemptDir:
        """The directory of one start of a job, which came after ``restart`` earlier ones."""
        return AttemptDir(self.attempts / attempt_key(job_id, restart))

    def submission(self, number: int) -> SubmissionDir:
        """The directory of a submission, counted from 1."""
        return SubmissionDir(self.submissions / str(number))


@dataclass(frozen=True, slots=True)
class SubmissionDir:
    """One submission of a run to the scheduler, ``submissions/<n>``: one job, which may be started several times."""

    path: Path

    @property
    def run(self) -> RunDir:
        """The run that was submitted."""
        return RunDir(self.path.parent.parent)

    @property
    def number(self) -> int:
        """Its number, from 1 on."""
        return int(self.path.name)

    plan = FixedPath("plan.json")
    """The run's plan with the overrides of this and all earlier submissions."""
    launch = FixedPath("launch.json")
    """What the node agents need in addition to the plan."""
    submitit = FixedPath("submitit")
    """The files of submitit itself: the pickle, the batch script, and the output of the node agents."""
    log_link = FixedPath("log-link")
    """Has the path of the user's own link to the attempt's log."""
    setup = FixedPath("setup.sh")
    """What a shell of a local run's first agent runs, with the spec's setup lines."""
    controller_log = FixedPath("controller.log")
    """The output of the local executor's controller."""


@dataclass(frozen=True, slots=True)
class AttemptDir:
    """One attempt's directory, ``attempts/<job id>.<restart>``.

    ``round`` counts how often the ranks were restarted inside its allocation; each round has its own journals.
    """

    path: Path
    round: int = 0

    @property
    def run(self) -> RunDir:
        """The run that this attempt belongs to."""
        return RunDir(self.path.parent.parent)

    metrics = FixedPath(METRICS)
    """Rank 0's metrics, one line for each step with logged metrics."""
    logs = FixedPath("logs")
    """The logs of the ranks."""

    @property
    def rendezvous(self) -> Path:
        """Node 0's address, for the nodes that have no other way to learn it; once for each stage of the attempt."""
        return self.path / (f"rendezvous.{self.round}.json" if self.round else "rendezvous.json")

    newcomers = FixedPath("newcomers")
    """A file for each agent of another job that could join this attempt."""

    def newcomer(self, number: int) -> Path:
        """The file by which the agent with this number announces itself."""
        return self.newcomers / f"{number}.json"

    admission = FixedPath("admission.json")
    """Says which agents take part in the newest stage of the attempt, and that node 0 still looks for newcomers."""

    def params(self, node: int) -> Path:
        """The run's parameters, for the ranks of this node, where they are too long for a variable."""
        return self.path / f"params-{node}.json"

    log_link = FixedPath("log-link")
    """Has the path of the user's own link to the attempt's log."""
    setup = FixedPath("setup.json")
    """Says where the agents of a local run find what its setup has changed, once node 0 has run it."""
    turn = FixedPath("turn.json")
    """Says, once node 0 of a local run has its turn, which GPUs the run has."""

    def node_journal(self, node: int) -> Path:
        """The journal of a node's agent."""
        return self.path / f"node-{node}.jsonl"

    requeue = FixedPath("requeue")
    """Tells the batch script to requeue the job if the agent cannot do so itself."""
    no_requeue = FixedPath("no-requeue")
    """Tells the batch script to forbid further requeues of the job if the agent cannot do so itself."""

    @property
    def owner(self) -> str:
        """The owner of a checkpoint being built: unique for each attempt, and each round of one."""
        return f"{self.path.name}.{self.round}" if self.round else self.path.name

    def rank_journal(self, rank: int) -> Path:
        """A rank's journal. A journal has one writer, so ranks restarted inside the allocation get new ones."""
        return self.path / (f"rank-{rank}.{self.round}.jsonl" if self.round else f"rank-{rank}.jsonl")

    @property
    def script_journal(self) -> Path:
        """The journal of the process that reads a script's metrics; like a rank's, one for each round."""
        return self.path / (f"script.{self.round}.jsonl" if self.round else "script.jsonl")

    @property
    def setup_log(self) -> Path:
        """The output of the lines of setup, which run on the first node."""
        return self.helper_log("setup", 0)

    def helper_log(self, name: str, node: int) -> Path:
        """The output of what runs beside the ranks of this node, such as ``teardown``, or ``sidecar`` and its name."""
        return self.logs / f"{name}-{node}.log"

    def rank_log(self, rank: int) -> Path:
        """A rank's output."""
        return self.logs / f"rank-{rank}.log"

    def node_log(self, node: int) -> Path:
        """The output of a command that was started once on this node: of all ranks that it started."""
        return self.logs / f"node-{node}.log"

    def log_sizes(self, node: int) -> Path:
        """What this node's agent notes of the sizes of its logs, by time."""
        return self.logs / f"sizes-{node}.jsonl"

    def system_metrics(self, node: int) -> Path:
        """What this node's agent notes of how busy the node is, by time."""
        return self.logs / f"system-{node}.jsonl"

    def hostfile(self, node: int) -> Path:
        """The list of the nodes that train, for a launcher on this node."""
        return self.path / f"hostfile-{node}"


def attempt_key(job_id: str, restart: int) -> str:
    """The name of an attempt's directory."""
    return f"{job_id}.{restart}"


def split_attempt(name: str) -> tuple[str, int] | None:
    """(job id, restart) from the name of an attempt's directory; None for anything else."""
    match = _ATTEMPT.fullmatch(name)
    return (match[1], int(match[2])) if match else None


def node_of(source: str) -> str:
    """The number, in digits, of the node whose agent wrote a journal; empty for any other journal."""
    match = _NODE.fullmatch(source)
    return match[1] if match else ""


def attempt_of(source: str) -> str:
    """The name of the attempt's directory that contains this journal; empty for a command's journal."""
    parts = source.split("/")
    return parts[1] if parts[0] == "attempts" and len(parts) > 2 else ""
