"""The section `resources` of a spec: what Slurm gives a run, and how its processes are placed on its nodes."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, groupby
from typing import Annotated, Any

from slurmtrain.model.experiment import kinds
from slurmtrain.model.experiment.launcher import NodeRanks
from slurmtrain.model.experiment.slurm_options import (
    OPTIONS,
    PASSED,
    SLURM_OPTIONS,
    SlurmValue,
    canonical_option,
    check_sbatch_option,
)
from slurmtrain.model.experiment.values import (
    Nodes,
    parse_duration,
    parse_node_memory,
    read_node_count,
    read_node_range,
    write_duration,
    write_node_memory,
)

CORES, NUMA, GPU = "cores", "numa", "gpu"
BINDINGS = (CORES, NUMA, GPU)


@dataclass(frozen=True, slots=True)
class Cpu:
    """Where a logical CPU is: its NUMA ``node``, its ``package``, and its ``core`` there, which others may share."""

    node: int = 0
    package: int = 0
    core: int = 0


def bind_ranks(
    bind: str, cpus: Mapping[int, Cpu], ranks: int, near: Sequence[Collection[int]] = ()
) -> list[frozenset[int]]:
    """The CPUs of each rank of a node, by its local rank; none of them is left without any.

    Args:
        bind: One of :data:`BINDINGS`.
        cpus: The CPUs that the node's agent may use.
        ranks: How many ranks the node has.
        near: With ``gpu``, the CPUs near the GPU of each rank; empty for one that is not known.
    """
    if bind == NUMA:
        nodes = sorted({place.node for place in cpus.values()})
        groups = [frozenset(cpu for cpu, place in cpus.items() if place.node == node) for node in nodes]
        return [frozenset().union(*part) for part in _parts(groups, ranks)]
    # The physical cores, neighbours beside each other.
    by_core = sorted(cpus, key=lambda cpu: (cpus[cpu].node, cpus[cpu].package, cpus[cpu].core, cpu))
    everywhere = frozenset(cpus)
    usable = [everywhere & frozenset(each) or everywhere for each in near] if bind == GPU else [everywhere] * ranks
    result = []
    for rank, own in enumerate(usable):
        # Ranks that may run on the same CPUs divide them.
        sharing = [other for other, theirs in enumerate(usable) if theirs == own]
        order = [frozenset(core) for _, core in groupby((cpu for cpu in by_core if cpu in own), cpus.__getitem__)]
        result.append(frozenset().union(*_parts(order, len(sharing))[sharing.index(rank)]))
    return result


def _parts(groups: Sequence[frozenset[int]], count: int) -> list[Sequence[frozenset[int]]]:
    """Divide ``groups`` into ``count`` parts of about equal size in their order; where there are fewer, parts share."""
    size = len(groups)
    if size < count:
        return [groups[index * size // count : index * size // count + 1] for index in range(count)]
    return [groups[index * size // count : (index + 1) * size // count] for index in range(count)]


def write_cpus(cpus: Collection[int]) -> str:
    """CPUs as the kernel lists them, such as ``0-3,8``."""
    spans: list[list[int]] = []
    for cpu in sorted(cpus):
        if spans and cpu == spans[-1][1] + 1:
            spans[-1][1] = cpu
        else:
            spans.append([cpu, cpu])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)


def read_cpus(text: str) -> set[int]:
    """The CPUs in a list of the kernel's. Raises ValueError."""
    cpus: set[int] = set()
    for span in filter(None, text.strip().split(",")):
        first, _, last = span.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return cpus


_COUNT, _TYPE = "gpus_per_node", "gpu_type"
# A type is a word of the site's own, as in gres.conf: "h100", "nvidia_a100_80gb_pcie", "1g.5gb".
_NAME = re.compile(r"(?!\d+$)[A-Za-z0-9][\w.+-]*", re.ASCII)
_TYPED = re.compile(r"(?P<type>[^:,]+):(?P<count>\d{1,6})", re.ASCII)


