"""The spec: its sections and keys, with their defaults and their texts in the reference (docs/spec.md is generated).

Larger sections have modules of their own, such as :mod:`slurmtrain.model.spec.preflight_checks`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from slurmtrain.model.passwords import check_tracking_uri
from slurmtrain.model.spec import kinds
from slurmtrain.model.spec.chain import DEPENDENCIES
from slurmtrain.model.spec.checkpoint import (
    OF_CHECKPOINT,
    OWN,
    CheckpointSpec,
    StartFromSection,
    StartFromSpec,
    conditional_problem,
)
from slurmtrain.model.spec.code import CodeSpec
from slurmtrain.model.spec.kinds import (
    Conflict,
    Entries,
    Items,
    KeyPath,
    Nullable,
    Scalar,
    Section,
    ShorthandSection,
    declare_key,
)
from slurmtrain.model.spec.launcher import LAUNCHERS, NODE, RANKS, choose_launcher
from slurmtrain.model.spec.preflight_checks import PreflightSpec
from slurmtrain.model.spec.resources import GpuSection, ResourcesSpec, options_of_component
from slurmtrain.model.spec.restarts import OomSection, OomSpec
from slurmtrain.model.spec.sbatch import (
    PASSED,
    SLURM_SECTION,
    SRUN,
    check_log,
    named_options,
    repeated_options,
)
from slurmtrain.model.spec.strategy import StrategySection, StrategySpec, mixed_conflicts, placement_conflicts
from slurmtrain.model.spec.tracking import (
    CsvSpec,
    PluginSettings,
    ScriptMetricsSection,
    ScriptMetricsSpec,
    TensorboardSpec,
    WandbSpec,
    check_plugin_name,
    tracker_settings,
)
from slurmtrain.model.spec.values import (
    ParamKind,
    ShellLines,
    check_command,
    check_experiment_name,
    check_interface,
    check_name,
    check_param_name,
    check_variable_name,
    parse_span,
    read_setup_line,
    read_variable,
    write_duration,
)

# Whose commands must have ended for a run to be completed.
ALL, NODE_0 = "all", "node0"
NETWORK_PROFILES = ("tcp", "infiniband", "roce", "efa", "gcp")
EXIT_ZERO = ("auto", "completed")
# What NumPy takes, and Python for its hashes of text.
_LARGEST_SEED = 2**32 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkSpec:
    """How nodes communicate."""

    interface: str = declare_key(
        "auto", kinds.text("`auto` or an interface name", check_interface), "The interface for training traffic."
    )
    profile: str | None = declare_key(
        None,
        Nullable(kinds.choice(*NETWORK_PROFILES)),
        "The kind of network; sets environment variables of the ranks. null: none.",
    )


# sbatch(1), --signal: the seconds are a number of 16 bits.
_LONGEST_LEAD_S = 65535


def _read_lead(value: object) -> int:
    """``requeue.lead``, in seconds. Raises ValueError."""
    seconds = parse_span(value)
    if seconds > _LONGEST_LEAD_S:
        raise ValueError(f"Slurm takes at most {_LONGEST_LEAD_S}s, found {value!r}")
    return seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class RequeueSpec:
    """What happens to an interrupted run. Preemptions and, while it makes progress, time limits use up no budget."""

    enabled: bool = declare_key(True, kinds.boolean(), "Whether an interrupted run is restarted automatically.")
    max_failures: int = declare_key(
        3,
        kinds.whole_number(0),
        "How many crashes and hangs a run survives, including those handled in place; then it fails. "
        "`slurmtrain resume` resets the count.",
    )
    max_node_failures: int = declare_key(
        10,
        kinds.whole_number(0),
        "How many node failures in a row a run survives without a new checkpoint; then it fails.",
    )
    restarts_in_place: int = declare_key(
        3,
        kinds.whole_number(0),
        "How often the ranks of an attempt are restarted on the same nodes.",
    )
    backoff_s: float = declare_key(
        30,
        kinds.finite_number(0),
        "Seconds to wait before a restart after a crash; doubled with each further crash.",
    )
    hang_after: float | None = declare_key(
        None,
        Nullable(kinds.finite_number(1)),
        "Seconds without a finished step that count as a hang; null: ten times the median step, at least a minute.",
    )
    signal: str = declare_key(
        "SIGTERM",
        kinds.choice("SIGTERM", "SIGUSR1", "SIGUSR2", "SIGINT"),
        "The signal that asks a script without `slurmtrain.session()` to save and exit.",
    )
    lead: int | None = declare_key(
        None,
        Nullable(Scalar("time such as `300s`", _read_lead, write_duration)),
        "How long before the time limit ranks are asked to stop; null: 90 s on a cluster and 30 s on this machine, a "
        "tenth of a short limit, and longer if saving is known to take longer.",
    )
    oom: OomSpec | None = declare_key(
        None, OomSection(OomSpec), "What a run gets that ran out of memory; null: it fails."
    )
    keep_nodes: int | None = declare_key(
        None,
        Nullable(Scalar("time such as `10m`", parse_span, write_duration)),
        "How long a job keeps its nodes after a failure, so that a person can look at them, before the run is started "
        "again or fails; null: not at all. On a cluster only.",
    )
    exit_zero: str = declare_key(
        "auto",
        kinds.choice(*EXIT_ZERO),
        "What it means that a script exits with code 0 after it was asked to stop. auto: it stopped, and the run "
        "continues, unless its session or trainer has said that the work is done; completed: the work is done.",
    )

    @property
    def zero_completes(self) -> bool:
        """Whether exit code 0 means that the work is done, also after a stop request."""
        return self.exit_zero == "completed"


@dataclass(frozen=True, slots=True, kw_only=True)
class MlflowSpec:
    """Mirroring metrics to MLflow."""

    enabled: bool = declare_key(True, kinds.boolean(), "Whether `sync` mirrors this run to MLflow.")
    uri: str | None = declare_key(
        None,
        Nullable(kinds.text("URI", check_tracking_uri)),
        "MLflow tracking URI; null: the configured one, else mlflow.db in the runs root.",
    )
    experiment: str | None = declare_key(
        None,
        Nullable(kinds.text("name", check_experiment_name)),
        "MLflow experiment; null: the name of the spec's file or, where that says little, as `train` does, its "
        "directory's.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackingSpec:
    """Experiment tracking."""

    mlflow: MlflowSpec = declare_key(MlflowSpec(), Section(MlflowSpec), "MLflow.")
    wandb: WandbSpec = declare_key(WandbSpec(), Section(WandbSpec), "Weights & Biases.")
    tensorboard: TensorboardSpec = declare_key(TensorboardSpec(), Section(TensorboardSpec), "TensorBoard.")
    csv: CsvSpec = declare_key(CsvSpec(), Section(CsvSpec), "CSV files.")
    plugins: dict[str, dict[str, Any]] = declare_key(
        {},
        Entries(PluginSettings(), "mapping of trackers to their settings", check_plugin_name),
        "Trackers of other packages, by name, with settings of their own.",
    )
    live: bool = declare_key(
        False,
        kinds.boolean(),
        "Whether trackers that cannot delete points also show those that a rollback may still reach, as `live/NAME`.",
    )
    metrics: ScriptMetricsSpec | None = declare_key(
        None,
        ScriptMetricsSection(ScriptMetricsSpec),
        "Where step and metrics of a script stand that does not report them itself; null: it does.",
    )
    system_metrics: bool = declare_key(
        True,
        kinds.boolean(),
        "Whether each node measures how busy its processors and GPUs are, and their memory.",
    )

    @property
    def trackers(self) -> Mapping[str, Mapping[str, Any]]:
        """The settings of the trackers that are switched on, by name."""
        return tracker_settings(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """The top level of a spec."""

    name: str = declare_key("", kinds.text("name", check_name), "Name of the run; by default the file's name.")
    command: str = declare_key(
        "",
        kinds.text("command", check_command),
        "What each process runs. `python` is the one on the submitter's PATH, unless `setup` changes that. "
        "`{resume_from}`, `{resume_dir}`, `{resume_tag}`, `{run_dir}`, `{checkpoint_dir}`, `{run_id}` and `{attempt}` "
        "are substituted; `{resume_from?TEXT}` is the text if there is a checkpoint, else nothing. No shell is "
        "involved.",
        required=True,
    )
    launcher: str | None = declare_key(
        None,
        Nullable(kinds.choice(*LAUNCHERS)),
        "What starts the processes that train. `ranks`: slurmtrain, `procs_per_node` on each node. `node`: the "
        "command, such as torchrun, which is started once per node. `none`: the same, without variables that a library "
        "takes for its own. null: `node` if the command starts with torchrun, accelerate launch or deepspeed, else "
        "`ranks`.",
    )
    completed_by: str = declare_key(
        ALL,
        kinds.choice(ALL, NODE_0),
        "With `launcher: node` or `none`: whose command must have ended with code 0 for the run to be completed. "
        "`node0`: that of the first node, whereupon those of the other nodes are asked to stop, as Ray's workers and "
        "data services must be; `all`: those of all nodes.",
    )
    workdir: str | None = declare_key(
        None,
        Nullable(kinds.text("directory")),
        "Where the command runs; null: the directory in which `submit` was called.",
    )
    log: str | None = declare_key(
        None,
        Nullable(kinds.text("path such as `logs/%x-%j.out`", check_log)),
        "The path of a link to the log of rank 0 of each attempt, relative to `workdir`, with sbatch's patterns: `%x` "
        "is the name, `%j` the job's id, `%A_%a` that of an element of an array, `%u` the user, `%N` the first node. "
        "Logs themselves are in the run directory. null: none.",
    )
    code: CodeSpec = declare_key(
        CodeSpec(), ShorthandSection(CodeSpec, "mode"), "Which code the run executes, also after a requeue."
    )
    after: tuple[str, ...] = declare_key(
        (),
        DEPENDENCIES,
        "Runs that must have completed before this one starts, by name or id; also the id of a sweep, for all of its "
        "runs. A name means the spec of that name in the same `submit`, else the newest run of that name. "
        "`afterany:NAME`: they must have ended, however. See [chains.md](chains.md).",
    )
    params: dict[str, Any] = declare_key(
        {},
        Entries(ParamKind(), "mapping of parameters", check_param_name),
        "Parameters of the script, which sweeps vary and MLflow logs.",
    )
    seed: int | None = declare_key(
        None,
        Nullable(kinds.whole_number(0, _LARGEST_SEED)),
        "Seeds the random numbers of Python, NumPy and torch, the same in all ranks, and Python's hashes of text; "
        "null: they differ each time.",
    )
    deterministic: bool = declare_key(
        False,
        kinds.boolean(),
        "Whether torch uses only algorithms that give the same bits each time. Some are slower, and an operation that "
        "has none fails.",
    )
    strategy: StrategySpec | None = declare_key(
        None,
        StrategySection(),
        "How `run.parallelize(model)` distributes the model over the processes; null: as `ddp`. See "
        "[strategies.md](strategies.md).",
    )
    resources: ResourcesSpec = declare_key(ResourcesSpec(), GpuSection(ResourcesSpec), "Resources of the run.")
    slurm: dict[str, Any] = declare_key(
        {},
        SLURM_SECTION,
        "sbatch options by their long names, with `-` or `_`, also of the site's plug-ins: see "
        "[slurm-options.md](slurm-options.md). true means without a value, false or null omits it. `sbatch` and `srun` "
        "hold lists of options as they are typed.",
    )
    network: NetworkSpec = declare_key(NetworkSpec(), Section(NetworkSpec), "How nodes communicate.")
    preflight: PreflightSpec = declare_key(
        PreflightSpec(), Section(PreflightSpec), "Checks of the nodes before training starts."
    )
    checkpoint: CheckpointSpec = declare_key(
        CheckpointSpec(), Section(CheckpointSpec), "When to save checkpoints, and which to keep."
    )
    start_from: StartFromSpec | None = declare_key(
        None, StartFromSection(), "The checkpoint of another run to begin with; null: none."
    )
    requeue: RequeueSpec = declare_key(RequeueSpec(), Section(RequeueSpec), "What happens to an interrupted run.")
    tracking: TrackingSpec = declare_key(TrackingSpec(), Section(TrackingSpec), "Experiment tracking.")
    env: dict[str, str] = declare_key(
        {},
        Entries(
            Scalar("text or number", read_variable, is_text=True),
            "mapping of environment variables",
            check_variable_name,
        ),
        "Environment variables of the processes. Values of variables whose names end in TOKEN, KEY, PASSWORD, PASSWD, "
        "SECRET or CREDENTIAL, and URLs with a password, are never recorded.",
    )
    setup: tuple[str, ...] = declare_key(
        (),
        ShellLines(),
        "Shell lines, such as `module load cuda`, that run once, on the first node, before everything else; what they "
        "export reaches all nodes. A line that fails ends the attempt. See [setup.md](setup.md). They are recorded: "
        "secrets belong in `env`.",
    )
    setup_node: tuple[str, ...] = declare_key(
        (), ShellLines(), "The same on each node, before its ranks; what they export reaches the ranks of the node."
    )
    sidecars: tuple[str, ...] = declare_key(
        (),
        Items(Scalar("line of shell", read_setup_line), "list of shell lines"),
        "Commands, as lines of shell, that run beside the ranks on each node, such as monitors and servers, and end "
        "with the attempt. If one of them ends by itself, the run goes on.",
    )
    teardown: tuple[str, ...] = declare_key(
        (),
        ShellLines(),
        "Shell lines that run on each node after its ranks, however these ended, also without any, for at most a "
        "minute, and within the grace of a stop.",
    )

    @property
    def per_node(self) -> bool:
        """Whether the command is started once per node, and starts the ranks. In a plan, null means ``ranks``."""
        return self.launcher not in (None, RANKS)

    @property
    def calls_launcher(self) -> bool:
        """Whether the command gets the variables and options by which launchers find the other nodes."""
        return self.launcher == NODE

    @property
    def components(self) -> list[Spec]:
        """What each component of the job requests, as if it were a job of its own; without components, this spec."""
        options, of_srun = named_options(self.slurm), {SRUN: self.slurm[SRUN]} if SRUN in self.slurm else {}
        return [
            replace(self, resources=resources, slurm={**options, **options_of_component(options, component), **of_srun})
            for component, resources in self.resources.by_component()
        ] or [self]

    def conflicts(self) -> Iterator[Conflict]:
        """Keys that contradict each other, and why."""
        for first, again in repeated_options(self.slurm):
            yield "slurm", f"{first!r} and {again!r} are the same sbatch option; keep one of them"
        # sbatch takes only one of --mem, --mem-per-cpu and --mem-per-gpu.
        if self.resources.mem is not None:
            for name in {"mem-per-cpu", "mem-per-gpu"} & named_options(self.slurm).keys():
                yield "slurm", f"{name!r} and 'resources.mem' exclude each other; keep one of them"
        lead, limit = self.requeue.lead, self.resources.time
        if lead is not None and limit is not None and lead >= limit:
            yield (
                "requeue",
                f"'lead' asks ranks to stop {lead} s before the time limit, and 'resources.time' is {limit} s: write "
                f"'lead: {max(1, limit // 10)}s', or raise 'resources.time'",
            )
        if self.completed_by == NODE_0 and self.command and (self.launcher or choose_launcher(self.command)) == RANKS:
            yield (
                "completed_by",
                "slurmtrain starts the ranks, and a run ends with all of them: leave this out, or set 'launcher: none' "
                "for a command that is started once per node",
            )
        yield from self._oom_conflicts()
        yield from self._strategy_conflicts()
        if self.resources.mixed:
            yield from self._mixed_conflicts()
        # A wrong command is None.
        if self.command:
            yield from self._placeholder_conflicts()

    def _placeholder_conflicts(self) -> Iterator[Conflict]:
        if problem := conditional_problem(self.command):
            yield "command", problem
        for name in OF_CHECKPOINT:
            if not re.search(rf"\{{{name}[?}}]", self.command):
                continue
            if not self.checkpoint.glob:
                yield "command", f"'{{{name}}}' needs to know where checkpoints are: set 'checkpoint.glob'"
            elif self.checkpoint.format == OWN:
                yield "command", f"'{{{name}}}' is always empty with 'checkpoint.format: own'; remove one of the two"

    def _strategy_conflicts(self) -> Iterator[Conflict]:
        # A number of nodes that cannot be read is None, and is reported already.
        if self.strategy is not None and self.resources.nodes:
            for message in placement_conflicts(
                self.strategy,
                least=self.resources.nodes.min,
                ranks=self.resources.most_ranks,
                mem=self.resources.mem,
            ):
                yield "strategy", message

    def _mixed_conflicts(self) -> Iterator[Conflict]:
        for message in mixed_conflicts(self.strategy) if self.strategy is not None else ():
            yield "resources", message
        if self.deterministic:
            yield (
                "resources",
                "'mixed' divides batches by measured times, which no two runs repeat: not 'deterministic'",
            )

    def _oom_conflicts(self) -> Iterator[Conflict]:
        oom = self.requeue.oom
        if oom is None:
            return
        if oom.at_most is not None and self.resources.components:
            yield "requeue", "'oom.at_most' raises 'resources.mem', of which each component has its own: leave it out"
        elif oom.at_most is not None and self.resources.mem is None:
            yield "requeue", "'oom.at_most' lets it raise 'resources.mem': set 'resources.mem', such as '4GB', too"
        elif oom.at_most is not None and self.resources.mem == 0:
            yield "requeue", "'oom.at_most' lets it raise 'resources.mem', which is all memory of a node: leave it out"
        elif oom.at_most is not None and 0 < oom.at_most < (self.resources.mem or 0):
            yield "requeue", "'oom.at_most' is less than 'resources.mem'"
        # A wrong number is None.
        if oom.accumulation and (self.resources.accumulation or 1) > (oom.max_accumulation or math.inf):
            yield "requeue", "'oom.max_accumulation' is less than 'resources.accumulation'"


def read_spec(data: object, report: kinds.Report) -> Spec:
    """Read a whole spec; every mistake goes to ``report``, and if there is one the result must not be used."""
    spec: Spec = Section(Spec).read(data, (), report)
    return spec


def read_requeue(plain: Mapping[str, Any]) -> RequeueSpec:
    """The section ``requeue`` from what :func:`write_requeue` returned, in this version or another one.

    It comes from a journal: invalid values become defaults, since no user could repair them.
    """
    usable = {}
    for key in fields(RequeueSpec):
        mistakes: list[str] = []
        if key.name in plain:
            value = key.metadata["kind"].read(plain[key.name], (), lambda _at, message, to=mistakes: to.append(message))
            if not mistakes:
                usable[key.name] = value
    return RequeueSpec(**usable)


def write_requeue(requeue: RequeueSpec) -> dict[str, Any]:
    """The section ``requeue`` as plain data."""
    return {f.name: f.metadata["kind"].write(getattr(requeue, f.name)) for f in fields(RequeueSpec)}


def write_spec(spec: Spec) -> dict[str, Any]:
    """The spec as plain data with every default filled in; :func:`read_spec` returns the same spec."""
    plain: Any = Section(Spec).write(spec)
    return dict(plain)


def walk_keys(cls: type = Spec, at: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    """Every key of the schema with its dataclass field, sections before their keys."""
    for f in fields(cls):
        yield (*at, f.name), f
        if isinstance(f.metadata["kind"], Section):
            yield from walk_keys(f.metadata["kind"].cls, (*at, f.name))


# If several sections have a key of the same name, the first one wins, hence the reversed order.
kinds.HOMES.update({option.replace("-", "_"): ("slurm",) for option in PASSED})
kinds.HOMES.update({path[-1]: path[:-1] for path, _ in reversed(list(walk_keys()))})
