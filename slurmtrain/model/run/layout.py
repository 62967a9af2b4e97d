"""Where the files of a run are: the only place that knows their names. Paths are computed, never accessed."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MANIFEST = "MANIFEST.json"
JOURNALS = "journal"
ATTEMPTS = "attempts"
ENVIRONMENTS = "environments"
NSYS_REPORTS = "*.nsys-rep"
METRICS = "metrics.jsonl"
GUESSED_METRICS = "metrics-guessed.jsonl"
SNAPSHOTS = ".code"
SLOTS = ".slots"
# Numbers are bounded: anybody can name a file, and what is read here goes into a database.
_ATTEMPT = re.compile(r"(.+)\.([0-9]{1,9})")
_NODE = re.compile(r"attempts/[^/]+/node-([0-9]{1,9})\.jsonl")


class FixedPath:
    """A file or directory of a fixed name in a directory: an attribute of the directory's class."""

    def __init__(self, name: str) -> None:
        """``name``: its path relative to that directory."""
        self._name = name

    def __get__(self, owner: Any, _: type | None = None) -> Path:
        path: Path = owner.path
        return path / self._name


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
    notices = FixedPath("notices")
    """A file for each message about the run that was sent, or that somebody was about to send."""
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
    guessed_metrics = FixedPath(GUESSED_METRICS)
    """The same, as guessed from rank 0's output; without effect where the script reports its metrics."""
    logs = FixedPath("logs")
    """The logs of the ranks."""
    profiles = FixedPath("profiles")
    """What profilers have recorded of ranks."""

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

    setup_log = FixedPath("logs/setup-0.log")
    """The output of the lines of setup, which run on the first node."""

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


# What submitit replaces in the paths of its files, by the ids of a job, an array and a task.
_REPLACED = re.compile("%[jtAa]")
# Slurm replaces %x and the like in the paths of logs, and nothing in one with a backslash; a line of a batch script
# ends at a line break, whatever its quotes.
_MEANT_BY_SLURM = re.compile(r"%|\\|[\x00-\x1f\x7f]")


def unusable_in_root(path: Path, executor: str) -> str | None:
    """Why no runs can be started in a runs root, as a sentence; None: they can.

    Args:
        path: The runs root.
        executor: ``slurm`` or ``local``.
    """
    match = (_MEANT_BY_SLURM if executor == "slurm" else _REPLACED).search(str(path))
    if match is None:
        return None
    why = "that has a special meaning to Slurm in paths of logs" if executor == "slurm" else "submitit replaces that"
    problem = f"its path contains {match[0]!r}, and {why}"
    return f"the runs root {str(path)!r} cannot be used: {problem}; choose another with --runs"