def _parse_count(value: object) -> int:
    if isinstance(value, str):
        if value.strip().isdecimal():
            raise ValueError(f"expected a whole number, found text ({value!r}); write {int(value)}")
        # What is right has been divided before this is called, unless there is another type.
        gpu_type, count = parse_gpus(value)
        raise ValueError(f"'{_TYPE}' contradicts {gpu_type}: leave it out, or write {count}")
    number: int = kinds.whole_number(0).parse(value)
    return number


def _divide_gpus(value: object) -> object:
    """A section whose `gpus_per_node` holds a number and a type, such as `h100:4`, with a key for each."""
    if isinstance(value, Mapping) and isinstance(typed := value.get(_COUNT), str):
        with contextlib.suppress(ValueError):
            gpu_type, count = parse_gpus(typed)
            if value.get(_TYPE) in (None, gpu_type):
                return {**value, _COUNT: count, _TYPE: gpu_type}
    return value


check_gpu_type = kinds.matching(_NAME, "expected a type of GPUs as your site calls it, such as h100, found {!r}")
Gpus = Annotated[int, kinds.Scalar("whole number of at least 0, or with a type, such as `h100:4`", _parse_count)]
GpuType = Annotated[str, kinds.text("type of GPU", check_gpu_type)]


def parse_gpus(text: str) -> tuple[str, int]:
    """The type and the number in a text such as ``h100:4``. Raises ValueError with what to write instead."""
    # People copy what stands before the type from --gres: the message then says what to write instead.
    bare = re.sub(r"^(gres[/:])?gpu:", "", text.strip())
    match = _TYPED.fullmatch(bare)
    if match is not None and _NAME.fullmatch(match["type"]) and bare == text.strip():
        return match["type"], int(match["count"])
    if "," in bare:
        raise ValueError(
            f"{text!r} has several types of GPUs, but all ranks of a node are alike: write for example "
            f"{bare.partition(',')[0]}; for different nodes use 'resources.components'"
        )
    if match is not None and _NAME.fullmatch(match["type"]):
        raise ValueError(f"write {bare}, not {text!r}")
    if _NAME.fullmatch(bare):
        raise ValueError(f"{text!r} has no number of GPUs: write {bare}:1 for one of them")
    raise ValueError(f"expected a whole number, or a type and a number such as h100:4, found {text!r}")


# The options that describe a component's nodes: Slurm forgets them with each component. Others hold for the following
# components, too, and belong to the whole job (slurm_opt.c, reset_each_pass).
OPTIONS_OF_COMPONENTS = frozenset(name for name in PASSED if SLURM_OPTIONS[name].of_component)

NodeMemory = Annotated[
    int, kinds.Scalar("amount with a unit, such as `4GB`, or 0", parse_node_memory, write_node_memory)
]


def _check_option(name: object) -> None:
    check_sbatch_option(name)
    option = canonical_option(str(name))
    if option in OPTIONS - PASSED:
        raise ValueError(f"--{option} is not passed on: {SLURM_OPTIONS[option].sbatch}")
    if option not in OPTIONS_OF_COMPONENTS:
        whole = "this option belongs to the whole job: write it under 'slurm'"
        near = kinds.nearest(option, OPTIONS_OF_COMPONENTS)
        raise ValueError(whole if option in OPTIONS else f"unknown option; did you mean {near!r}?" if near else whole)


