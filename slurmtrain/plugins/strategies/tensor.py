"""Layers that are divided over ranks, by torch's ``parallelize_module``: tensor and sequence parallelism.

The plan says how: the spec's, or the model's, whose method ``tensor_plan(size)`` gets the number of ranks and returns a
mapping from names of modules to names of styles, or to torch's ``ParallelStyle``. The parameters of all other modules
become replicated DTensors, too: norms of gradients, optimizers and checkpoints then have one kind of tensor. They
compute with plain tensors: each operation on DTensors costs about as much as a small layer does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from slurmtrain.errors import StrategyError
from slurmtrain.model.experiment.kinds import suggestion
from slurmtrain.model.experiment.strategy import (
    COLWISE_REP,
    ON_PARTS,
    ROWWISE,
    SEQUENCE,
    STYLES,
    StrategySpec,
)
from slurmtrain.runtime.job.torch_private import map_tree
from slurmtrain.runtime.training.passes import wrap_forward

# What transformers calls styles of ours.
_OF_TRANSFORMERS = {"colwise_gather_output": COLWISE_REP, "embedding_rowwise": ROWWISE}
# The numbers of heads in configurations of transformers.
_HEADS = ("num_attention_heads", "num_key_value_heads")
# The dimension of sequences: the last but one, before the features.
_SEQUENCE_DIM = -2
# At most so many numbers of a tensor are compared.
_COMPARED = 1000
# By how much numbers may differ, relative to the largest: results of the same sum may have been rounded differently.
_ROUNDING = 0.01


def styles_of(model: nn.Module, spec: StrategySpec, size: int) -> dict[str, str | ParallelStyle]:
    """How the modules of a model are divided, by their names.

    Args:
        model: The whole model.
        spec: The strategy, with a plan unless the model has one.
        size: Among how many ranks.

    Raises:
        StrategyError: There is no plan, or it does not fit the model or the number of ranks.
    """
    names = {name: name.split(".") for name, _ in model.named_modules()}
    styles: dict[str, str | ParallelStyle] = {}
    for pattern, style in _plan_of(model, spec, size).items():
        patterns = pattern.split(".")
        matching = [
            name
            for name, parts in names.items()
            if len(parts) == len(patterns) and all(map(fnmatchcase, parts, patterns))
        ]
        if not matching:
            raise StrategyError(
                f"the plan names {pattern!r}, but the model has no such module{suggestion(pattern, names)}"
            )
        # Of several that match, the last one counts.
        styles |= dict.fromkeys(matching, style)
    for name, style in styles.items():
        if isinstance(style, str):
            _check_sizes(name, model.get_submodule(name), style, size)
    rest = _unplanned(model, styles)
    if rest and spec.sequence_parallel:
        raise StrategyError(
            f"'strategy.sequence_parallel' divides what lies between layers, and the plan does not say what becomes of "
            f"{rest[0]!r}: add it, as {SEQUENCE!r} if it is a norm"
        )
    styles |= {name: Whole() for name in rest}
    for first, *others in _tied_parameters(model):
        divided = _divided_dim(model, first, styles)
        if other := next((each for each in others if _divided_dim(model, each, styles) != divided), None):
            raise StrategyError(
                f"the plan divides {first!r} and {other!r}, which are the same parameter (tied weights), in different "
                f"ways: make an Embedding {ROWWISE!r} and a Linear {COLWISE_REP!r}, leave both out, or untie them"
            )
    return styles


def divide_layers(
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
    tied = _tied_parameters(model)
    trained = {name: parameter.requires_grad for name, parameter in model.named_parameters(remove_duplicate=False)}
    for name, style in styles.items():
        module = model.get_submodule(name)
        chosen = _style(module, style, sequence_parallel) if isinstance(style, str) else style
        try:
            # All ranks have the same weights already.
            parallelize_module(module, mesh, chosen, src_data_rank=None)
        except NotImplementedError as error:
            raise StrategyError(f"the plan's style for {name!r}: {error}") from error
    # Each module has got a parameter of its own meanwhile: they become one again.
    for first, *others in tied:
        for name in others:
            owner, _, own = name.rpartition(".")
            model.get_submodule(owner).register_parameter(own, model.get_parameter(first))
    # torch's styles do not all keep it.
    for name, parameter in model.named_parameters(remove_duplicate=False):
        parameter.requires_grad_(trained[name])


def _plan_of(model: nn.Module, spec: StrategySpec, size: int) -> Mapping[str, str | ParallelStyle]:
    """The spec's plan, the model's own, or its plan as a model of transformers."""
    if spec.plan:
        return spec.plan
    kind, plan = type(model).__name__, getattr(model, "tensor_plan", None)
    if callable(plan):
        try:
            plan = plan(size)
        except ValueError as error:
            raise StrategyError(f"{kind}.tensor_plan({size}): {error}") from error
    elif plan is None and isinstance(of_transformers := getattr(model, "tp_plan", None), Mapping):
        for key in _HEADS:
            heads = getattr(getattr(model, "config", None), key, None)
            if isinstance(heads, int) and heads % size:
                raise StrategyError(f"the {heads} {key} of {kind} cannot be divided among {size} processes (tp)")
        plan = {pattern: _OF_TRANSFORMERS.get(str(each), str(each)) for pattern, each in of_transformers.items()}
    if not isinstance(plan, Mapping) or not plan:
        raise StrategyError(
            f"{kind} has no plan for dividing its layers: give it a method tensor_plan(size), or set "
            "'strategy.plan', such as {blocks.*.mlp.up: colwise, blocks.*.mlp.down: rowwise}"
        )
    for pattern, style in plan.items():
        if not isinstance(style, ParallelStyle) and style not in STYLES:
            raise StrategyError(
                f"the plan of {kind} has {style!r} for {pattern!r}: expected one of {', '.join(STYLES)}, or a "
                "torch.distributed.tensor.parallel.ParallelStyle"
            )
    return plan


def _tied_parameters(model: nn.Module) -> list[list[str]]:
    """The names of each parameter that has several."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [tied for tied in names.values() if len(tied) > 1]


