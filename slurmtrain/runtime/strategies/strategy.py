"""The strategy of a session: it distributes models and their optimizers, and knows whether the script has done so."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from slurmtrain.errors import StrategyError
from slurmtrain.model.run.events.rank import HardwareCompared
from slurmtrain.model.spec.strategy import DDP, DP, FP16, FP32, ZERO1, StrategySpec, is_by_hardware, precision_on
from slurmtrain.runtime.job.process_group import RankGroup
from slurmtrain.runtime.job.torch_private import compiled_module
from slurmtrain.runtime.strategies import divided, replicated, sharded
from slurmtrain.runtime.strategies.hooks.feedback import FeedbackHook
from slurmtrain.runtime.strategies.mesh import PP, make_mesh, sizes_of
from slurmtrain.runtime.strategies.pipeline import LossOf, PipelinedModel
from slurmtrain.runtime.strategies.step.accumulation import accumulated
from slurmtrain.runtime.strategies.step.activations import recompute
from slurmtrain.runtime.strategies.step.clipping import clip_grad_norm_
from slurmtrain.runtime.strategies.step.evaluation import MeanLoss, evaluating
from slurmtrain.runtime.strategies.step.gradients import Gradients
from slurmtrain.runtime.strategies.step.precision import DTYPES, autocast, compute_in, hardware_of
from slurmtrain.runtime.strategies.step.scaler import LossScaler


class Strategy:
    """Distributes the models of a script as its spec says."""

    def __init__(
        self,
        spec: StrategySpec | None,
        ranks: RankGroup,
        node: int,
        microbatches: int = 1,
        *,
        mixed: bool = False,
        hardware: tuple[str, bool] | None = None,
    ) -> None:
        """Call it on all ranks.

        Args:
            spec: The strategy; None: DistributedDataParallel.
            ranks: The ranks that it is applied on.
            node: The node of this rank.
            microbatches: The number of microbatches in a step.
            mixed: Whether some ranks may have more of them.
            hardware: The hardware of this rank, as :func:`hardware_of` returns it; None: its device's.
        """
        self._spec = spec or StrategySpec(name=DDP)
        self._demanded = spec is not None
        self._ranks = ranks
        self._node = node
        self._models = 0
        # The ranks that have the stages of the model.
        self._pipeline: dist.ProcessGroup | None = None
        # The parameters of the models, whose gradients a step computes.
        self._parameters: list[weakref.ref[nn.Parameter]] = []
        self._hooks: list[FeedbackHook] = []
        self._optimizers = 0
        precision, (name, has_bf16) = self._spec.mixed_precision, hardware or hardware_of(ranks.device)
        self._precision = precision_on(precision, name, has_bf16=has_bf16)
        self.hardware: HardwareCompared | None = None
        """The hardware that each rank computes on, and its precision, if that depends on it."""
        if is_by_hardware(precision):
            names, precisions = zip(*ranks.gather((name, self._precision)), strict=True)
            self.hardware = HardwareCompared(names=names, precisions=precisions)
        # All ranks have the same scale: gradients are summed before it is removed.
        is_scaled = FP16 in ([self._precision] if self.hardware is None else self.hardware.precisions)
        self._scaler = LossScaler(ranks) if is_scaled else None
        self.gradients = Gradients(microbatches, self._scaler, differ=mixed)
        """The gradients of the current step."""
        # Parameters that have been replaced by their shards, as far as something still refers to them.
        self._replaced: list[weakref.ref[nn.Parameter]] = []

    @property
    def dp_size(self) -> int:
        """Into how many parts the batch of a step is divided. Raises StrategyError if the mesh has other sizes."""
        return sizes_of(self._spec, self._ranks.world_size).dp

    @property
    def dp_rank(self) -> int:
        """The data-parallel rank of this process. Raises StrategyError if the mesh has other sizes."""
        sizes = sizes_of(self._spec, self._ranks.world_size)
        return self._ranks.rank // sizes.tp % sizes.dp

    @property
    def tp_size(self) -> int:
        """How many neighbouring ranks divide layers among them. Raises StrategyError if the mesh has other sizes."""
        return sizes_of(self._spec, self._ranks.world_size).tp

    def parallelize(self, model: nn.Module) -> nn.Module:
        """The ``model``, distributed. Call it on all ranks. Raises StrategyError."""
        _check(model)
        self._models += 1
        if self._spec.name == DP:
            return replicated.on_all_gpus(model, self._ranks)
        if not self._spec.is_sharded:
            recompute(model, self._spec.activation_checkpointing)
            if self._precision != FP32:
                compute_in(model, DTYPES[self._precision], self._ranks.device)
            replica, hook = replicated.replicate(model, self._spec, self._ranks, self._node)
            self._hooks += [] if hook is None else [hook]
            self._parameters += map(weakref.ref, replica.parameters())
            return replica
        before = list(model.parameters())
        mesh = make_mesh(self._spec, self._ranks.gather(self._node), self._ranks.device)
        model = divided.divide(model, self._spec, mesh, self._ranks.device)
        self._pipeline = mesh[PP].get_group() if self._spec.is_pipeline else None
        kept = {id(parameter) for parameter in model.parameters()}
        self._replaced += [weakref.ref(parameter) for parameter in before if id(parameter) not in kept]
        return model

    def optimizer(self, cls: type[torch.optim.Optimizer], parameters: Iterable[Any], options: Mapping[str, Any]) -> Any:
        """An optimizer of the class ``cls`` with these ``parameters``, or groups of them, and ``options``."""
        self._optimizers += 1
        if self._spec.name != ZERO1 or self._ranks.world_size == 1:
            optimizer = cls(parameters, **options)
        else:
            # Importing it compiles a dozen optimizers.
            from torch.distributed.optim import ZeroRedundancyOptimizer

            optimizer = ZeroRedundancyOptimizer(parameters, optimizer_class=cls, **options)
        self.gradients.attach(optimizer)
        return optimizer

    def forward_backward(
        self,
        model: nn.Module,
        loss_of: LossOf,
        batch: tuple[Any, Tensor],
        step: int,
        *,
        microbatches: int,
        divide: Callable[[int], Sequence[int]],
    ) -> Tensor:
        """The gradients of a whole step, and its mean loss. Raises StrategyError.

        Args:
            model: What :meth:`parallelize` has returned.
            loss_of: The mean loss of a microbatch, of the model's output and the targets.
            batch: The inputs of this rank's part of the batch, a tensor or several in a tuple, and its targets, a
                tensor with as many rows.
            step: The number of finished steps.
            microbatches: Into how many each microbatch of a pipeline is divided.
            divide: The sizes of the microbatches of so many rows, without a pipeline.
        """
        if isinstance(model, PipelinedModel):
            return model.pipeline.forward_backward(self.gradients, loss_of, *batch, microbatches)
        return accumulated(self.gradients, model, loss_of, batch, step, divide(len(batch[1])))

    def evaluate(self, model: nn.Module, loss_of: LossOf, batches: Iterable[tuple[Any, Any, bool]]) -> Tensor:
        """The mean loss over ``batches`` of all ranks, without gradients. Raises DataError.

        Args:
            model: What :meth:`parallelize` has returned.
            loss_of: The mean loss of samples, of the model's output and the targets; or several figures in a tensor.
            batches: This rank's part of each, as for a step: inputs, targets, and whether its samples count.
        """
        line = model.pipeline if isinstance(model, PipelinedModel) else None
        mean = MeanLoss()
        with evaluating([model] if line is None else line.stages):
            for inputs, targets, counts in batches:
                arguments = inputs if isinstance(inputs, tuple) else (inputs,)
                if line is None:
                    total: Tensor | None = len(targets) * loss_of(model(*arguments), targets)
                else:
                    total = line.evaluate(loss_of, arguments, targets, self._ranks.greatest(len(targets))[0])
                if total is not None and counts:
                    mean.add(total, len(targets))
        return mean.over(self._ranks)

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """A context for what the script computes outside of the model's forward pass, in the same precision."""
        # What shards return is float32, and so is what follows.
        is_whole = self._spec.is_sharded or self._precision == FP32
        return autocast(None if is_whole else DTYPES[self._precision], self._ranks.device)

    def clip_grad_norm_(self, parameters: Iterable[Tensor] | Tensor, max_norm: float, norm_type: float) -> Tensor:
        """As torch's, over all ranks; nothing, and 0, before the last microbatch.

        ``parameters``: with gradients whose norm of ``norm_type`` becomes at most ``max_norm``.
        """
        device = self._ranks.device
        if not self.gradients.sync:
            return torch.zeros((), device=device)
        clipped = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        self.gradients.unscale(clipped)
        return clip_grad_norm_(clipped, max_norm, norm_type, device=device, parts=self._pipeline)

    def replicated_parameters(self) -> list[nn.Parameter]:
        """The parameters of replicated models."""
        alive = (reference() for reference in self._parameters)
        return [parameter for parameter in alive if parameter is not None]

    def states(self) -> dict[str, Any]:
        """What checkpoints contain besides what the script registers, by names that no argument can have."""
        names = (f"strategy.{self._spec.hook}{f'.{number}' if number else ''}" for number in count())
        scaler = {} if self._scaler is None else {"strategy.scaler": self._scaler}
        return {**scaler, **dict(zip(names, self._hooks, strict=False))}

    def check_optimizers(self, objects: Mapping[str, object]) -> None:
        """Raise StrategyError if one of the ``objects`` is an optimizer of parameters that have been replaced."""
        alive = (reference() for reference in self._replaced)
        replaced = {id(parameter) for parameter in alive if parameter is not None}
        for name, value in objects.items():
            groups = value.param_groups if isinstance(value, torch.optim.Optimizer) else []
            if replaced.intersection(id(parameter) for group in groups for parameter in group["params"]):
                raise StrategyError(
                    f"{name!r} was made before run.parallelize(model), which has replaced the parameters by their "
                    "shards: it would change nothing; make it afterwards"
                )

    def check_applied(self) -> None:
        """Raise StrategyError if the spec has a strategy that the script has not applied."""
        if not self._demanded:
            return
        if not self._models:
            raise StrategyError(
                f"the spec has 'strategy: {self._spec.name}', and the script does not apply it: call "
                "model = run.parallelize(model) before the first step, or remove the key"
            )
        if self._scaler is not None and not self._optimizers:
            raise StrategyError(
                "by 'strategy.mixed_precision' a process computes in fp16, so losses are scaled: make the optimizer "
                "with run.optimizer(torch.optim.AdamW, model.parameters(), lr=...), and call run.backward(loss)"
            )
        if self._spec.name == ZERO1 and not self._optimizers:
            raise StrategyError(
                "the spec has 'strategy: zero1', and the optimizer is not sharded: make it with "
                "run.optimizer(torch.optim.AdamW, model.parameters(), lr=...)"
            )


def _check(model: nn.Module) -> None:
    """Raise StrategyError if the ``model`` is distributed or compiled already, or has no values yet."""
    if compiled_module(model) is not None:
        raise StrategyError("run.parallelize() takes the model before torch.compile: compile what it returns")
    wrappers = nn.parallel.DistributedDataParallel, nn.DataParallel, PipelinedModel
    is_divided = sharded.is_sharded(model) or any(isinstance(parameter, DTensor) for parameter in model.parameters())
    if isinstance(model, wrappers) or is_divided:
        raise StrategyError(
            f"the model is distributed already ({type(model).__name__}): call run.parallelize() with the module itself"
        )
    empty = next((name for name, value in model.named_parameters() if value.is_meta), None)
    if empty is not None:
        raise StrategyError(
            f"the parameter {empty!r} is on the meta device and has no values: make the model on the CPU or on "
            "run.device"
        )
