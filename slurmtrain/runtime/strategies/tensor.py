"""Layers that are divided over ranks, by torch's ``parallelize_module``: tensor and sequence parallelism.

The plan says how: that of the spec, or that of the model, whose method ``tensor_plan(size)`` gets the number of ranks
and returns a mapping from names of modules to names of styles, or to torch's ``ParallelStyle``. The parameters of all
other modules become DTensors, too, of which each rank has the whole: norms of gradients, optimizers and checkpoints
then have one kind of tensor.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from slurmtrain.errors import StrategyError
from slurmtrain.model.spec.kinds import suggestion
from slurmtrain.model.spec.strategy.section import COLWISE_REP, ROWWISE, SEQUENCE, STYLES, StrategySpec
from slurmtrain.runtime.job.torch_private import map_tree

# The dimension along which sequences are divided: the last but one, before that of the features.
_SEQUENCE_DIM = -2


def styles_of(model: nn.Module, spec: StrategySpec, size: int) -> dict[str, str | ParallelStyle]:
    """How the modules of a model are divided, by their names.

    Args:
        model: The whole model.
        spec: The strategy, with a plan unless the model has one.
        size: Among how many ranks.

    Raises:
        StrategyError: There is no plan, or it does not fit the model or the number of ranks.
    """
    styles = _expand(model, _plan_of(model, spec, size))
    _check_shared(model, styles)
    for name, style in styles.items():
        if isinstance(style, str):
            _check_sizes(name, model.get_submodule(name), style, size)
    rest = _unplanned(model, styles)
    if rest and spec.sequence_parallel:
        raise StrategyError(
            f"'strategy.sequence_parallel' divides what lies between layers, and the plan does not say what becomes of "
            f"{rest[0]!r}: add it, as {SEQUENCE!r} if it is a norm"
        )
    return {**styles, **dict.fromkeys(rest, _Whole())}


def divide(
    model: nn.Module, styles: Mapping[str, str | ParallelStyle], mesh: DeviceMesh, *, sequence_parallel: bool
) -> None:
    """Divide the layers of a model over the ranks of a mesh, which all have the same weights.

    Args:
        model: It is changed: its parameters become DTensors.
        styles: From :func:`styles_of`.
        mesh: One dimension.
        sequence_parallel: Whether what lies between the layers is divided, too.

    Raises:
        StrategyError: torch cannot divide a module by its style.
    """
    for name, style in styles.items():
        module = model.get_submodule(name)
        _apply(module, mesh, _style(module, style, sequence_parallel) if isinstance(style, str) else style, name)


def _plan_of(model: nn.Module, spec: StrategySpec, size: int) -> Mapping[str, str | ParallelStyle]:
    if spec.plan:
        return spec.plan
    # Models of transformers have theirs.
    plan: Any = getattr(model, "tensor_plan", None) or getattr(model, "tp_plan", None)
    if callable(plan):
        try:
            plan = plan(size)
        except ValueError as error:
            raise StrategyError(f"{type(model).__name__}.tensor_plan({size}): {error}") from error
    if not isinstance(plan, Mapping) or not plan:
        raise StrategyError(
            f"{type(model).__name__} has no plan by which its layers are divided: give it a method tensor_plan(size), "
            "or set 'strategy.plan', such as {blocks.*.mlp.up: colwise, blocks.*.mlp.down: rowwise}"
        )
    for pattern, style in plan.items():
        if not isinstance(style, ParallelStyle) and style not in STYLES:
            raise StrategyError(
                f"the plan of {type(model).__name__} has {style!r} for {pattern!r}: expected one of "
                f"{', '.join(STYLES)}, or a torch.distributed.tensor.parallel.ParallelStyle"
            )
    return plan


def _expand(model: nn.Module, plan: Mapping[str, str | ParallelStyle]) -> dict[str, str | ParallelStyle]:
    """The style of each module that a plan names; of several that match, the last one counts."""
    names = [name for name, _ in model.named_modules()]
    styles: dict[str, str | ParallelStyle] = {}
    for pattern, style in plan.items():
        matching = [name for name in names if _matches(name, pattern)]
        if not matching:
            raise StrategyError(
                f"the plan names {pattern!r}, and the model has no such module{suggestion(pattern, names)}"
            )
        styles |= dict.fromkeys(matching, style)
    return styles


def _matches(name: str, pattern: str) -> bool:
    parts, patterns = name.split("."), pattern.split(".")
    return len(parts) == len(patterns) and all(map(fnmatchcase, parts, patterns))


def _check_shared(model: nn.Module, plan: Mapping[str, object]) -> None:
    """Raise StrategyError if a parameter of a planned module is used by another module, too."""
    uses = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    for name in plan:
        for own, parameter in model.get_submodule(name).named_parameters():
            if uses[id(parameter)] > 1:
                raise StrategyError(
                    f"the plan divides {name!r}, whose {own!r} is also a parameter of another module (tied weights): "
                    "they would not be the same any more; untie them, or leave both out of the plan"
                )


def _check_sizes(name: str, module: nn.Module, style: str, size: int) -> None:
    """Raise StrategyError if a style does not suit a module, or what it divides is no multiple of ``size``."""
    if style == SEQUENCE:
        return
    if isinstance(module, nn.Linear) and style == ROWWISE:
        divided, unit = module.in_features, "input features"
    elif isinstance(module, nn.Linear):
        divided, unit = module.out_features, "output features"
    elif isinstance(module, nn.Embedding) and style == ROWWISE:
        divided, unit = module.num_embeddings, "entries"
    elif isinstance(module, nn.Embedding):
        divided, unit = module.embedding_dim, "output features"
    else:
        raise StrategyError(
            f"the plan has {style!r} for {name!r}, a {type(module).__name__}: torch divides Linear and Embedding; for "
            "others the plan needs a ParallelStyle"
        )
    if divided % size:
        raise StrategyError(f"the {divided} {unit} of {name!r} cannot be divided among {size} processes (tp)")


def _unplanned(model: nn.Module, plan: Mapping[str, object]) -> list[str]:
    """The modules with parameters of their own of which the plan says nothing."""
    rest = []
    for name, module in model.named_modules():
        if any(name == each or name.startswith(f"{each}.") for each in plan):
            continue
        if not any(True for _ in module.parameters(recurse=False)):
            continue
        if any(True for _ in module.children()):
            own = next(own for own, _ in module.named_parameters(recurse=False))
            whole_name = f"{name}.{own}" if name else own
            raise StrategyError(
                f"the parameter {whole_name!r} belongs to a module with parts of its own: give it a module for itself, "
                "or that module a ParallelStyle in the plan"
            )
        rest.append(name)
    return rest


def _style(module: nn.Module, style: str, sequence_parallel: bool) -> ParallelStyle:
    between = Shard(_SEQUENCE_DIM) if sequence_parallel else Replicate()
    # An embedding's input are numbers of entries, which every rank has.
    before = Replicate() if isinstance(module, nn.Embedding) else between
    if style == SEQUENCE:
        return SequenceParallel() if sequence_parallel else _Whole()
    if style == ROWWISE:
        arrives = Replicate() if isinstance(module, nn.Embedding) else Shard(-1)
        return RowwiseParallel(input_layouts=arrives, output_layouts=between)
    return ColwiseParallel(input_layouts=before, output_layouts=Replicate() if style == COLWISE_REP else Shard(-1))


def _apply(module: nn.Module, mesh: DeviceMesh, style: ParallelStyle, name: str) -> None:
    """Apply a style to a module, which is called ``name`` in messages."""
    try:
        # All ranks have the same weights already.
        parallelize_module(module, mesh, style, src_data_rank=None)
    except NotImplementedError as error:
        raise StrategyError(f"the plan's style for {name!r}: {error}") from error


class _Whole(ParallelStyle):
    """Each rank has the whole of the module's parameters, and computes all of it."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def partition(_name: str, part: nn.Module, mesh: DeviceMesh) -> None:
            for own, parameter in list(part.named_parameters(recurse=False)):
                whole = distribute_tensor(parameter.detach(), mesh, [Replicate()], src_data_rank=None)
                part.register_parameter(own, nn.Parameter(whole, requires_grad=parameter.requires_grad))

        return distribute_module(module, device_mesh, partition, _to_dtensors, _to_locals)


def _to_dtensors(_module: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
    def convert(value: Any) -> Any:
        if isinstance(value, Tensor) and not isinstance(value, DTensor):
            return DTensor.from_local(value, mesh, [Replicate()], run_check=False)
        return value

    return map_tree(convert, inputs)


def _to_locals(_module: nn.Module, outputs: Any, mesh: DeviceMesh) -> Any:
    def convert(value: Any) -> Any:
        return value.redistribute(mesh, [Replicate()]).to_local() if isinstance(value, DTensor) else value

    return map_tree(convert, outputs)