@dataclass(frozen=True, slots=True)
class RunsRoot:
    """The directory that holds all runs."""

    path: Path

    mlflow_db = FixedPath("mlflow.db")
    """The database of the MLflow store next to the runs."""

    @property
    def mlflow_uri(self) -> str:
        """What records and messages call the MLflow store next to the runs."""
        return f"sqlite:///{self.mlflow_db}"

    mlflow_artifacts = FixedPath("mlartifacts")
    """Where that store keeps its artifacts."""
    registry = FixedPath("registry.db")
    """The database that caches what commands have read about the runs, unless configured elsewhere."""
    scheduler_cache = FixedPath(".squeue.json")
    """Slurm's last answer, shared by commands that poll."""
    histories = FixedPath(".histories")
    """What the metrics files of runs hold, in columns: a cache, made by commands that read whole curves."""

    def history(self, run_id: str) -> Path:
        """The history of one run."""
        return self.histories / f"{run_id}.columns"

    notices = FixedPath(".notify")
    """Since when people are told of runs, and how each receiver fared last."""
    nodes = FixedPath("nodes")
    """Journals of commands about the cluster's nodes."""
    keys = FixedPath("keys")
    """What was submitted with which idempotency key."""

    def submission_key(self, key: str) -> Path:
        """What was submitted with this idempotency key, which may be any text."""
        # A key may be any text, also one that no file can be named.
        return self.keys / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"

    counters = FixedPath("counters.jsonl")
    """What each run, also a deleted one, has added to Prometheus' counters."""
    counters_lock = FixedPath(".counters.lock")
    """Held while these are read and written."""

    def name_lock(self, name: str) -> Path:
        """Held by the command that creates runs of this name, if only one of them may be active at a time."""
        return self.path / f".name-{hashlib.sha256(name.encode()).hexdigest()[:32]}.lock"

    tracking_lock = FixedPath(".mlflow.lock")
    """Held by the command that sends a run to trackers."""
    tracking_queue = FixedPath(".mlflow.queue.lock")
    """Held by the command that is the next to send one."""
    watch_lock = FixedPath(".watch.lock")
    """Held by the process that watches these runs, and identifies it."""
    settled_check = FixedPath(".settled-check")
    """Its time is that at which all runs that have settled were last looked at, where there are many."""
    settled_files_check = FixedPath(".settled-files-check")
    """The same for the size of each of their files."""
    snapshots = FixedPath(SNAPSHOTS)
    """The code of the runs, each state of it once, and the hashes of files that have not changed since."""

    snapshots_lock = FixedPath(f"{SNAPSHOTS}/.lock")
    """Held while it is decided whether a snapshot is needed."""

    def snapshot(self, name: str) -> SnapshotDir:
        """The snapshot of code with this hash."""
        return SnapshotDir(self.snapshots / name)

    def run(self, run_id: str) -> RunDir:
        """The directory of the run with this id."""
        return RunDir(self.path / run_id)

    arrays = FixedPath("arrays")
    """The directories of job arrays, by their ids."""

    def array(self, array_id: str) -> ArrayDir:
        """The directory of a job array."""
        return ArrayDir(self.arrays / array_id)

    searches = FixedPath("searches")
    """What searches were submitted with, until all of their runs are."""

    def slots(self, host: str) -> Path:
        """What the runs of sweeps on this machine have locked while they run."""
        return self.path / SLOTS / host

    def unborn(self, run_id: str) -> RunDir:
        """Where a run directory is built before it is renamed into place."""
        # A rename is atomic: after a kill there is either no run of this id, or a whole one.
        return RunDir(self.path / f".new-{run_id}")


@dataclass(frozen=True, slots=True)
class ArrayDir:
    """What the elements of a job array share, ``arrays/<id>``: each element is the job of a run."""

    path: Path

    @property
    def id(self) -> str:
        """Its id, with which the name of the job array ends."""
        return self.path.name

    submitit = FixedPath("submitit")
    """The batch script and the pickle of all elements."""
    elements = FixedPath("elements")
    """A link for each element to the :class:`SubmissionDir` of its run, named by its index.

    An element that is the job of a pack has a link for each of its runs, ``<index>.<slot>``.
    """

    def element(self, index: int, slot: int | None = None) -> Path:
        """The link of an element; ``slot``: which run of its pack, None if it has a single run."""
        return self.elements / (str(index) if slot is None else f"{index}.{slot}")


def is_run_id(name: str) -> bool:
    """Whether an entry of the runs root is a run."""
    return RUN_ID.fullmatch(name) is not None


def run_ids_among(names: Iterable[str]) -> Iterator[str]:
    """The names among these that are ids of runs."""
    return filter(RUN_ID.fullmatch, names)


def is_unborn(name: str) -> bool:
    """Whether an entry of the runs root is a run directory that was never finished."""
    return name.startswith(".new-") and is_run_id(name.removeprefix(".new-"))


# Crockford's base 32 in lower case: no i, l, o or u, which are easily misread.
ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"
EPOCH_MS = 1_577_836_800_000  # 2020-01-01T00:00:00Z
_TIME_DIGITS = 8  # 40 bits of milliseconds: until 2054
_RANDOM_DIGITS = 2
RUN_ID = re.compile(f"[{ALPHABET}]{{{_TIME_DIGITS + _RANDOM_DIGITS}}}")


def base32(value: int, digits: int) -> str:
    """``value`` in Crockford's base 32, with leading zeros."""
    return "".join(ALPHABET[value >> (5 * place) & 31] for place in reversed(range(digits)))


def run_id(now_ms: int, random_bits: int) -> str:
    """An id that sorts by ``now_ms`` (milliseconds since 1970); ``random_bits`` distinguish ids of one millisecond.

    Uniqueness is not guaranteed: the code that creates the run directory tries another id if it already exists.
    """
    # A clock that stands before 2020 still gives an id, though such ids do not sort.
    return base32(max(0, now_ms - EPOCH_MS), _TIME_DIGITS) + base32(random_bits, _RANDOM_DIGITS)


