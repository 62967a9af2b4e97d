"""Models whose parameters become DTensors: divided into stages, layers and shards, in this order of the mesh.

The mesh is torch's arrangement of the ranks, over whose dimensions a model is distributed. Neighbouring ranks, which
are on the same node, are in the last dimension.

Shards are made by torch's ``fully_shard`` (FSDP2). Modules are gathered one at a time: modules of the classes that the
spec names, by default the elements of the model's module lists and sequences, such as the blocks of a transformer.
Everything outside them is gathered with the model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from slurmtrain.errors import StrategyError
from slurmtrain.model.experiment.strategy import FP32, FSDP, HSDP, ON_PARTS, SEQUENCE, StrategySpec
from slurmtrain.plugins.strategies import pipeline, tensor
from slurmtrain.runtime.job.process_group import RankGroup
from slurmtrain.runtime.training.passes import DTYPES, elements, of_classes, recompute
from slurmtrain.runtime.training.strategy_interface import sizes_of

# The dimensions of meshes.
PP, REPLICATE, SHARD, TP = "pp", "replicate", "shard", "tp"


def divide_model(model: nn.Module, spec: StrategySpec, ranks: RankGroup, node: int) -> nn.Module:
    """Divide a model over the ranks; all begin with rank 0's weights.

    Args:
        model: Any module that is not on the meta device; it is changed.
        spec: The strategy.
        ranks: All ranks, which call this alike.
        node: The node of this one.

    Returns:
        The model, or the parts of it that this rank has.

    Raises:
        StrategyError: The strategy does not fit the model, or the nodes of this run.
    """
    device = ranks.device
    mesh = _make_mesh(spec, ranks.gather(node), device)
    replicas = mesh[tuple(name for name in mesh.mesh_dim_names or () if name not in (PP, TP))]
    # Everything that can be refused comes before anything is changed.
    units = _units_of(model, spec.wrap)
    styles = tensor.styles_of(model, spec, mesh[TP].size()) if spec.is_tensor_parallel else {}
    parts: dict[str, nn.Module] = {}
    names_of: dict[int, list[str]] = {}
    if spec.is_pipeline:
        parts = pipeline.parts_of(model)
        names_of = dict(pipeline.stages_of(parts, spec, mesh[PP].get_local_rank(), mesh[PP].size()))
    own = [name for names in names_of.values() for name in names]
    for value in (*model.parameters(), *model.buffers()):
        # Each rank keeps a shard of its own ones.
        dist.broadcast(value.detach(), src=0)
    if styles:
        # Of a pipeline only the parts that this rank has.
        within = {
            name: style
            for name, style in styles.items()
            if not spec.is_pipeline or any(f"{name}.".startswith(f"{part}.") for part in own)
        }
        tensor.divide_layers(model, within, mesh[TP], sequence_parallel=spec.sequence_parallel)
    recompute(model, spec.activation_checkpointing)
    if not spec.is_pipeline:
        if styles:
            _check_inputs(model, styles, mesh[TP], sequence_parallel=spec.sequence_parallel)
        return _shard(model, spec, replicas, units, device)
    stages = {}
    for index, names in names_of.items():
        stage = pipeline.StageModule([parts[name] for name in names])
        inside = set(stage.modules())
        stages[index] = _shard(stage.to(device), spec, replicas, [unit for unit in units if unit in inside], device)
    line = pipeline.TorchPipeline(stages, spec, mesh[PP].get_group(), device)
    return pipeline.PipelinedModel({name: parts[name] for name in own}, line)


def _check_inputs(
    model: nn.Module, styles: Mapping[str, str | ParallelStyle], mesh: DeviceMesh, *, sequence_parallel: bool
) -> None:
    """Check in the first step that what is not divided is computed by all ranks of ``mesh`` alike.

    Not the stages of a pipeline: to know shapes, torch calls them first with tensors that have no values.
    """
    tensor.check_first_inputs(
        model,
        mesh,
        "processes that divide layers among them have different batches: divide each batch by run.dp_size and take the "
        "part run.dp_rank, not by run.world_size and run.rank; random numbers in it must be the same, too",
    )
    for name, style in styles.items():
        if isinstance(style, tensor.Whole) or (style == SEQUENCE and not sequence_parallel):
            tensor.check_first_inputs(
                model.get_submodule(name),
                mesh,
                f"processes that divide layers among them have different inputs of {name!r}, although each has all of "
                "that module: if the inputs are parts of features, such as heads, its style in the plan must be "
                f"{ON_PARTS!r}",
            )


# --- shards -----------------------------------------------------------------------------------------------------------


def _units_of(model: nn.Module, wrap: Sequence[str]) -> list[nn.Module]:
    """The modules that are gathered one at a time, inner ones first.

    They are of the classes with the names ``wrap``; without, the elements of the model's module lists and sequences.
    Raises StrategyError if the model has none of these classes.
    """
    if wrap:
        return of_classes(model, wrap, "strategy.wrap")
    everywhere = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    units = []
    for module in elements(model):
        inside = Counter(id(parameter) for _, parameter in module.named_parameters(remove_duplicate=False))
        # What has parameters that are used elsewhere, too, cannot be gathered alone.
        if inside and all(everywhere[parameter] == count for parameter, count in inside.items()):
            units.append(module)
    return units


def _shard(
    model: nn.Module, spec: StrategySpec, mesh: DeviceMesh, units: Sequence[nn.Module], device: torch.device
) -> nn.Module:
    """Shard a ``model``, whose weights are the same on all ranks, as ``spec`` says.

    ``mesh``: the ranks, in one dimension to shard over, or two, the first to replicate over. ``units``: the modules
    that are gathered one at a time. This rank computes on ``device``.
    """
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    if mesh.size() == 1 and not spec.offload and spec.mixed_precision is None:
        # fully_shard would only copy parameters and gradients: measured, a tenth of a step on CPUs.
        return model.to(device)
    if spec.mixed_precision is None:
        reduced = None if spec.reduce_dtype is None else DTYPES[spec.reduce_dtype]
        inside = of_model = MixedPrecisionPolicy(reduce_dtype=reduced)
    else:
        # Versions of torch reduce in different types unless told. One for all processes: the spec refuses others.
        computed, reduced = DTYPES[str(spec.mixed_precision)], DTYPES[spec.reduce_dtype or FP32]
        inside = MixedPrecisionPolicy(param_dtype=computed, reduce_dtype=reduced)
        # The loss is computed from the model's output.
        of_model = MixedPrecisionPolicy(param_dtype=computed, reduce_dtype=reduced, output_dtype=torch.float32)
    # CPUOffloadPolicy refuses to pin memory where there is no accelerator.
    offload = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda") if spec.offload else OffloadPolicy()
    # None: the model itself, whose parameters the backward pass needs first, is not freed in between.
    reshard = None if spec.reshard_after_forward else False
    for module, policy in (*((unit, inside) for unit in units), (model, of_model)):
        fully_shard(module, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy, offload_policy=offload)
    return model


# --- meshes -----------------------------------------------------------------------------------------------------------


def _make_mesh(spec: StrategySpec, nodes: Sequence[int], device: torch.device) -> DeviceMesh:
    """The mesh of a strategy, with the dimension ``shard``.

    Before it is ``replicate`` where there are replicas, after it ``tp`` with tensor parallelism; the first is ``pp``
    with a pipeline. ``nodes``: the number of each rank's node, by rank. This rank computes on ``device``.

    Raises:
        StrategyError: The sizes of the mesh do not multiply to the number of ranks; or parameters are to be sharded
            within each node, and nodes have different numbers of ranks.
    """
    world_size = len(nodes)
    sizes = sizes_of(spec, world_size)
    if spec.name == FSDP:
        shape, names = [sizes.dp], [SHARD]
    elif spec.name == HSDP:
        per_node = _ranks_per_node(nodes, f"strategy: {HSDP}")
        if per_node == len(nodes):
            shape, names = [sizes.dp], [SHARD]
        elif per_node % sizes.tp:
            raise StrategyError(
                f"'strategy.mesh': 'hsdp' shards within each node, whose {per_node} processes are not a multiple of "
                f"tp {sizes.tp}"
            )
        else:
            shape, names = [len(nodes) // per_node, per_node // sizes.tp], [REPLICATE, SHARD]
    else:
        # Shards of one rank: what is left is that gradients are reduced over the replicas.
        shape, names = [sizes.dp, 1], [REPLICATE, SHARD]
    if spec.is_tensor_parallel:
        shape, names = [*shape, sizes.tp], [*names, TP]
    if spec.is_pipeline:
        shape, names = [sizes.pp, *shape], [PP, *names]
    return DeviceMesh(device.type, torch.arange(world_size).view(shape), mesh_dim_names=tuple(names))


def across_nodes(nodes: Sequence[int], device: torch.device, key: str) -> DeviceMesh | None:
    """All ranks by their nodes: a mesh with the dimension ``replicate``, across nodes, and ``shard``, within each.

    Args:
        nodes: The number of each rank's node, by rank.
        device: Where this rank computes.
        key: What the spec has that needs the mesh, for the error.

    Returns:
        The mesh; None if there is only one node, or one rank on each.

    Raises:
        StrategyError: Nodes have different numbers of ranks.
    """
    per_node = _ranks_per_node(nodes, key)
    if per_node in (1, len(nodes)):
        return None
    return DeviceMesh(device.type, torch.arange(len(nodes)).view(-1, per_node), mesh_dim_names=(REPLICATE, SHARD))


def _ranks_per_node(nodes: Sequence[int], key: str) -> int:
    """How many ranks each node has. Raises StrategyError if it is not the same number; the spec has this ``key``."""
    ranks = Counter(nodes)
    if len(set(ranks.values())) > 1:
        counts = ", ".join(f"{count} on node {node}" for node, count in ranks.items())
        raise StrategyError(f"'{key}' needs the same number of processes on each node, but there are {counts}")
    return len(nodes) // len(ranks)