def _divided_dim(model: nn.Module, parameter: str, styles: Mapping[str, str | ParallelStyle]) -> object:
    """The dimension along which a parameter is divided; None if it is not, a style if that alone knows."""
    owner, _, own = parameter.rpartition(".")
    style = styles.get(owner)
    if isinstance(style, Whole) or style in (SEQUENCE, ON_PARTS):
        return None
    if not isinstance(style, str):
        return style
    if own == "bias":
        return None if style == ROWWISE else 0
    # The weight of an Embedding is the transpose of a Linear's.
    return 0 if (style == ROWWISE) == isinstance(model.get_submodule(owner), nn.Embedding) else 1


def _check_sizes(name: str, module: nn.Module, style: str, size: int) -> None:
    """Raise StrategyError if a style does not suit a module, or the divided size is no multiple of ``size``."""
    if style in (SEQUENCE, ON_PARTS):
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
    """The modules with parameters of their own that are missing from the plan."""
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
        return SequenceParallel() if sequence_parallel else Whole()
    if style == ON_PARTS:
        return WholeOnParts()
    if style == ROWWISE:
        arrives = Replicate() if isinstance(module, nn.Embedding) else Shard(-1)
        return RowwiseParallel(input_layouts=arrives, output_layouts=between)
    return ColwiseParallel(input_layouts=before, output_layouts=Replicate() if style == COLWISE_REP else Shard(-1))


class Whole(ParallelStyle):
    """Each rank computes all of the module: ranks have the same inputs, and the same gradients."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return _compute_locally(module, device_mesh, Replicate())


class WholeOnParts(ParallelStyle):
    """Each rank computes a part of the features, such as its heads: gradients are the sum over all ranks."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return _compute_locally(module, device_mesh, Partial())


def _compute_locally(module: nn.Module, mesh: DeviceMesh, of_gradients: Placement) -> nn.Module:
    for part in module.modules():
        for own, parameter in list(part.named_parameters(recurse=False)):
            whole = distribute_tensor(parameter.detach(), mesh, [Replicate()], src_data_rank=None)
            part.register_parameter(own, nn.Parameter(whole, requires_grad=parameter.requires_grad))
    wrap_forward(module, partial(_with_local_parameters, module, of_gradients))
    return module


def _with_local_parameters(
    module: nn.Module, of_gradients: Placement, forward: Callable[..., Any], *args: Any, **more: Any
) -> Any:
    """Call ``forward``, whose ``module`` has plain tensors meanwhile; ``of_gradients``: how ranks have theirs."""
    hidden = []
    for part in module.modules():
        for own, parameter in part.named_parameters(recurse=False):
            # Attributes in the dictionary come before parameters, which stay what optimizers know.
            if isinstance(parameter, DTensor):
                part.__dict__[own] = parameter.to_local(grad_placements=[of_gradients])
                hidden.append((part, own))
    try:
        return forward(*map_tree(_whole, args), **map_tree(_whole, more))
    finally:
        for part, own in hidden:
            del part.__dict__[own]


def _whole(value: Any) -> Any:
    """A plain tensor instead of a DTensor, which a torch style before this module may have made."""
    if not isinstance(value, DTensor):
        return value
    return value.redistribute(value.device_mesh, [Replicate()]).to_local()


def check_first_inputs(module: nn.Module, mesh: DeviceMesh, problem: str) -> None:
    """Compare the inputs of a module when it is called for the first time with gradients, and not compiled.

    Args:
        module: It gets a hook, which raises StrategyError.
        mesh: The ranks whose inputs must be the same: one dimension.
        problem: What the error says.
    """
    is_first = True

    def compare(_module: nn.Module, args: Any, options: Any) -> None:
        nonlocal is_first
        if not is_first or torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        is_first = False
        # Only once: gathering objects would slow down every step.
        hook.remove()
        gathered: list[Any] = [None] * mesh.size()
        dist.all_gather_object(gathered, _input_samples((args, options)), group=mesh.get_group())
        first = gathered[0]
        for others in gathered[1:]:
            kinds = [[(shape, numbers.dtype) for shape, numbers in each] for each in (first, others)]
            if kinds[0] != kinds[1]:
                raise StrategyError(problem)
            for (_, numbers), (_, other) in zip(first, others, strict=True):
                is_close = torch.equal(numbers, other)
                if not is_close and numbers.is_floating_point():
                    largest = float(torch.maximum(numbers.abs(), other.abs()).max())
                    is_close = torch.allclose(numbers, other, rtol=0, atol=_ROUNDING * largest)
                if not is_close:
                    raise StrategyError(problem)

    hook = module.register_forward_pre_hook(compare, prepend=True, with_kwargs=True)


def _input_samples(inputs: Any) -> list[tuple[tuple[int, ...], Tensor]]:
    """The shape of each tensor in ``inputs``, and some of its numbers; infinite ones count as 0."""
    samples: list[tuple[tuple[int, ...], Tensor]] = []

    def sample(value: Any) -> Any:
        if isinstance(value, Tensor) and not (isinstance(value, DTensor) or value.is_complex()):
            numbers = value.detach().reshape(-1)
            numbers = numbers[:: 1 + numbers.numel() // _COMPARED].cpu()
            numbers = numbers.double().nan_to_num(0.0, 0.0, 0.0) if numbers.is_floating_point() else numbers.long()
            samples.append((tuple(value.shape), numbers))
        return value

    map_tree(sample, inputs)
    return samples
