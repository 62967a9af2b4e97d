"""The Spec: what a user may write, key by key.

These dataclasses are the schema, the defaults and the reference (docs/spec.md is generated from them).
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

from slurmtrain.model.spec import fields as kinds
from slurmtrain.model.spec.fields import (
    Absent,
    Entries,
    Items,
    Levelled,
    Optional,
    Path,
    Scalar,
    Section,
    Short,
    option,
    type_name,
)
from slurmtrain.model.spec.sbatch import check_option

NETWORK_PROFILES = ("tcp", "infiniband", "roce", "efa", "gcp")
# What a check that fails does to a node.
LEVELS = ("off", "warn", "fail")
VERIFY = ("hashes", "sizes")

Conflict = tuple[str, str]


# --- names ------------------------------------------------------------------------------------------------------

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SECRET = re.compile(
    r"(?:^|[_.-])(?:pass(?:word|wd|phrase)?|secrets?|tokens?|credentials?|(?:api|access|private|secret|auth)_?keys?)$"
    r"|(?:password|secret|apikey)$",
    re.IGNORECASE,
)
_SECRET_VARIABLE = re.compile(r"(?:TOKEN|KEY|PASSWORD|PASSWD|SECRET|CREDENTIAL)S?$", re.IGNORECASE)
NAME_LIMIT = 64


def check_name(name: str) -> None:
    """Raise ValueError unless this can name a run, in a path, a job name and a shell alike."""
    if len(name) > NAME_LIMIT:
        raise ValueError(f"a name has at most {NAME_LIMIT} characters, this one has {len(name)}")
    if not _NAME.fullmatch(name):
        bad = sorted({character for character in name if not re.match(r"[A-Za-z0-9._-]", character)})
        why = f"{' '.join(map(repr, bad))} cannot be used" if bad else "it must begin with a letter or a digit"
        raise ValueError(f"{name!r} cannot name a run: {why}; use letters, digits, '.', '_' and '-'")


def is_secret_variable(name: str) -> bool:
    """Whether an environment variable of this name holds a secret: its value is kept out of every file."""
    return bool(_SECRET_VARIABLE.search(name))


def _check_variable(name: object) -> None:
    if not isinstance(name, str) or not _VARIABLE.fullmatch(name):
        raise ValueError(f"{name!r} cannot name an environment variable")


def _check_param(name: object) -> None:
    if not isinstance(name, str) or not name.strip():
        raise ValueError(f"expected a name, found {type_name(name)} ({name!r}); put it in quotes")
    if re.search(r"[.=\s\[\]{}$]", name):
        raise ValueError("a parameter's name cannot hold blanks, '.', '=', '$' or brackets")


# --- values -----------------------------------------------------------------------------------------------------


class _Param:
    """A parameter: a scalar, a list of scalars, or a mapping of such. A secret by its name is refused."""

    text = "text, number, true/false, null, a list of these, or a mapping of such"

    def read(self, value: object, at: Path, report: kinds.Report) -> Any:
        if isinstance(value, dict):
            return Entries(self, self.text, _check_param).read(value, at, report)
        if isinstance(value, list | tuple):
            for index, item in enumerate(value):
                here = (*at, str(index))
                if isinstance(item, dict | list | tuple):
                    report(here, f"a list of parameters holds scalars, found {type_name(item)}; use a mapping instead")
                else:
                    self._check_scalar(item, here, at[-1], report)
            return list(value)
        self._check_scalar(value, at, at[-1], report)
        return value

    def _check_scalar(self, value: object, at: Path, name: str, report: kinds.Report) -> None:
        if value is not None and not isinstance(value, bool | int | float | str):
            report(at, f"expected {self.text}, found {type_name(value)}; put it in quotes")
        if isinstance(value, str) and _SECRET.search(name):
            report(at, "this looks like a secret, and parameters are recorded; hand it over through 'env' instead")
        if isinstance(value, float) and not math.isfinite(value):
            report(at, "parameters are recorded as JSON, which has no such number; write it in quotes")

    def write(self, value: Any) -> object:
        return value


def _read_variable(value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError(f"expected text, found {type_name(value)} ({value!r}); put it in quotes")
    if "\0" in str(value):
        raise ValueError("a NUL character cannot be used here")
    return str(value)


def _read_sbatch_value(value: object) -> str | int | bool | None:
    if value is not None and not isinstance(value, str | int | bool):
        raise ValueError(f"expected text, a whole number, true or false, found {type_name(value)} ({value!r})")
    if isinstance(value, str) and re.search(r"[\n\r\0]", value):
        raise ValueError("an sbatch option cannot hold a line break")
    return value


def _read_setup_line(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"expected a line of shell, found {type_name(value)} ({value!r}); put it in quotes")
    if re.search(r"[\0\r]", value):
        raise ValueError("a carriage return or a NUL character cannot be used here")
    return value


def _read_every(value: object) -> Every:
    if value == "auto":
        return EveryAuto()
    if not isinstance(value, dict):
        raise ValueError(f"expected auto, {{steps: N}} or {{minutes: N}}, found {value!r}")
    if set(value) == {"steps", "minutes"}:
        raise ValueError("'steps' and 'minutes' exclude each other; keep one of them")
    if len(value) != 1 or next(iter(value)) not in ("steps", "minutes"):
        hint = "".join(kinds.suggestion(key, ("steps", "minutes")) for key in list(value)[:1])
        raise ValueError(f"expected {{steps: N}} or {{minutes: N}}, found {value!r}{hint}")
    ((unit, amount),) = value.items()
    if isinstance(amount, bool) or not isinstance(amount, int | float) or not 0 < amount < float("inf"):
        raise ValueError(f"expected a number of {unit} above zero, found {amount!r}")
    if unit == "steps" and not isinstance(amount, int):
        raise ValueError(f"expected a whole number of steps, found {amount!r}")
    return EverySteps(amount) if isinstance(amount, int) and unit == "steps" else EveryMinutes(amount)


def _read_nodes(value: object) -> Nodes:
    if isinstance(value, dict):
        unknown = [key for key in value if key not in ("min", "max")]
        if unknown or len(value) != 2:
            hint = "".join(kinds.suggestion(key, ("min", "max")) for key in unknown[:1])
            raise ValueError(f"expected a whole number of nodes, or {{min: N, max: N}}, found {value!r}{hint}")
        least, most = (_POSITIVE.parse(value[key]) for key in ("min", "max"))
        if least > most:
            raise ValueError(f"'min' is more than 'max': {least} > {most}")
        return Nodes(least, most)
    count = _POSITIVE.parse(value)
    return Nodes(count, count)


def _check_command(command: str) -> None:
    if re.search(r"[\n\r]", command.strip()):
        raise ValueError("a command is one line; fold it with '>-' or put the lines in a script")
    try:
        shlex.split(command)
    except ValueError as error:
        raise ValueError(f"the quotes of the command do not match ({error}): {command!r}") from None


def _check_uri(uri: str) -> None:
    if re.search(r"://[^/@\s]*:[^/@\s]*@", uri):
        raise ValueError(
            "credentials do not belong in a URI that is recorded; set "
            "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"
        )


def _check_interface(name: str) -> None:
    if not re.fullmatch(r"[^\s/=^,]{1,15}", name):
        raise ValueError(f"{name!r} cannot be an interface name; write 'auto' or one name such as eth0")


def _check_plugin(name: object) -> None:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValueError(f"{name!r} cannot name a check")


_POSITIVE = kinds.whole(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveMoment:
    """What decides whether a checkpoint is due: when the last save began, and what pays."""

    step: int
    """Finished steps."""
    since_save_s: float
    """Seconds since the last save began, or since training did."""
    optimum_s: float
    """The seconds between saves that lose least."""


@dataclass(frozen=True, slots=True)
class EveryAuto:
    """Save as often as it pays: the cost of a save is weighed against the work at risk."""

    def to_dict(self) -> object:
        """As it stands in YAML and JSON."""
        return "auto"

    def is_due(self, now: SaveMoment) -> bool:
        """Whether to save now."""
        return now.since_save_s >= now.optimum_s


@dataclass(frozen=True, slots=True)
class EveryMinutes:
    """Save every so many minutes."""

    minutes: float

    def to_dict(self) -> object:
        """As it stands in YAML and JSON."""
        return {"minutes": self.minutes}

    def is_due(self, now: SaveMoment) -> bool:
        """Whether to save now."""
        return now.since_save_s >= self.minutes * 60


@dataclass(frozen=True, slots=True)
class EverySteps:
    """Save every so many steps."""

    steps: int

    def to_dict(self) -> object:
        """As it stands in YAML and JSON."""
        return {"steps": self.steps}

    def is_due(self, now: SaveMoment) -> bool:
        """Whether to save now."""
        return now.step > 0 and now.step % self.steps == 0

    def next_step(self, step: int) -> int:
        """The first step after ``step`` that is saved."""
        return step - step % self.steps + self.steps


Every = EveryAuto | EveryMinutes | EverySteps
"""When to save: ``checkpoint.every``."""


@dataclass(frozen=True, slots=True)
class Nodes:
    """How many nodes train: at least ``min``, at most ``max``."""

    min: int
    max: int

    def to_dict(self) -> object:
        """As it stands in YAML and JSON."""
        return self.max if self.min == self.max else {"min": self.min, "max": self.max}

    def __str__(self) -> str:
        return str(self.max) if self.min == self.max else f"{self.min}-{self.max}"


# --- sections ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourcesSpec:
    """What a run asks for, node by node."""

    nodes: Nodes = option(
        Nodes(1, 1),
        Scalar("whole number, or `{min: N, max: N}`", _read_nodes, lambda nodes: nodes.to_dict()),
        "Nodes that train. With `{min: 2, max: 4}` an attempt begins with as many as it gets, and goes on with fewer "
        "when one is lost, without giving the others back.",
    )
    spares: int = option(
        0, kinds.whole(0), "Nodes that are held beside those that train, and take the place of one that is lost."
    )
    procs_per_node: int | None = option(
        None, Optional(_POSITIVE), "Processes a node; null: one a GPU, or one where there are no GPUs."
    )
    gpus_per_node: int = option(0, kinds.whole(0), "GPUs a node.")
    cpus_per_proc: int = option(1, _POSITIVE, "CPU cores a process; sets OMP_NUM_THREADS.")
    mem: int | None = option(
        None,
        Optional(Scalar("amount with a unit, such as `4GB`", kinds.parse_memory, lambda mib: f"{mib}M")),
        "Memory of a node, in units of 1024; null: the partition's default. Not enforced by the local executor.",
    )
    time: int | None = option(
        None,
        Optional(
            Scalar(
                'time in quotes, such as `"12:00:00"` or `"2-12"`, or minutes',
                kinds.parse_duration,
                kinds.write_duration,
            )
        ),
        "Time limit of one attempt, in Slurm's formats; null: the partition's limit, or none locally.",
    )

    def conflicts(self) -> Iterator[Conflict]:
        if self.procs_per_node and self.gpus_per_node and self.procs_per_node % self.gpus_per_node:
            yield (
                "procs_per_node",
                f"{self.procs_per_node} processes cannot share {self.gpus_per_node} GPUs evenly",
            )

    @property
    def allocated(self) -> Nodes:
        """Nodes of the job, the spare ones included."""
        return Nodes(self.nodes.min + self.spares, self.nodes.max + self.spares)

    @property
    def elastic(self) -> bool:
        """Whether a job goes on when one of its nodes is lost."""
        return self.spares > 0 or self.nodes.min < self.nodes.max

    @property
    def local_world_size(self) -> int:
        """Processes a node."""
        return self.procs_per_node or self.gpus_per_node or 1


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkSpec:
    """How nodes reach each other."""

    interface: str = option(
        "auto", kinds.text("`auto` or an interface name", _check_interface), "The interface for training traffic."
    )
    profile: str | None = option(
        None, Optional(kinds.choice(*NETWORK_PROFILES)), "Variables that suit a kind of network; null: none."
    )


def _level(default: str) -> Any:
    return option(
        default,
        kinds.level(*LEVELS),
        "`fail`: a node that fails it is not used; `warn`: it is only told; `off`: it is not made.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """A check that has no limits to set."""

    level: str = _level("fail")


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """A check that has no limits to set, and that only warns unless it is told to do more."""

    level: str = _level("warn")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockCheck:
    """How far node clocks may be apart."""

    level: str = _level("fail")
    warn_ms: float = option(50, kinds.number(0), "Offset from node 0, in milliseconds, at which to warn.")
    fail_ms: float = option(1000, kinds.number(0), "Offset from node 0, in milliseconds, at which to refuse the node.")

    def conflicts(self) -> Iterator[Conflict]:
        if self.warn_ms is not None and self.fail_ms is not None and self.warn_ms > self.fail_ms:
            yield "warn_ms", f"{self.warn_ms:g} is above fail_ms ({self.fail_ms:g}); a warning comes before a failure"


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkCheck:
    """The proof that nodes reach each other over the network that training is to use."""

    level: str = _level("fail")
    timeout_s: float = option(2, kinds.number(0.1), "Seconds within which a connection must have been proved.")


@dataclass(frozen=True, slots=True, kw_only=True)
class DnsCheck:
    """How long a reverse look-up of the node's own address takes: libraries make many, and wait for each."""

    level: str = _level("warn")
    max_ms: float = option(1000, kinds.number(0), "Milliseconds that it may take.")


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedCheck:
    """Whether all nodes see what one of them has written to the run directory."""

    level: str = _level("fail")
    timeout_s: float = option(10, kinds.number(0.1), "Seconds within which every node must see it.")


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskCheck:
    """Room in the run directory."""

    level: str = _level("fail")
    min_gb: float = option(1, kinds.number(0), "GB that must be free.")


