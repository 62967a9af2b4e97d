"""The spec: its sections and keys, with their defaults and their texts; docs/reference/spec.md is generated from it.

Larger sections have modules of their own, such as :mod:`slurmtrain.model.experiment.sections`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

from slurmtrain.model.experiment import kinds
from slurmtrain.model.experiment.chain import DEPENDENCIES
from slurmtrain.model.experiment.checkpoint import CheckpointSpec, StartFromSpec, placeholder_problems
from slurmtrain.model.experiment.code import CodeSpec
from slurmtrain.model.experiment.launcher import LAUNCHERS, NODE, RANKS, choose_launcher
from slurmtrain.model.experiment.resources import ResourcesSpec, options_of_component
from slurmtrain.model.experiment.sections import PreflightSpec, ProfileSpec, RequeueSpec, oom_conflicts
from slurmtrain.model.experiment.slurm_options import (
    PASSED,
    SLURM_SECTION,
    SRUN,
    check_log,
    named_options,
    repeated_options,
)
from slurmtrain.model.experiment.strategy import StrategySpec, mixed_conflicts, placement_conflicts
from slurmtrain.model.experiment.tracking import TrackingSpec
from slurmtrain.model.experiment.values import (
    Lines,
    Params,
    ShellBlock,
    Span,
    Variables,
    check_command,
    check_interface,
    check_name,
)

# Whose commands must have ended for a run to be completed.
ALL, NODE_0 = "all", "node0"
NETWORK_PROFILES = ("tcp", "infiniband", "roce", "efa", "gcp")
# What NumPy takes, and Python for its hashes of text.
_LARGEST_SEED = 2**32 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkSpec:
    """How nodes communicate."""

    interface: Annotated[str, kinds.text("`auto` or an interface name", check_interface)] = "auto"
    """The interface for training traffic."""
    profile: Annotated[str, kinds.choice(*NETWORK_PROFILES)] | None = None
    """The kind of network; sets environment variables of the ranks. null: none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuresSpec:
    """What to measure during steps, besides the measures that cost next to nothing."""

    communication: bool = False
    """Whether to measure the share of step time that ranks communicate. torch's profiler records three steps at a time,
    after 5, 20, 80, ... steps; the recorded steps take longer."""
    peak_tflops: kinds.Amount | None = None
    """Peak TFLOP/s of a process's device, for the MFU; null: the known value of the GPU. See
    [measures.md](../measures.md#tokens-and-mfu)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """The top level of a spec."""

    name: Annotated[str, kinds.text("name", check_name)] = ""
    """Name of the run; by default the file's name."""
    command: Annotated[str, kinds.text("command", check_command), kinds.REQUIRED] = ""
    """What each process runs, without a shell. `python` is the one on the submitter's PATH, unless `setup` changes
    that. `{resume_from}`, `{resume_dir}`, `{resume_tag}`, `{run_dir}`, `{checkpoint_dir}`, `{run_id}` and `{attempt}`
    are replaced by their values; `{resume_from?TEXT}` becomes TEXT if there is a checkpoint, else nothing."""
    launcher: Annotated[str, kinds.choice(*LAUNCHERS)] | None = None
    """Who starts the processes that train. `ranks`: slurmtrain starts the command `procs_per_node` times on each node.
    `node`: slurmtrain starts it once per node, and the command, such as torchrun, starts the rest. `none`: as `node`,
    without the environment variables of a distributed launch. null: `node` if the command starts with torchrun,
    accelerate launch or deepspeed, else `ranks`."""
    completed_by: Annotated[str, kinds.choice(ALL, NODE_0)] = ALL
    """With `launcher: node` or `none`: whose command must end with code 0 to complete the run. `all`: every node's.
    `node0`: the first node's; the commands of the other nodes are then asked to stop, as Ray's workers and data
    services need."""
    workdir: Annotated[str, kinds.text("directory")] | None = None
    """Where the command runs; null: the directory where `submit` was called."""
    log: Annotated[str, kinds.text("path such as `logs/%x-%j.out`", check_log)] | None = None
    """Where to put a link to the log of rank 0 of each attempt, relative to `workdir`, with sbatch's patterns: `%x` is
    the name, `%j` the job's id, `%A_%a` an element of an array, `%u` the user, `%N` the first node. The logs themselves
    stay in the run directory. null: no link."""
    code: CodeSpec = CodeSpec()
    """Which code the run uses, also after a requeue."""
    after: Annotated[tuple[str, ...], DEPENDENCIES] = ()
    """Runs that must have completed before this one starts, by name or id, or by the id of a sweep for all its runs. A
    name means the spec of that name in the same `submit`, else the newest submission of that name. `afterany:NAME`:
    they must have ended, in any way. See [chains.md](../chains.md)."""
    params: Params = field(default_factory=dict)
    """Parameters of the script, which sweeps vary and MLflow logs."""
    seed: Annotated[int, kinds.whole_number(0, _LARGEST_SEED)] | None = None
    """The seed for Python, NumPy and torch, the same in all ranks, and for Python's hashes of text; null: random each
    time."""
    deterministic: bool = False
    """Whether torch uses only algorithms that give the same bits each time. Some are slower, and an operation without
    one fails."""
    strategy: StrategySpec | None = None
    """How `run.parallelize(model)` distributes the model over the processes; null: `ddp`. See
    [strategies.md](../strategies.md)."""
    resources: ResourcesSpec = ResourcesSpec()
    """Resources of the run."""
    slurm: Annotated[dict[str, Any], SLURM_SECTION] = field(default_factory=dict)
    """sbatch options by their long names, with `-` or `_`, including options of the site's plug-ins: see
    [slurm-options.md](slurm-options.md). true passes the option without a value, false or null omits it. `sbatch` and
    `srun` hold lists of options as you would type them."""
    network: NetworkSpec = NetworkSpec()
    """How nodes communicate."""
    preflight: PreflightSpec = PreflightSpec()
    """How nodes are checked before training starts."""
    checkpoint: CheckpointSpec = CheckpointSpec()
    """When to save checkpoints, and which to keep."""
    start_from: StartFromSpec | None = None
    """The checkpoint of another run to begin with; null: none."""
    requeue: RequeueSpec = RequeueSpec()
    """What happens when a run is interrupted."""
    tracking: TrackingSpec = TrackingSpec()
    """Experiment tracking."""
    profile: ProfileSpec | None = None
    """A profiler for some steps, or for the whole run; null: none. See [profiling.md](../profiling.md)."""
    idle_after: Span | None = None
    """How long the GPUs of a run may be idle before `watch` or `sync` makes it save, and ends it. A run without GPUs is
    idle if its processes compute nothing and finish no step. null: idle runs are only reported. See
    [usage.md](../usage.md#idle-runs)."""
    measures: MeasuresSpec = MeasuresSpec()
    """What to measure during steps."""
    env: Variables = field(default_factory=dict)
    """Environment variables of the processes. Values of variables whose names end in TOKEN, KEY, PASSWORD, PASSWD,
    SECRET or CREDENTIAL, and URLs with a password, are never recorded."""
    setup: ShellBlock = ()
    """Shell lines, such as `module load cuda`, that run once, on the first node, before everything else; all nodes get
    the variables that they export. A line that fails ends the attempt. See [setup.md](../setup.md). They are recorded:
    secrets belong in `env`."""
    setup_node: ShellBlock = ()
    """Shell lines that run on each node before its ranks; the ranks of the node get the variables that they export."""
    sidecars: Lines = ()
    """Shell commands, such as monitors and servers, that run beside the ranks on each node and end with the attempt. If
    one ends by itself, the run continues."""
    teardown: ShellBlock = ()
    """Shell lines that run on each node after its ranks, however these ended and even if none started. They have at
    most a minute, within the grace of a stop."""

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

    def conflicts(self) -> Iterator[kinds.Conflict]:
        """Keys that contradict each other, and why."""
        for first, again in repeated_options(self.slurm):
            yield "slurm", f"{first!r} and {again!r} are the same sbatch option; keep one of them"
        # sbatch takes only one of --mem, --mem-per-cpu and --mem-per-gpu.
        if self.resources.mem is not None:
            for name in {"mem-per-cpu", "mem-per-gpu"} & named_options(self.slurm).keys():
                yield "slurm", f"{name!r} and 'resources.mem' exclude each other; keep one of them"
        if self.idle_after is not None and not self.tracking.system_metrics:
            yield (
                "idle_after",
                "idle runs are found by the load of nodes: set 'tracking.system_metrics' to true, or remove this",
            )
        lead, limit = self.requeue.lead, self.resources.time
        if lead is not None and limit is not None and lead >= limit:
            why = f"'lead' asks ranks to stop {lead} s before the time limit, but 'resources.time' is only {limit} s"
            yield "requeue", f"{why}: write 'lead: {max(1, limit // 10)}s', or raise 'resources.time'"
        if self.completed_by == NODE_0 and self.command and (self.launcher or choose_launcher(self.command)) == RANKS:
            cure = "leave this out, or set 'launcher: none' for a command that is started once per node"
            yield "completed_by", f"slurmtrain starts the ranks, and a run ends with all of them: {cure}"
        yield from (("requeue", message) for message in oom_conflicts(self.requeue.oom, self.resources))
        # What cannot be read is None, and is reported already.
        if self.strategy is not None and self.resources.nodes:
            least, ranks = self.resources.nodes.min, self.resources.most_ranks
            for message in placement_conflicts(self.strategy, least=least, ranks=ranks, mem=self.resources.mem):
                yield "strategy", message
        if self.resources.mixed:
            for message in mixed_conflicts(self.strategy, deterministic=self.deterministic):
                yield "resources", message
        if self.command:
            yield from (("command", message) for message in placeholder_problems(self.command, self.checkpoint))


