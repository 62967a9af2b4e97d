"""Mixed precision of models whose parameters are whole: torch's autocast in their forward pass.

As with ``fully_shard``, whose MixedPrecisionPolicy does the same for sharded ones, the model's output is float32.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial, update_wrapper
from typing import Any

import torch
from torch import nn

from slurmtrain.model.spec.strategy import BF16, FP16, FP32
from slurmtrain.runtime.job.torch_private import map_tree

DTYPES = {BF16: torch.bfloat16, FP16: torch.float16, FP32: torch.float32}


def hardware_of(device: torch.device) -> tuple[str, bool]:
    """What a ``device`` is: its name, such as ``NVIDIA A100-SXM4-80GB`` or ``CPU``; and whether it computes in bf16.

    A CPU always does: where it has no instructions for that, it computes in float32 and rounds. GPUs before NVIDIA's
    compute capability 8.0 emulate it, slowly.
    """
    if device.type != "cuda":
        return "CPU", True
    with torch.cuda.device(device):
        return torch.cuda.get_device_name(device), torch.cuda.is_bf16_supported(including_emulation=False)


def autocast(dtype: torch.dtype | None, device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """A context where operations on ``device`` compute in ``dtype`` if that is safe; None: in their own dtype."""
    return contextlib.nullcontext() if dtype is None else torch.autocast(device.type, dtype=dtype)


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
