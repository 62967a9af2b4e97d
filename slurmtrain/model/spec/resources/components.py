"""The key `resources.components` of a spec: the components of a heterogeneous job, whose nodes differ.

Slurm gives each component nodes of its own kind (sbatch(1), heterogeneous jobs). A key that a component leaves out has
its value in the section around it, or in `slurm`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from slurmtrain.model.spec import kinds
from slurmtrain.model.spec.kinds import (
    Entries,
    Items,
    KeyPath,
    Nullable,
    Report,
    Scalar,
    declare_key,
    type_name,
)
from slurmtrain.model.spec.resources.gpus import GPU_COUNT, GPU_TYPE, GpuSection
from slurmtrain.model.spec.sbatch import OPTIONS, PASSED, SlurmValue, canonical_option, check_sbatch_option
from slurmtrain.model.spec.slurm.option_table import SLURM_OPTIONS
from slurmtrain.model.spec.units import parse_node_memory, write_node_memory
from slurmtrain.model.spec.values import POSITIVE, read_node_count

# The options that describe a component's nodes: Slurm forgets them with each component. Others hold for the following
# components, too, and belong to the whole job (slurm_opt.c, reset_each_pass).
OPTIONS_OF_COMPONENTS = frozenset(name for name in PASSED if SLURM_OPTIONS[name].of_component)

NODE_MEMORY = Scalar("amount with a unit, such as `4GB`, or 0", parse_node_memory, write_node_memory)


def _check_option(name: object) -> None:
    check_sbatch_option(name)
    option = canonical_option(str(name))
    if option in OPTIONS - PASSED:
        raise ValueError(f"--{option} is not passed on: {SLURM_OPTIONS[option].sbatch}")
    if option not in OPTIONS_OF_COMPONENTS:
        whole = "it is one of the whole job: write it under 'slurm'"
        near = kinds.nearest(option, OPTIONS_OF_COMPONENTS)
        raise ValueError(whole if option in OPTIONS else f"unknown option; did you mean {near!r}?" if near else whole)


@dataclass(frozen=True, slots=True, kw_only=True)
class ComponentSpec:
    """Nodes of one kind. A key that a component leaves out has its value in `resources`, or in `slurm`."""

    nodes: int = declare_key(1, Scalar(POSITIVE.text, read_node_count), "Nodes of the component.", required=True)
    procs_per_node: int | None = declare_key(
        None, Nullable(POSITIVE), "Processes per node; null: that of `resources`, else one per GPU of the component."
    )
    gpus_per_node: int | None = declare_key(None, Nullable(GPU_COUNT), "GPUs per node, also with a type: `h100:4`.")
    gpu_type: str | None = declare_key(
        None, Nullable(GPU_TYPE), "The type of the GPUs; null: any, or that of `resources` together with their number."
    )
    cpus_per_proc: int | None = declare_key(None, Nullable(POSITIVE), "CPU cores per process.")
    mem: int | None = declare_key(
        None,
        Nullable(NODE_MEMORY),
        "Memory per node; 0: all that it has.",
    )
    slurm: dict[str, Any] = declare_key(
        {},
        Entries(SlurmValue(), "mapping of sbatch options", _check_option),
        "Options of sbatch by which the component asks for its nodes, such as `partition`, `constraint`, `gres`, "
        "`nodelist`.",
    )


@dataclass(frozen=True, slots=True)
class Components:
    """The kind of `resources.components`."""

    cls: type = ComponentSpec

    @property
    def text(self) -> str:
        """As :attr:`Kind.text`."""
        return "list of components, or null"

    def read(self, value: object, at: KeyPath, report: Report) -> tuple[ComponentSpec, ...]:
        """As :meth:`Kind.read` with its ``value``, ``at`` and ``report``."""
        if value is None:
            return ()
        if not isinstance(value, list | tuple):
            report(at, f"expected a list of components, such as [{{nodes: 2}}, {{nodes: 1}}], found {type_name(value)}")
            return ()
        if len(value) < 2:
            problem = "there is only one component" if value else "there are no components"
            report(at, f"{problem}, and a heterogeneous job has at least two: without this key, nodes are all alike")
        return Items(GpuSection(self.cls), self.text).read(value, at, report)

    def write(self, value: Sequence[ComponentSpec]) -> object:
        """As :meth:`Kind.write`."""
        return [_write_component(component) for component in value] if value else None


def _write_component(component: ComponentSpec) -> dict[str, Any]:
    plain: Any = GpuSection(ComponentSpec).write(component)
    # Newer than the others: without it, the same spec has the same hash in all versions.
    return {name: value for name, value in plain.items() if name != "gpu_type" or value is not None}


def options_of_component(slurm: Mapping[str, Any], component: ComponentSpec) -> dict[str, Any]:
    """The options for the nodes of a ``component``; ``slurm``: the job's options, by sbatch's names."""
    own = {canonical_option(name): value for name, value in component.slurm.items()}
    of_all = {name: value for name, value in slurm.items() if name in OPTIONS_OF_COMPONENTS}
    return {name: value for name, value in {**of_all, **own}.items() if value is not None and value is not False}


def component_of(components: Sequence[ComponentSpec], node: int) -> ComponentSpec:
    """The component of a ``node``, by its number from 0: nodes are counted component by component."""
    # A number of nodes that cannot be read is None, and is reported already.
    ends = accumulate(component.nodes or 0 for component in components)
    return next((component for component, end in zip(components, ends, strict=True) if node < end), components[-1])


def component_conflicts(components: Sequence[ComponentSpec]) -> Iterator[str]:
    """What is wrong with ``components`` whose values are all filled in, as sentences without a full stop."""
    for number, each in enumerate(components):
        procs, gpus = each.procs_per_node, each.gpus_per_node
        if procs and gpus and procs % gpus:
            yield f"component {number}: {procs} processes cannot share {gpus} GPUs evenly"
    # Slurm would give it what the component before has.
    if any(each.mem is not None for each in components):
        for number, each in enumerate(components):
            if each.mem is None:
                yield f"component {number} has no 'mem', and another one has: set it for both, or neither"