@dataclass(frozen=True, slots=True, kw_only=True)
class ComponentSpec:
    """Nodes of one kind. If a component leaves a key out, the value in `resources` or `slurm` applies."""

    expand = staticmethod(_divide_gpus)
    nodes: Annotated[int, kinds.Scalar("whole number of at least 1", read_node_count), kinds.REQUIRED] = 1
    """Nodes of the component."""
    procs_per_node: kinds.Positive | None = None
    """Processes per node; null: as in `resources`, else one per GPU of the component."""
    gpus_per_node: Gpus | None = None
    """GPUs per node, also with a type: `h100:4`."""
    gpu_type: GpuType | None = None
    """The type of the GPUs; null: any, or as in `resources` together with their number."""
    cpus_per_proc: kinds.Positive | None = None
    """CPU cores per process."""
    mem: NodeMemory | None = None
    """Memory per node; 0: all of it."""
    slurm: Annotated[dict[str, Any], kinds.Entries(SlurmValue(), "mapping of sbatch options", _check_option)] = field(
        default_factory=dict
    )
    """sbatch options that choose the nodes of the component, such as `partition`, `constraint`, `gres`, `nodelist`."""


# Its keys that have the value of `resources` where a component leaves them out.
_OF_COMPONENT = ("procs_per_node", "gpus_per_node", "gpu_type", "cpus_per_proc", "mem")


@dataclass(frozen=True, slots=True)
class Components:
    """The kind of `resources.components`."""

    cls: type = ComponentSpec
    text = "list of components, or null"

    def read(self, value: object, at: kinds.KeyPath, report: kinds.Report) -> tuple[ComponentSpec, ...]:
        """As :meth:`Kind.read` with its ``value``, ``at`` and ``report``."""
        if value is None:
            return ()
        if not isinstance(value, list | tuple):
            report(
                at,
                f"expected a list of components, such as [{{nodes: 2}}, {{nodes: 1}}], found {kinds.type_name(value)}",
            )
            return ()
        if len(value) < 2:
            problem = "there is only one component" if value else "the list is empty"
            report(
                at,
                f"{problem}, but a heterogeneous job has at least two components: leave it out if all nodes are alike",
            )
        return kinds.Items(kinds.Section(self.cls), self.text).read(value, at, report)

    def write(self, value: Sequence[ComponentSpec]) -> object:
        """As :meth:`Kind.write`."""
        return [
            {
                # Newer than the others: without it, the same spec has the same hash in all versions.
                name: plain
                for name, plain in kinds.Section(self.cls).write(component).items()
                if name != "gpu_type" or plain is not None
            }
            for component in value
        ] or None


