"""Models whose parameters become DTensors: divided into stages, layers and shards, in this order of the mesh."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from slurmtrain.model.spec.strategy import ON_PARTS, SEQUENCE, StrategySpec
from slurmtrain.runtime.strategies import pipeline, sharded, stages, tensor
from slurmtrain.runtime.strategies.mesh import PP, TP, data_parallel
from slurmtrain.runtime.strategies.same_inputs import check_first_inputs
from slurmtrain.runtime.strategies.step.activations import recompute
from slurmtrain.runtime.strategies.whole_modules import Whole


def divide(model: nn.Module, spec: StrategySpec, mesh: DeviceMesh, device: torch.device) -> nn.Module:
    """Divide a model over the ranks of a mesh; all begin with rank 0's weights.

    Args:
        model: Any module that is not on the meta device; it is changed.
        spec: The strategy.
        mesh: From :func:`~slurmtrain.runtime.strategies.mesh.make_mesh`.
        device: Where this rank computes.

    Returns:
        The model, or the parts of it that this rank has.

    Raises:
        StrategyError: The strategy does not fit the model.
    """
    # Everything that can be refused comes before anything is changed.
    units = sharded.units_of(model, spec.wrap)
    styles = tensor.styles_of(model, spec, mesh[TP].size()) if spec.is_tensor_parallel else {}
    parts: dict[str, nn.Module] = {}
    names_of: dict[int, list[str]] = {}
    if spec.is_pipeline:
        parts = stages.parts_of(model)
        names_of = dict(stages.divide(parts, spec, mesh[PP].get_local_rank(), mesh[PP].size()))
    sharded.share_weights(model)
    own = [name for names in names_of.values() for name in names]
    if styles:
        tensor.divide(model, _within(styles, own), mesh[TP], sequence_parallel=spec.sequence_parallel)
    recompute(model, spec.activation_checkpointing)
    if not spec.is_pipeline:
        if styles:
            _check_inputs(model, styles, mesh[TP], sequence_parallel=spec.sequence_parallel)
        return _reduce(model, spec, data_parallel(mesh), units, device)
    modules = {}
    for index, names in names_of.items():
        stage = pipeline.StageModule([parts[name] for name in names])
        inside = set(stage.modules())
        own_units = [unit for unit in units if unit in inside]
        modules[index] = _reduce(stage, spec, data_parallel(mesh), own_units, device)
    line = pipeline.Pipeline(modules, spec, mesh[PP].get_group(), device)
    return pipeline.PipelinedModel({name: parts[name] for name in own}, line)


def _reduce(
    model: nn.Module, spec: StrategySpec, mesh: DeviceMesh, units: Sequence[nn.Module], device: torch.device
) -> nn.Module:
    """Have gradients reduced over the ranks of ``mesh``, and shards, offload and precision as ``spec`` says."""
    if mesh.size() == 1 and not spec.offload and spec.mixed_precision is None:
        # fully_shard would only copy parameters and gradients: measured, a tenth of a step on CPUs.
        return model.to(device)
    return sharded.shard(model.to(device) if spec.is_pipeline else model, spec, mesh, units)


def _within(styles: Mapping[str, str | ParallelStyle], parts: Sequence[str]) -> dict[str, str | ParallelStyle]:
    """The styles of modules in these parts of the model; without parts, of all."""
    if not parts:
        return dict(styles)
    return {name: style for name, style in styles.items() if any(f"{name}.".startswith(f"{part}.") for part in parts)}


def _check_inputs(
    model: nn.Module, styles: Mapping[str, str | ParallelStyle], mesh: DeviceMesh, *, sequence_parallel: bool
) -> None:
    """Check in the first step that what is not divided is computed by all ranks of ``mesh`` alike.

    Not the stages of a pipeline: to know shapes, torch calls them first with tensors that have no values.
    """
    check_first_inputs(
        model,
        mesh,
        "processes that divide layers among them have different batches: divide each batch by run.dp_size and take the "
        "part run.dp_rank, not by run.world_size and run.rank; random numbers in it must be the same, too",
    )
    for name, style in styles.items():
        if isinstance(style, Whole) or (style == SEQUENCE and not sequence_parallel):
            check_first_inputs(
                model.get_submodule(name),
                mesh,
                f"the inputs of {name!r}, of which each process has the whole, are not the same on processes that "
                "divide layers among them: if they are parts of features, such as heads, its style in the plan must be "
                f"{ON_PARTS!r}",
            )