def created_ms(name: str) -> int:
    """The time in a run's id, in milliseconds since 1970. Raises ValueError for other names."""
    value = 0
    for digit in name[:_TIME_DIGITS]:
        value = value << 5 | ALPHABET.index(digit)
    return value + EPOCH_MS


# Numbers are bounded: anybody can name a file, and what is read here goes into a database.
_STEP = re.compile(r"step-([0-9]{1,15})")
_STAGED = re.compile(r"\..+\.[0-9]{1,9}-step-([0-9]{1,15})")
_DAMAGED = re.compile(r"damaged-step-([0-9]{1,15})(?:\.[0-9]{1,9})?")


def checkpoint_name(step: int) -> str:
    """The directory name of a published checkpoint."""
    return f"step-{step}"


def checkpoint_step(name: str) -> int | None:
    """The step of a published checkpoint from its directory name; None for anything else, even temporary ones."""
    return _step(_STEP.fullmatch(name))


def _step(match: re.Match[str] | None) -> int | None:
    return int(match[1]) if match else None


def staging_name(attempt: str, step: int) -> str:
    """The directory name under which an attempt builds a checkpoint before publishing it; ``attempt``: its owner."""
    # By the attempt, since a process of the attempt before it may still be writing.
    return f".{attempt}-step-{step}"


def staged_step(name: str) -> int | None:
    """The step of a checkpoint that an attempt was building; None for anything else."""
    return _step(_STAGED.fullmatch(name))


def trash_name(name: str) -> str:
    """The directory name of a checkpoint while it is being deleted."""
    # A checkpoint gets this name before its first file is removed, so that it is either whole or gone.
    return f".trash-{name}"


def is_trash(name: str) -> bool:
    """Whether this is the name of a checkpoint that is being deleted."""
    return name.startswith(".trash-")


def damaged_name(step: int, number: int) -> str:
    """The name of a checkpoint moved aside because it could not be restored; ``number`` counts them for this step."""
    return f"damaged-{checkpoint_name(step)}" + (f".{number}" if number else "")


def damaged_step(name: str) -> int | None:
    """The step of a checkpoint that was moved aside as damaged; None for anything else."""
    return _step(_DAMAGED.fullmatch(name))


def outlives_deletion(path: str) -> bool:
    """Whether a file of a run is kept when the run's files are deleted.

    What says what the run was and did, from which the registry is rebuilt, is kept, and what other commands and a
    late agent go by; it is small, except metrics. Everything else goes.

    Args:
        path: The file, relative to the run directory.
    """
    folder, _, rest = path.partition("/")
    # A late process must find the claim of its successor, and journals are what the registry is rebuilt from.
    if folder in (JOURNALS, ENVIRONMENTS, "claims"):
        return True
    if folder == ATTEMPTS:
        return rest.count("/") == 1 and rest.endswith(".jsonl")
    if folder == "submissions":
        return rest.count("/") == 1 and rest.endswith(".json")
    return path in ("spec.yaml", "plan.json", "code.diff", "environment.txt", "lease.json", ".lock", "upstreams.json")


def put_aside(name: str) -> bool:
    """Whether an entry of a run directory has the checkpoints of before ``resume --from-start`` or ``--step``."""
    return name.startswith("checkpoints.before-attempt-")


def is_log(path: str) -> bool:
    """Whether a file is the output of ranks, agents or a job, which nothing but people and ``doctor`` read.

    Args:
        path: The file, relative to the run directory.
    """
    parts = path.split("/")
    if parts[0] == ATTEMPTS:
        return len(parts) == 4 and parts[2] == "logs" and ".log" in parts[3]
    if parts[0] != "submissions" or len(parts) < 3:
        return False
    return parts[2] == "controller.log" or (parts[2] == "submitit" and path.endswith((".out", ".err")))


def is_of_submitit(path: str) -> bool:
    """Whether a file is what a job was started with: submitit's pickle and the batch script.

    Args:
        path: The file, relative to the run directory.
    """
    parts = path.split("/")
    return parts[0] == "submissions" and len(parts) == 4 and parts[2] == "submitit" and not is_log(path)