def read_spec(data: object, report: kinds.Report) -> Spec:
    """Read a whole spec; every mistake goes to ``report``, and if there is one the result must not be used."""
    spec: Spec = kinds.Section(Spec).read(data, (), report)
    return spec


def write_spec(spec: Spec) -> dict[str, Any]:
    """The spec as plain data with every default filled in; :func:`read_spec` returns the same spec."""
    plain: Any = kinds.Section(Spec).write(spec)
    return dict(plain)


# Kinds describe the words that they take like this.
_WORD = re.compile(r"`([^`]+)`")


def complete_override(begun: str, spec: Mapping[str, Any]) -> list[str]:
    """Keys of the spec that begin so, or values of a key; a section is completed first, and its keys then.

    A key ends in ``=``, and a section in a dot.

    Args:
        begun: What has been typed.
        spec: The spec that is overridden, as read from YAML, for the keys of free sections such as ``params``.
    """
    key, equals, _ = begun.partition("=")
    keys = _keys(spec)
    if equals:
        return [f"{key}={word}" for word in keys.get(key, ()) if f"{key}={word}".startswith(begun)]
    depth = begun.count(".") + 1
    steps = {
        ".".join(parts[:depth]) + ("=" if len(parts) == depth else ".")
        for name in keys
        if len(parts := name.split(".")) >= depth
    }
    return sorted(step for step in steps if step.startswith(begun))


def _keys(spec: Mapping[str, Any]) -> dict[str, list[str]]:
    """All dotted keys that can be set, each with the words that it takes, if these are few."""
    keys = {}
    for path, key in kinds.walk_keys(Spec):
        kind = key.kind
        if not isinstance(kind, kinds.Section):
            keys[".".join(path)] = ["true", "false"] if "true or false" in kind.text else _WORD.findall(kind.text)
    keys |= {f"slurm.{option.replace('-', '_')}": [] for option in PASSED}
    keys |= {key: [] for key in _leaves(spec)}
    # Of params that are known, one is changed rather than all.
    sections = {key.rpartition(".")[0] for key in keys}
    return {key: words for key, words in keys.items() if key not in sections}


def _leaves(section: Mapping[Any, Any], prefix: str = "") -> Iterator[str]:
    for name, value in section.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


kinds.HOMES.update((option.replace("-", "_"), ("slurm",)) for option in PASSED)
# If several sections have a key of the same name, the first one wins, hence the reversed order.
kinds.HOMES.update((path[-1], path[:-1]) for path, _ in reversed(list(kinds.walk_keys(Spec))))