def options_of_component(slurm: Mapping[str, Any], component: ComponentSpec) -> dict[str, Any]:
    """The options for the nodes of a ``component``; ``slurm``: the job's options, by sbatch's names."""
    own = {canonical_option(name): value for name, value in component.slurm.items()}
    of_all = {name: value for name, value in slurm.items() if name in OPTIONS_OF_COMPONENTS}
    return {name: value for name, value in {**of_all, **own}.items() if value is not None and value is not False}


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourcesSpec:
    """The resources of a run."""

    expand = staticmethod(_divide_gpus)
    nodes: Annotated[
        Nodes, kinds.Scalar("whole number, or `{min: N, max: N}`", read_node_range, lambda nodes: nodes.to_dict())
    ] = Nodes(1, 1)
    """Nodes that train. With `{min: 2, max: 4}` an attempt starts with as many nodes as Slurm gives it; if it loses
    one, it continues with the others in the same allocation."""
    grow: bool = False
    """Whether an attempt with fewer than `nodes.max` nodes waits for more in a second job, whose nodes join it while it
    runs. Needs `nodes: {min, max}` and Slurm."""
    spares: kinds.Count = 0
    """Additional idle nodes of the job, which replace lost ones."""
    procs_per_node: kinds.Positive | None = None
    """Processes per node; null: one per GPU, or one without GPUs."""
    gpus_per_node: Gpus = 0
    """GPUs per node, also with their type: `h100:4` is 4 with `gpu_type: h100`."""
    gpu_type: GpuType | None = None
    """The type of the GPUs, as the site calls it (`sinfo -o '%N %G'`); null: any. The local executor ignores it."""
    cpus_per_proc: kinds.Positive = 1
    """CPU cores per process; sets OMP_NUM_THREADS."""
    bind: Annotated[str, kinds.choice(*BINDINGS)] | None = None
    """Which CPUs each process is bound to: `cores`, an equal share of the node's cores; `numa`, the CPUs of a NUMA
    node; `gpu`, the CPUs near its GPU; null: no binding. See [slurm.md](../slurm.md#cpus-of-ranks)."""
    mem: NodeMemory | None = None
    """Memory per node, in units of 1024; 0: all of the node's; null: the partition's default. The local executor does
    not enforce it."""
    mixed: bool = False
    """Whether nodes may have different GPUs or CPUs; otherwise preflight refuses nodes whose GPUs differ. Each process
    then gets a share of each batch that suits its speed; the script asks for it with `run.share(batch)` or
    `run.loader(...)`."""
    components: Annotated[tuple[ComponentSpec, ...], Components()] = ()
    """The components of a heterogeneous job, whose nodes differ, instead of `nodes`. See
    [mixed-hardware.md](../mixed-hardware.md#heterogeneous-jobs). null: nodes are all alike."""
    accumulation: kinds.Positive = 1
    """Gradient accumulation: into how many parts the script divides the batch of each process, so that one part fits
    into memory. The script reads it from `run.accumulation` or SLURMTRAIN_ACCUMULATION. With `grow` the number is for
    `nodes.max` nodes; on fewer, each process has more of the batch, in more parts."""
    time: (
        Annotated[
            int,
            kinds.Scalar(
                'time in quotes, such as `"12:00:00"` or `"2-12"`, or minutes', parse_duration, write_duration
            ),
        ]
        | None
    ) = None
    """Time limit of one attempt, in Slurm's formats; null: the partition's limit, or none locally."""

    def __post_init__(self) -> None:
        # A number of nodes that cannot be read is None, and is reported already.
        # A plan has the sum written out, and is read back.
        if self.components and self.nodes == Nodes(1, 1):
            total = sum(component.nodes or 0 for component in self.components)
            object.__setattr__(self, "nodes", Nodes(total, total))

    def conflicts(self) -> Iterator[kinds.Conflict]:
        """Keys that contradict each other, and why."""
        # Ranks with different shares of a GPU would wait for each other in every step.
        if self.procs_per_node and self.gpus_per_node and self.procs_per_node % self.gpus_per_node:
            yield (
                "procs_per_node",
                f"{self.procs_per_node} processes cannot share {self.gpus_per_node} GPUs evenly; "
                f"write for example {self.gpus_per_node}",
            )
        # A value that cannot be read is None here, and is reported already.
        if self.grow and self.nodes and self.nodes.min == self.nodes.max:
            yield (
                "grow",
                "a fixed number of nodes cannot grow: write "
                f"'nodes: {{min: {self.nodes.min}, max: {2 * self.nodes.max}}}'",
            )
        has_gpus = any(own.gpus_per_node != 0 for own in [each for _, each in self.by_component()] or [self])
        if self.bind == GPU and not has_gpus:
            yield "bind", "there are no GPUs: write 'bind: numa', or set 'gpus_per_node', such as '1'"
        if self.gpu_type and not has_gpus:
            yield "gpu_type", "there are no GPUs: set 'gpus_per_node', such as '1', or leave it out"
        if self.components:
            yield from self._component_conflicts()

    def _component_conflicts(self) -> Iterator[kinds.Conflict]:
        total = sum(component.nodes or 0 for component in self.components)
        if self.nodes and self.nodes != Nodes(total, total):
            yield "nodes", f"the components already determine the number of nodes, {total}: leave it out"
        # Slurm starts all components or none, and a job that has lost a node has lost a component.
        if self.spares:
            yield "spares", "components have no spare nodes: leave one of the two out"
        components = self.resolved().components
        for number, each in enumerate(components):
            procs, gpus = each.procs_per_node, each.gpus_per_node
            if procs and gpus and procs % gpus:
                yield "components", f"component {number}: {procs} processes cannot share {gpus} GPUs evenly"
            # Slurm would give it what the component before has.
            if each.mem is None and any(other.mem is not None for other in components):
                why = "has no 'mem', but another one has: set it for both, or for neither"
                yield "components", f"component {number} {why}"

    @property
    def allocated(self) -> Nodes:
        """Nodes of the job, the spare ones included."""
        return Nodes(self.nodes.min + self.spares, self.nodes.max + self.spares)

    @property
    def elastic(self) -> bool:
        """Whether a job continues when one of its nodes is lost."""
        return self.spares > 0 or self.nodes.min < self.nodes.max

    def accumulation_on(self, nodes: int) -> int:
        """Into how many parts the batch of each process is divided on so many ``nodes``.

        A process of a run that grows has a larger share of the same batch on fewer nodes, and no more memory.
        """
        return math.ceil(self.accumulation * self.nodes.max / nodes) if self.grow else self.accumulation

    @property
    def cpus_per_node(self) -> int:
        """CPU cores of the processes of a node."""
        return self.cpus_per_proc * self.local_world_size

    @property
    def local_world_size(self) -> int:
        """Processes per node."""
        return self.procs_per_node or self.gpus_per_node or 1

    def resolved(self) -> ResourcesSpec:
        """The same with all values filled in that depend on other ones, in components too."""
        components = []
        for component in self.components:
            own = replace(self._with_component(component), components=())
            values = {name: getattr(own, name) for name in _OF_COMPONENT}
            components.append(replace(component, **{**values, "procs_per_node": own.local_world_size}))
        return replace(self, procs_per_node=self.local_world_size, components=tuple(components))

    def _with_component(self, component: ComponentSpec) -> ResourcesSpec:
        own = {name: value for name in _OF_COMPONENT if (value := getattr(component, name)) is not None}
        # A number of GPUs of its own is one of any type.
        if "gpus_per_node" in own:
            own["gpu_type"] = component.gpu_type
        return replace(self, **own)

    def by_component(self) -> list[tuple[ComponentSpec, ResourcesSpec]]:
        """Each component, with its resources as if it were a job of its own."""
        return [
            (
                component,
                replace(self._with_component(component), nodes=Nodes(component.nodes, component.nodes), components=()),
            )
            for component in self.components
        ]

    def of_node(self, node: int) -> ResourcesSpec:
        """What a ``node`` has, by its number from 0; for jobs without components that is the same for all."""
        # Nodes are counted component by component. A number that cannot be read is None, and is reported already.
        ends = accumulate(component.nodes or 0 for component in self.components)
        own = (component for component, end in zip(self.components, ends, strict=True) if node < end)
        return self._with_component(next(own, self.components[-1])) if self.components else self

    def ranks_on(self, nodes: Iterable[int]) -> NodeRanks:
        """How many ranks each of these ``nodes`` has, by their numbers."""
        return NodeRanks(tuple(self.of_node(node).local_world_size for node in nodes))

    def nodes_of(self, world_size: int) -> int:
        """How many nodes an attempt has whose ``world_size`` is this."""
        return self.nodes.max if self.components else max(1, world_size // self.local_world_size)

    @property
    def most_ranks(self) -> NodeRanks:
        """How many ranks each node has, if all of ``nodes.max`` train."""
        return self.ranks_on(range(self.nodes.max))

    @property
    def most_gpus(self) -> int:
        """GPUs of the whole job, if it gets as many nodes as it may, the spare ones included."""
        if self.components:
            return sum(component.nodes * own.gpus_per_node for component, own in self.by_component())
        return self.allocated.max * self.gpus_per_node

    def gpu_option(self, sets: int = 1) -> str | int | None:
        """The value of sbatch's ``--gpus-per-node`` for ``sets`` times these GPUs; None: there are none."""
        count = self.gpus_per_node * sets
        return f"{self.gpu_type}:{count}" if self.gpu_type and count else count or None

    @property
    def single_node_with_gpus(self) -> bool:
        """Whether there is only one node, with a GPU for each process."""
        return self.allocated.max == 1 and self.gpus_per_node == self.local_world_size