@dataclass(frozen=True, slots=True, kw_only=True)
class TemporaryCheck:
    """Room in TMPDIR, or else /tmp, of each node."""

    level: str = _level("warn")
    min_gb: float = option(1, kinds.number(0), "GB that should be free.")


@dataclass(frozen=True, slots=True, kw_only=True)
class ShmCheck:
    """Room in /dev/shm, through which data loaders and NCCL hand over what they have."""

    level: str = _level("warn")
    min_gb: float = option(1, kinds.number(0), "GB that should be free.")


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitsCheck:
    """What the kernel lets a process have."""

    level: str = _level("warn")
    min_nofile: int = option(4096, kinds.whole(0), "Open files of a process (`ulimit -n`).")
    min_memlock_gb: float | None = option(
        None,
        Optional(kinds.number(0)),
        "GB of locked memory (`ulimit -l`); null: no limit at all on networks with RDMA, anything elsewhere.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuCheck:
    """GPUs: as many as were asked for, without uncorrected memory errors, unused, and able to multiply."""

    level: str = _level("fail")
    max_used_mb: int = option(2048, kinds.whole(0), "MB of a GPU's memory that may be in use before training starts.")


@dataclass(frozen=True, slots=True, kw_only=True)
class StragglerCheck:
    """How long a small matrix product takes, beside the median of all nodes."""

    level: str = _level("warn")
    max_ratio: float = option(2, kinds.number(1), "How many times the median it may take.")


@dataclass(frozen=True, slots=True, kw_only=True)
class BandwidthCheck:
    """An all-reduce over the elected network, as nccl-tests measure it. It takes some seconds."""

    level: str = option(
        "off",
        kinds.level(*LEVELS),
        "`fail`: nodes that do not reach the limit end the attempt; `warn`: it is measured and told; `off`: it is not "
        "made.",
    )
    size_mb: float = option(64, kinds.number(0.001), "MB that each rank reduces.")
    min_gb_per_s: float | None = option(
        None, Optional(kinds.number(0)), "GB/s of bus bandwidth that must be reached; null: no limit."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PreflightSpec:
    """Checks of the nodes before training starts. Each takes a level alone (`dns: off`) or a mapping."""

    exclude: bool = option(
        True, kinds.flag(), "Whether to go on without nodes that failed a check; Slurm then gives others."
    )
    timeout_s: float = option(30, kinds.number(1), "Seconds that any one check may take.")
    clock: ClockCheck = option(ClockCheck(), Levelled(ClockCheck), "Clocks of the nodes.")
    network: NetworkCheck = option(NetworkCheck(), Levelled(NetworkCheck), "Connections between the nodes.")
    port: Check = option(Check(), Levelled(Check), "The port that training meets at.")
    shared: SharedCheck = option(SharedCheck(), Levelled(SharedCheck), "The run directory is shared by all nodes.")
    versions: Check = option(Check(), Levelled(Check), "Python, torch, CUDA, driver and NCCL are the same everywhere.")
    gpu: GpuCheck = option(GpuCheck(), Levelled(GpuCheck), "GPUs; passed over where none are asked for.")
    disk: DiskCheck = option(DiskCheck(), Levelled(DiskCheck), "Room in the run directory.")
    tmp: TemporaryCheck = option(TemporaryCheck(), Levelled(TemporaryCheck), "Room in TMPDIR.")
    shm: ShmCheck = option(ShmCheck(), Levelled(ShmCheck), "Room in /dev/shm.")
    limits: LimitsCheck = option(LimitsCheck(), Levelled(LimitsCheck), "Limits of a process.")
    dns: DnsCheck = option(DnsCheck(), Levelled(DnsCheck), "Reverse look-up of addresses.")
    straggler: StragglerCheck = option(StragglerCheck(), Levelled(StragglerCheck), "Nodes that are slower than others.")
    environment: Advice = option(Advice(), Levelled(Advice), "Variables that are obsolete, or that undo the choice.")
    bandwidth: BandwidthCheck = option(BandwidthCheck(), Levelled(BandwidthCheck), "How fast the network is.")
    plugins: dict[str, str] = option(
        {},
        Entries(kinds.level(*LEVELS), "mapping of checks to levels", _check_plugin),
        "Levels of your own checks, by the names of their entry points; by default `fail`.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Best:
    """The checkpoints that are best by a metric, as `run.log` had it last before the save."""

    metric: str = option("", kinds.text("name of a metric"), "The metric, by its name in `run.log`.", required=True)
    mode: str = option("min", kinds.choice("min", "max"), "Whether a low value of it is good, or a high one.")
    n: int = option(1, _POSITIVE, "How many to keep; of equal ones the later.")


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepSpec:
    """Which checkpoints stay; the others are deleted after a save. `keep: 3` alone is `keep: {last: 3}`."""

    last: int = option(
        3,
        kinds.whole(1, why="a run goes on from its newest checkpoint, which must stay"),
        "How many of the newest; with 1 there is none to go back to if it is damaged.",
    )
    every_steps: int | None = option(
        None, Optional(_POSITIVE), "For each multiple of so many steps the first one at or after it; null: none."
    )
    best: Best | None = option(None, Absent(Best), "The best by a metric; null: none.")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSpec:
    """When to save, and what to keep."""

    every: Every = option(
        EveryAuto(),
        Scalar("`auto`, `{steps: N}` or `{minutes: N}`", _read_every, lambda every: every.to_dict()),
        "When `slurmtrain.session()` saves; auto weighs the cost of a save against the work at risk.",
    )
    keep: KeepSpec = option(
        KeepSpec(), Short(KeepSpec, "last"), "Which checkpoints stay; a number alone: so many of the newest."
    )
    verify: str = option(
        "hashes",
        kinds.choice(*VERIFY),
        "What of a checkpoint's files must be as it was written before a run goes on from it; sizes cost no reading.",
    )
    quota: int | None = option(
        None,
        Optional(Scalar("amount with a unit, such as `100GB`", kinds.parse_size, kinds.write_size)),
        "Room that the checkpoints of the run may take, in units of 1024. Before a save that would go beyond it, those "
        "that `keep` lets go are deleted; if that is not enough, there is a warning. null: no limit.",
    )
    glob: str | None = option(
        None,
        Optional(kinds.text("pattern of file names")),
        "Where a script of your own leaves its checkpoints, relative to `workdir`; the newest complete one is handed "
        "to the next attempt as `{resume_from}` and SLURMTRAIN_RESUME_FROM.",
    )

    def conflicts(self) -> Iterator[Conflict]:
        if not self.glob:
            return
        untouched = CheckpointSpec()
        for key, does in _OF_THE_SCRIPT.items():
            if getattr(self, key) != getattr(untouched, key):
                yield "glob", f"'glob' and {key!r} exclude each other: with 'glob' your own script {does}"


# What is up to a script that brings its own checkpoints.
_OF_THE_SCRIPT = {
    "every": "decides when to save",
    "keep": "deletes what it no longer needs",
    "verify": "looks at what it loads",
    "quota": "minds the room that they take",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RequeueSpec:
    """What becomes of a run that was interrupted. Preemptions are free, and time limits while it makes progress."""

    enabled: bool = option(True, kinds.flag(), "Whether a run that was interrupted is started again by itself.")
    max_failures: int = option(
        3,
        kinds.whole(0),
        "Crashes and hangs after which a run starts again, restarts in place included; then it is given up. "
        "`slurmtrain resume` counts anew.",
    )
    max_node_failures: int = option(
        10, kinds.whole(0), "How often in a row a run starts again after nodes have failed, without a new checkpoint."
    )
    restarts_in_place: int = option(
        3, kinds.whole(0), "How often the processes of one attempt are started again without giving its nodes back."
    )
    backoff_s: float = option(
        30,
        kinds.number(0),
        "Seconds before a run starts again after a crash; twice as many after each further one.",
    )
    hang_after: float | None = option(
        None,
        Optional(kinds.number(1)),
        "Seconds without a finished step that count as a hang; null: ten times the median step, at least a minute.",
    )
    signal: str = option(
        "SIGTERM",
        kinds.choice("SIGTERM", "SIGUSR1", "SIGUSR2", "SIGINT"),
        "What a script without `slurmtrain.session()` is sent when it is to save and leave.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class MlflowSpec:
    """Where metrics are mirrored to."""

    enabled: bool = option(True, kinds.flag(), "Whether `sync` mirrors this run to MLflow.")
    uri: str | None = option(
        None,
        Optional(kinds.text("URI", _check_uri)),
        "MLflow tracking URI; null: the configured one, or mlflow.db in the runs root.",
    )
    experiment: str | None = option(None, Optional(kinds.text("name")), "MLflow experiment; null: the run's name.")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackingSpec:
    """Experiment tracking."""

    mlflow: MlflowSpec = option(MlflowSpec(), Section(MlflowSpec), "MLflow.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """The top level of a spec."""

    name: str = option("", kinds.text("name", check_name), "Name of the run; by default the file's name.")
    command: str = option(
        "",
        kinds.text("command", _check_command),
        "What each process runs. `python` is the one on the submitter's PATH. `{resume_from}`, `{run_dir}`, "
        "`{checkpoint_dir}`, `{run_id}` and `{attempt}` are filled in; no shell is involved.",
        required=True,
    )
    workdir: str | None = option(
        None, Optional(kinds.text("directory")), "Where the command runs; null: the directory `submit` was called from."
    )
    params: dict[str, Any] = option(
        {},
        Entries(_Param(), "mapping of parameters", _check_param),
        "Parameters: they reach the script, sweeps vary them, MLflow logs them.",
    )
    resources: ResourcesSpec = option(ResourcesSpec(), Section(ResourcesSpec), "What a run asks for.")
    slurm: dict[str, Any] = option(
        {},
        Entries(
            Scalar("text, whole number, true or false", _read_sbatch_value), "mapping of sbatch options", check_option
        ),
        "Any sbatch option by its long name, with `-` or `_`. True gives the bare flag, false or null leaves it out.",
    )
    network: NetworkSpec = option(NetworkSpec(), Section(NetworkSpec), "How nodes reach each other.")
    preflight: PreflightSpec = option(
        PreflightSpec(), Section(PreflightSpec), "Checks of the nodes before training starts."
    )
    checkpoint: CheckpointSpec = option(CheckpointSpec(), Section(CheckpointSpec), "When to save, and what to keep.")
    requeue: RequeueSpec = option(RequeueSpec(), Section(RequeueSpec), "What becomes of a run that was interrupted.")
    tracking: TrackingSpec = option(TrackingSpec(), Section(TrackingSpec), "Experiment tracking.")
    env: dict[str, str] = option(
        {},
        Entries(Scalar("text or number", _read_variable), "mapping of environment variables", _check_variable),
        "Environment variables of the processes. Values of names that end in TOKEN, KEY, PASSWORD, PASSWD, SECRET or "
        "CREDENTIAL are never recorded.",
    )
    setup: tuple[str, ...] = option(
        (),
        Items(Scalar("line of shell", _read_setup_line), "list of shell lines"),
        "Shell lines before the tasks of a node start, for example `module load cuda`.",
    )

    def conflicts(self) -> Iterator[Conflict]:
        names: dict[str, str] = {}
        for key in self.slurm:
            same = names.setdefault(key.replace("_", "-"), key)
            if same != key:
                yield "slurm", f"{same!r} and {key!r} are the same sbatch option; keep one of them"
        if self.resources.mem is not None:
            for key in names.keys() & {"mem-per-cpu", "mem-per-gpu"}:
                yield "slurm", f"{names[key]!r} and 'resources.mem' exclude each other; keep one of them"
        if self.command and "{resume_from}" in self.command and not self.checkpoint.glob:
            yield "command", "'{resume_from}' needs to know where checkpoints are: set 'checkpoint.glob'"


def read_spec(data: object, report: Callable[[Path, str], None]) -> Spec:
    """Read a whole spec; every mistake goes to ``report``, and the result has no meaning if there was one."""
    spec: Spec = Section(Spec).read(data, (), report)
    return spec


def read_requeue(plain: Mapping[str, Any]) -> RequeueSpec:
    """The section ``requeue`` from what :func:`write_requeue` gave, by this version or another one."""
    known = {f.name for f in fields(RequeueSpec)}
    return RequeueSpec(**{name: value for name, value in plain.items() if name in known})


def write_requeue(requeue: RequeueSpec) -> dict[str, Any]:
    """The section ``requeue`` as plain data."""
    return {f.name: getattr(requeue, f.name) for f in fields(RequeueSpec)}


def write_spec(spec: Spec) -> dict[str, Any]:
    """The spec as plain data with every default filled in; :func:`read_spec` gives the same spec back."""
    plain: Any = Section(Spec).write(spec)
    return dict(plain)


def walk_keys(cls: type = Spec, at: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Every key of the schema with its dataclass field, sections before their keys."""
    for f in fields(cls):
        yield (*at, f.name), f
        if isinstance(f.metadata["kind"], Section):
            yield from walk_keys(f.metadata["kind"].cls, (*at, f.name))


kinds.HOMES.update({path[-1]: ".".join(path[:-1]) for path, _ in reversed(list(walk_keys()))})
