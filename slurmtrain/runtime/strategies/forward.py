"""What changes the forward passes of a model's modules: mixed precision, and activations that are computed again.

Models whose parameters are whole get their precision by torch's autocast. As with ``fully_shard``, whose
MixedPrecisionPolicy does the same for sharded ones, the model's output is float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial, update_wrapper
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from slurmtrain.errors import StrategyError
from slurmtrain.model.experiment.kinds import suggestion
from slurmtrain.model.experiment.strategy import BF16, FP16, FP32, ActivationCheckpointing
from slurmtrain.runtime.job.torch_private import map_tree

DTYPES = {BF16: torch.bfloat16, FP16: torch.float16, FP32: torch.float32}
_LISTS = (nn.ModuleList, nn.ModuleDict)
_CHECKPOINTING = "strategy.activation_checkpointing"


def hardware_of(device: torch.device) -> tuple[str, bool]:
    """What a ``device`` is: its name, such as ``NVIDIA A100-SXM4-80GB`` or ``CPU``; and whether it computes in bf16.

    A CPU always does: where it has no instructions for that, it computes in float32 and rounds. GPUs before NVIDIA's
    compute capability 8.0 emulate it, slowly.
    """
    if device.type != "cuda":
        return "CPU", True
    with torch.cuda.device(device):
        return torch.cuda.get_device_name(device), torch.cuda.is_bf16_supported(including_emulation=False)


def compute_in(model: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
    """Have the forward pass of a ``model`` on ``device`` compute in ``dtype``, and return float32."""
    wrap_forward(model, partial(_in_autocast, dtype, device.type))


def wrap_forward(module: nn.Module, function: Callable[..., Any]) -> None:
    """Replace the forward pass of a ``module``: ``function`` gets it, and its arguments.

    The names of parameters and the class of the module stay as they are, and a copy of it computes with its own
    parameters, since a bound method is copied together with its object.
    """
    forward = module.forward
    module.forward = update_wrapper(partial(function, forward), forward)


def _in_autocast(dtype: torch.dtype, kind: str, forward: Callable[..., Any], *args: Any, **more: Any) -> Any:
    with torch.autocast(kind, dtype=dtype):
        output = forward(*args, **more)
    return map_tree(_as_float32, output)


def _as_float32(value: Any) -> Any:
    is_short = isinstance(value, torch.Tensor) and value.dtype in (torch.bfloat16, torch.float16)
    return value.float() if is_short else value


def of_classes(model: nn.Module, names: Sequence[str], key: str) -> list[nn.Module]:
    """The modules in a ``model`` whose classes have these ``names``, inner ones first.

    Raises StrategyError, which says that ``key`` names them, if there are none of a class, or these are never called.
    """
    inside = [module for module in model.modules() if module is not model]
    classes = {type(module).__name__ for module in inside}
    for name in names:
        if name not in classes:
            near = suggestion(name, classes)
            raise StrategyError(f"{key!r} names {name!r}, and the model has no module of such a class{near}")
    chosen = [module for module in inside if type(module).__name__ in names]
    for module in chosen:
        if isinstance(module, _LISTS):
            raise StrategyError(f"{key!r} names {type(module).__name__!r}, which is never called: name its elements")
    return chosen[::-1]


def elements(module: nn.Module) -> Iterator[nn.Module]:
    """The elements of the outermost module lists and sequences in a ``module``."""
    for child in module.children():
        if isinstance(module, (*_LISTS, nn.Sequential)) and not isinstance(child, _LISTS):
            yield child
        else:
            yield from elements(child)


def recompute(model: nn.Module, spec: ActivationCheckpointing | None) -> None:
    """Have the modules of a ``model`` that ``spec`` chooses, if any, compute their activations again when needed.

    Raises StrategyError if there are none, or an operator whose results are to be kept is not torch's.
    """
    if spec is None:
        return
    options: dict[str, Any] = {"use_reentrant": False}
    if spec.save:
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _operators(spec.save))
    if spec.wrap:
        modules = of_classes(model, spec.wrap, _CHECKPOINTING)
    else:
        # Of a single layer nothing but its input is kept anyway.
        modules = [module for module in elements(model) if any(True for _ in module.children())]
    if not modules:
        raise StrategyError(
            f"{_CHECKPOINTING!r} is true, and no element of the model's module lists and sequences consists of "
            "modules: name classes, such as 'activation_checkpointing: [Block]'"
        )
    for module in modules:
        wrap_forward(module, partial(checkpoint, **options))


def _operators(names: Sequence[str]) -> list[Any]:
    """All variants of the operators with these names, such as ``mm``."""
    operators: list[Any] = []
    for name in names:
        operator = getattr(torch.ops.aten, name, None)
        if operator is None:
            raise StrategyError(
                f"'{_CHECKPOINTING}.save' names {name!r}, and torch has no such operator (torch.ops.aten): a linear "
                "layer with a bias is 'addmm', without one 'mm'"
            )
        operators += [getattr(operator, variant) for variant in operator.overloads()]
    return operators
