"""The section `resources` of a spec: what Slurm gives a run, and how its processes are placed on its nodes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from slurmtrain.model.spec import kinds
from slurmtrain.model.spec.kinds import Conflict, Nullable, Scalar, declare_key
from slurmtrain.model.spec.resources.binding import BINDINGS, GPU
from slurmtrain.model.spec.resources.components import (
    NODE_MEMORY,
    Components,
    ComponentSpec,
    component_conflicts,
    component_of,
)
from slurmtrain.model.spec.resources.gpus import GPU_COUNT, GPU_TYPE
from slurmtrain.model.spec.resources.node_ranks import NodeRanks
from slurmtrain.model.spec.units import parse_duration, write_duration
from slurmtrain.model.spec.values import POSITIVE, Nodes, read_node_range


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourcesSpec:
    """The resources of a run."""

    nodes: Nodes = declare_key(
        Nodes(1, 1),
        Scalar("whole number, or `{min: N, max: N}`", read_node_range, lambda nodes: nodes.to_dict()),
        "Nodes that train. With `{min: 2, max: 4}` an attempt starts with as many nodes as Slurm gives it; if one is "
        "lost, it continues with the others in the same allocation.",
    )
    grow: bool = declare_key(
        False,
        kinds.boolean(),
        "Whether an attempt with fewer than `nodes.max` nodes waits for more in a second job, whose nodes join it "
        "while it runs. Needs `nodes: {min, max}` and Slurm.",
    )
    spares: int = declare_key(
        0,
        kinds.whole_number(0),
        "Additional idle nodes of the job, which replace lost ones.",
    )
    procs_per_node: int | None = declare_key(
        None, Nullable(POSITIVE), "Processes per node; null: one per GPU, or one without GPUs."
    )
    gpus_per_node: int = declare_key(
        0, GPU_COUNT, "GPUs per node, also with their type: `h100:4` is 4 with `gpu_type: h100`."
    )
    gpu_type: str | None = declare_key(
        None,
        Nullable(GPU_TYPE),
        "The type of the GPUs, as the site calls it (`sinfo -o '%N %G'`); null: any. The local executor ignores it.",
    )
    cpus_per_proc: int = declare_key(1, POSITIVE, "CPU cores per process; sets OMP_NUM_THREADS.")
    bind: str | None = declare_key(
        None,
        Nullable(kinds.choice(*BINDINGS)),
        "What each process is bound to: `cores`, an equal share of the node's cores; `numa`, the CPUs of a NUMA node; "
        "`gpu`, those near its GPU; null: nothing. See [slurm.md](slurm.md#cpus-of-ranks).",
    )
    mem: int | None = declare_key(
        None,
        Nullable(NODE_MEMORY),
        "Memory per node, in units of 1024; 0: all that the node has; null: the partition's default. Not enforced by "
        "the local executor.",
    )
    mixed: bool = declare_key(
        False,
        kinds.boolean(),
        "Whether nodes may have different GPUs or CPUs; otherwise preflight refuses nodes whose GPUs differ. Each "
        "process then gets as many samples of a batch as suit its speed, which the script asks for: "
        "`run.share(batch)`, or `run.loader(...)`.",
    )
    components: tuple[ComponentSpec, ...] = declare_key(
        (),
        Components(),
        "The components of a heterogeneous job, whose nodes differ, instead of `nodes`. See "
        "[mixed-hardware.md](mixed-hardware.md#heterogeneous-jobs). null: nodes are all alike.",
    )
    accumulation: int = declare_key(
        1,
        POSITIVE,
        "Gradient accumulation: into how many parts the script divides the batch of each process, so that one fits "
        "into memory. The script reads it: `run.accumulation`, SLURMTRAIN_ACCUMULATION. With `grow` it is that on "
        "`nodes.max` nodes; on fewer, where each process has more of the batch, there are more parts.",
    )
    time: int | None = declare_key(
        None,
        Nullable(
            Scalar(
                'time in quotes, such as `"12:00:00"` or `"2-12"`, or minutes',
                parse_duration,
                write_duration,
            )
        ),
        "Time limit of one attempt, in Slurm's formats; null: the partition's limit, or none locally.",
    )

    def __post_init__(self) -> None:
        # A number of nodes that cannot be read is None, and is reported already.
        if self.components and self.nodes == Nodes(1, 1):
            total = sum(component.nodes or 0 for component in self.components)
            object.__setattr__(self, "nodes", Nodes(total, total))

    def conflicts(self) -> Iterator[Conflict]:
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
                f"it has nothing to grow to: write 'nodes: {{min: {self.nodes.min}, max: {2 * self.nodes.max}}}'",
            )
        if self.bind == GPU and not self.most_gpus:
            yield "bind", "there are no GPUs: write 'bind: numa', or set 'gpus_per_node', such as '1'"
        if self.gpu_type and not self.most_gpus:
            yield "gpu_type", "there are no GPUs: set 'gpus_per_node', such as '1', or leave it out"
        if self.components:
            yield from self._component_conflicts()

    def _component_conflicts(self) -> Iterator[Conflict]:
        total = sum(component.nodes or 0 for component in self.components)
        if self.nodes and self.nodes != Nodes(total, total):
            yield "nodes", f"components say how many nodes there are, {total}: leave it out"
        # Slurm starts all components or none, and a job that has lost a node has lost a component.
        if self.spares:
            yield "spares", "components have no spare nodes: leave one of the two out"
        for message in component_conflicts(self.resolved().components):
            yield "components", message

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
        components = tuple(
            replace(
                component,
                procs_per_node=own.local_world_size,
                gpus_per_node=own.gpus_per_node,
                gpu_type=own.gpu_type,
                cpus_per_proc=own.cpus_per_proc,
                mem=own.mem,
            )
            for component in self.components
            for own in [self._with_component(component)]
        )
        return replace(self, procs_per_node=self.local_world_size, components=components)

    def _with_component(self, component: ComponentSpec) -> ResourcesSpec:
        own = {
            name: value
            for name in ("procs_per_node", "gpus_per_node", "gpu_type", "cpus_per_proc", "mem")
            if (value := getattr(component, name)) is not None
        }
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
        return self._with_component(component_of(self.components, node)) if self.components else self

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
