"""Forward and backward passes of a step: precision, activations computed again, microbatches, and optimizers that wait.

Models whose parameters are whole get their precision by torch's autocast. As with ``fully_shard``, whose
MixedPrecisionPolicy does the same for sharded ones, the model's output is float32. As in accelerate,
``optimizer.step()`` and ``optimizer.zero_grad()`` do nothing between the microbatches of a step.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial, update_wrapper, wraps
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from slurmtrain.errors import StrategyError
from slurmtrain.model.experiment.kinds import suggestion
from slurmtrain.model.experiment.strategy import BF16, FP16, FP32, ActivationCheckpointing
from slurmtrain.runtime.job.process_group import RankGroup
from slurmtrain.runtime.job.torch_private import infinities, map_tree, scale_of

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
    # Not a function in here: such a model can be pickled.
    wrap_forward(model, partial(_in_autocast, dtype, device.type))


def wrap_forward(module: nn.Module, function: Callable[..., Any]) -> None:
    """Replace the forward pass of a ``module``: ``function`` gets it, and its arguments.

    The names of parameters and the class of the module stay as they are, and a copy of it computes with its own
    parameters, since a bound method is copied together with its object.
    """
    forward = module.forward
    module.forward = update_wrapper(partial(function, forward), forward)


def _in_autocast(dtype: torch.dtype, kind: str, forward: Callable[..., Any], *args: Any, **more: Any) -> Any:
    def to_float32(value: Any) -> Any:
        is_short = isinstance(value, torch.Tensor) and value.dtype in (torch.bfloat16, torch.float16)
        return value.float() if is_short else value

    with torch.autocast(kind, dtype=dtype):
        output = forward(*args, **more)
    return map_tree(to_float32, output)


def of_classes(model: nn.Module, names: Sequence[str], key: str) -> list[nn.Module]:
    """The modules in a ``model`` whose classes have these ``names``, inner ones first.

    Raises StrategyError, which says that ``key`` names them, if there are none of a class, or these are never called.
    """
    inside = [module for module in model.modules() if module is not model]
    classes = {type(module).__name__ for module in inside}
    for name in names:
        if name not in classes:
            near = suggestion(name, classes)
            raise StrategyError(f"{key!r} names {name!r}, but the model has no module of that class{near}")
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
        operators: list[Any] = []
        for name in spec.save:
            operator = getattr(torch.ops.aten, name, None)
            if operator is None:
                raise StrategyError(
                    f"'{_CHECKPOINTING}.save' names {name!r}, but torch has no such operator (torch.ops.aten): a "
                    "linear layer is 'addmm' with a bias and 'mm' without one"
                )
            operators += [getattr(operator, variant) for variant in operator.overloads()]
        options["context_fn"] = partial(create_selective_checkpoint_contexts, operators)
    if spec.wrap:
        modules = of_classes(model, spec.wrap, _CHECKPOINTING)
    else:
        # Of a single layer nothing but its input is kept anyway.
        modules = [module for module in elements(model) if any(True for _ in module.children())]
    if not modules:
        raise StrategyError(
            f"{_CHECKPOINTING!r} is true, but no element of the model's module lists and sequences consists of "
            "modules: name classes, such as 'activation_checkpointing: [Block]'"
        )
    for module in modules:
        wrap_forward(module, partial(checkpoint, **options))


# The loss of a microbatch, from the model's output and the targets.
LossOf = Callable[[Any, Any], Tensor]


class Gradients:
    """The gradients of the current step, and the optimizers that use them."""

    def __init__(self, microbatches: int, scaler: LossScaler | None, *, differ: bool = False) -> None:
        """The gradients of steps with ``microbatches`` of equal size, unless :meth:`divide` says otherwise.

        Args:
            microbatches: The number of microbatches in a step.
            scaler: Of the loss; None if it needs no scale.
            differ: Whether ranks may have different numbers of microbatches, so that each step has to be divided.
        """
        self.sync = True
        """Whether the next optimizer step has all gradients: not before the last microbatch."""
        self.scaler = scaler
        self._differ = differ
        self._equal = (1,) * microbatches
        # The samples of each microbatch of the current step, and whether they are known.
        self._sizes = self._equal
        self._is_divided = False
        self._finished = 0
        self._step = 0
        self._is_inside = False
        # In the script's order of creation, which is the same on all ranks.
        self._optimizers: list[weakref.ref[torch.optim.Optimizer]] = []
        # Optimizers whose parameters may have unused gradients.
        self._ready: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()

    # --- microbatches -------------------------------------------------------------------------------------------------

    def divide(self, sizes: Sequence[int]) -> None:
        """The next microbatches make a whole step, and have these ``sizes`` in samples.

        Raises StrategyError if the ones before do not make a whole step.
        """
        self._check_finished()
        self._sizes, self._is_divided = tuple(sizes), True

    @contextlib.contextmanager
    def accumulate(self, models: Sequence[nn.Module], step: int) -> Iterator[None]:
        """The context of a microbatch, after ``step`` finished steps; only the last reduces gradients of ``models``.

        Raises StrategyError if the step before had fewer microbatches, or if ranks may have different numbers of them
        and the step has not been divided.
        """
        if step != self._step:
            self._check_finished()
        if self._differ and not self._is_divided:
            raise StrategyError(
                "with 'resources.mixed: true' processes may have different numbers of microbatches: take them from "
                "run.microbatches(inputs, targets)"
            )
        self._step = step
        self.sync = self._finished + 1 == len(self._sizes)
        self._is_inside = True
        try:
            with contextlib.ExitStack() as stack:
                for model in models if not self.sync else ():
                    stack.enter_context(no_sync(model))
                yield
        finally:
            self._is_inside = False
        # Not in the finally clause: a microbatch that has raised an exception was not computed.
        self._finished += 1
        if self.sync:
            self._finished, self._sizes, self._is_divided = 0, self._equal, False

    def backward(self, loss: Tensor, **options: Any) -> None:
        """The backward pass of a ``loss``, scaled as its microbatch needs, with ``options`` of ``Tensor.backward``."""
        count = len(self._sizes)
        if self._is_inside and count > 1:
            own = self._sizes[self._finished]
            # As scripts divide it that know of equal sizes only, to the same bits.
            loss = loss / count if len(set(self._sizes)) == 1 else loss * (own / sum(self._sizes))
        self.scaled(loss).backward(**options)

    def _check_finished(self) -> None:
        if self._finished:
            raise StrategyError(
                f"step {self._step} ended after {self._finished} of {len(self._sizes)} microbatches: use "
                "run.accumulate(model) for each of them"
            )

    def scaled(self, loss: Any) -> Any:
        """The ``loss`` whose backward pass follows, with the scale of fp16."""
        self._ready.update(self._living())
        return loss if self.scaler is None else self.scaler.scale(loss)

    def accumulated(
        self, model: nn.Module, loss_of: LossOf, batch: tuple[Any, Tensor], step: int, sizes: Sequence[int]
    ) -> Tensor:
        """Compute the gradients of a whole step of a model that each rank calls; returns its mean loss on this rank.

        Args:
            model: The model to call.
            loss_of: The mean loss of a microbatch.
            batch: Inputs, a tensor or several in a tuple, and targets, with as many rows.
            step: The number of finished steps.
            sizes: The number of rows of each microbatch.
        """
        inputs, targets = batch
        arguments = inputs if isinstance(inputs, tuple) else (inputs,)
        self.divide(sizes)
        losses = []
        for *part, target in zip(*(each.split(list(sizes)) for each in (*arguments, targets)), strict=True):
            with self.accumulate([model], step):
                loss = loss_of(model(*part), target)
                self.backward(loss)
            losses.append(loss.detach())
        stacked = torch.stack(losses)
        if len(set(sizes)) == 1:
            return stacked.mean()
        return (stacked * torch.tensor(sizes, dtype=stacked.dtype, device=stacked.device)).sum() / sum(sizes)

    # --- optimizers ---------------------------------------------------------------------------------------------------

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """Have an ``optimizer`` make its steps with whole, unscaled gradients, which plain steps have anyway."""
        if self.scaler is None and len(self._equal) == 1 and not self._differ:
            return
        self._optimizers.append(weakref.ref(optimizer))
        gradients, step, zero_grad = self, optimizer.step, optimizer.zero_grad

        # Schedulers replace the method, too, and need one that is bound.
        @wraps(step)
        def step_with_all(optimizer: torch.optim.Optimizer, *args: Any, **options: Any) -> Any:
            is_inside, is_ready = gradients._is_inside, optimizer in gradients._ready
            if not gradients.sync and is_inside:
                return None
            if not gradients.sync:
                raise StrategyError(
                    f"optimizer.step() after {gradients._finished} of {len(gradients._sizes)} microbatches: use "
                    "run.accumulate(model) for each of them"
                )
            if not is_ready and (is_inside or gradients.scaler is not None):
                raise StrategyError("optimizer.step() without gradients: call run.backward(loss), not loss.backward()")
            gradients._ready.discard(optimizer)
            if gradients.scaler is not None:
                stepping: Any = optimizer
                stepping.step_was_skipped = not gradients.scaler.allows_step(optimizer)
                if stepping.step_was_skipped:
                    return None
            return step(*args, **options)

        @wraps(zero_grad)
        def zero_unless_needed(optimizer: torch.optim.Optimizer, *args: Any, **options: Any) -> None:
            if not (gradients._is_inside and optimizer in gradients._ready):
                zero_grad(*args, **options)

        changed: Any = optimizer
        changed.step, changed.zero_grad = (
            MethodType(step_with_all, optimizer),
            MethodType(zero_unless_needed, optimizer),
        )
        changed.step_was_skipped = False

    def unscale(self, parameters: Iterable[Tensor]) -> None:
        """Remove the scale of fp16 from the gradients of all optimizers that have any of these ``parameters``."""
        if self.scaler is None:
            return
        ids = {id(parameter) for parameter in parameters}
        for optimizer in self._living():
            own = (id(parameter) for group in optimizer.param_groups for parameter in group["params"])
            if optimizer in self._ready and not ids.isdisjoint(own):
                self.scaler.unscale_(optimizer)

    def _living(self) -> Iterator[torch.optim.Optimizer]:
        return (optimizer for reference in self._optimizers if (optimizer := reference()) is not None)


@contextlib.contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """A context where backward passes of a ``model`` add to its gradients, but do not reduce them over ranks."""
    replica: Any = model
    if hasattr(model, "set_requires_gradient_sync"):
        replica.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            replica.set_requires_gradient_sync(True)
    else:
        # A static graph is recorded while gradients are reduced, and its first step fails without. Reducing sums that
        # are partly reduced gives the same.
        can_wait = hasattr(model, "no_sync") and not getattr(model, "static_graph", False)
        with replica.no_sync() if can_wait else contextlib.nullcontext():
            yield


class LossScaler(torch.amp.GradScaler):
    """A GradScaler with which an infinite gradient on any rank skips the step on all of them.

    It is updated when the next loss is scaled, or its state is saved: in between, several optimizers may make their
    steps with gradients of the same scale.
    """

    def __init__(self, ranks: RankGroup) -> None:
        """All ``ranks`` make their steps at the same time."""
        super().__init__(ranks.device.type)
        self._is_alone = ranks.world_size == 1
        self._has_stepped = False
        self._unscaled: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()

    def scale(self, outputs: Any) -> Any:
        """As GradScaler's, of ``outputs``."""
        self._settle()
        return super().scale(outputs)

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """As GradScaler's, for an ``optimizer``; in a step once is enough. Call it on all ranks."""
        if optimizer in self._unscaled:
            return
        super().unscale_(optimizer)
        self._unscaled.add(optimizer)
        if self._is_alone:
            return
        # A rank has gradients of its own parts of a model, and perhaps none.
        own, device = infinities(self, optimizer), scale_of(self).device
        anywhere = sum((flag.to(device) for flag in own.values()), torch.zeros((), device=device))
        dist.all_reduce(anywhere, op=dist.ReduceOp.MAX)
        own.clear()
        own[device] = anywhere

    def allows_step(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether the gradients of an ``optimizer`` are finite, for its next step. Call it on all ranks.

        GradScaler's own ``step`` would call the optimizer's, which has called this.
        """
        self.unscale_(optimizer)
        self._has_stepped = True
        return not any(flag.item() for flag in infinities(self, optimizer).values())

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """As GradScaler's, to ``new_scale`` if that is given."""
        super().update(new_scale)
        self._unscaled.clear()
        self._has_stepped = False

    def state_dict(self) -> dict[str, Any]:
        """As GradScaler's."""
        self._settle()
        return super().state_dict()

    def _settle(self) -> None:
        if self._has_stepped:
            self.update()


def clip_grad_norm_(
    parameters: Iterable[Tensor],
    max_norm: float,
    norm_type: float,
    *,
    device: torch.device,
    parts: dist.ProcessGroup | None = None,
) -> Tensor:
    """Scale the gradients of ``parameters`` so that their norm is at most ``max_norm``.

    Args:
        parameters: The parameters of the whole model, or of this rank's part of it.
        max_norm: The greatest norm.
        norm_type: Which norm; infinity for the greatest absolute value.
        device: Where this rank computes.
        parts: The group of ranks that have different parts of the model, such as the stages of a pipeline.

    Returns:
        The norm before, on all ranks.
    """
    # torch computes with tensors of the same mesh only.
    groups: dict[DeviceMesh | None, list[Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            mesh = parameter.grad.device_mesh if isinstance(parameter.grad, DTensor) else None
            groups.setdefault(mesh, []).append(parameter)
    norms = []
    for group in groups.values():
        norm = get_total_norm((parameter.grad for parameter in group if parameter.grad is not None), norm_type)
        norms.append((norm.full_tensor() if isinstance(norm, DTensor) else norm).to(device))
    total = torch.linalg.vector_norm(torch.stack(norms), norm_type) if norms else torch.zeros((), device=device)
    if parts is not None and math.isinf(norm_type):
        dist.all_reduce(total, op=dist.ReduceOp.MAX, group=parts)
    elif parts is not None:
        powers = total**norm_type
        dist.all_reduce(powers, group=parts)
        total = powers ** (1.0 / norm_type)
    for group in groups.values():
        clip_grads_with_norm_(group, max_norm, total)
    return total
