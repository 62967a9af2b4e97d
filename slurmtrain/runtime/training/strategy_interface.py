"""The strategy of a session: it distributes models and their optimizers, and knows whether the script has done so.

Whole replicas are here: one in each process (torch's DistributedDataParallel), or one on each GPU of a single process
(DataParallel); what needs a mesh of ranks, such as shards, is a plug-in.

DistributedDataParallel begins with buckets of its own, and makes others after its first backward pass, by the order of
its gradients. A run that goes on from a checkpoint would then reduce its first step in other buckets than a run that
has never stopped, so that with three ranks or more sums differ in the last place. Hence the final buckets are made at
once, by the reverse of the order of the model's parameters, which is about the order of the backward pass.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.futures import Future
from torch.nn.parallel import DataParallel, DistributedDataParallel

from slurmtrain.errors import DataError, StrategyError
from slurmtrain.model.experiment.strategy import (
    BF16,
    DDP,
    DP,
    FP16,
    FP32,
    ZERO1,
    MeshSpec,
    StrategySpec,
    is_by_hardware,
    precision_on,
)
from slurmtrain.model.run.events.rank_events import HardwareCompared
from slurmtrain.runtime.job.process_group import RankGroup
from slurmtrain.runtime.job.torch_private import compiled_module
from slurmtrain.runtime.training.passes import (
    DTYPES,
    Gradients,
    LossOf,
    LossScaler,
    clip_grad_norm_,
    compute_in,
    hardware_of,
    recompute,
)
from slurmtrain.system.interpreter import STRATEGIES, load_plugin


class CommHook(ABC):
    """A communication hook that a plug-in has: how DistributedDataParallel reduces gradients."""

    is_settled = False
    """Whether the replica has its final buckets; before that, nothing is reduced."""

    @abstractmethod
    def reduce(self, bucket: dist.GradBucket) -> Future[Tensor]:
        """The future mean over ranks of the gradients in a ``bucket``."""


def replicate(model: nn.Module, spec: StrategySpec, ranks: RankGroup, node: int) -> tuple[nn.Module, CommHook | None]:
    """The ``model`` on the device of these ``ranks``, in DistributedDataParallel with the options of ``spec``.

    With a single process, or without a parameter to train, there is nothing to reduce, and it stays as it is. This rank
    is on the given ``node``.

    Returns:
        The model, and its communication hook if a plug-in has that.

    Raises:
        StrategyError: The hook cannot compress the gradients of the model, or does not suit the nodes.
    """
    model = model.to(ranks.device)
    if ranks.world_size == 1 or not any(parameter.requires_grad for parameter in model.parameters()):
        return model, None
    hook: CommHook | None = None
    if spec.hook is not None and spec.hook not in _CASTS:
        hook = load_plugin(STRATEGIES, spec.hook)(model, spec, ranks, node)
    replica = DistributedDataParallel(
        model,
        device_ids=[ranks.device] if ranks.device.type == "cuda" else None,
        bucket_cap_mb=spec.bucket_cap_mb,
        static_graph=spec.static_graph,
        gradient_as_bucket_view=spec.gradient_as_bucket_view,
        find_unused_parameters=spec.find_unused_parameters,
    )
    if hook is not None:
        replica.register_comm_hook(hook, _reduce)
    elif spec.hook in _CASTS:
        replica.register_comm_hook(None, _CASTS[spec.hook])
    # With the former it keeps its first buckets, which depend on the model alone; with the latter it takes the first
    # step as the example of all others, so that there cannot be another one before it.
    if not (spec.find_unused_parameters or spec.static_graph):
        # The final buckets, by a backward pass that has all gradients in reverse order.
        replica.module = _Sum(model)
        try:
            replica().backward()
        finally:
            replica.module = model
        for parameter in model.parameters():
            # They are gradients of the sum, and not of anything that the script computes.
            parameter.grad = None
    if hook is not None:
        # Only now: the backward pass that makes the buckets must leave no compression errors behind.
        hook.is_settled = True
    return replica, hook


def on_all_gpus(model: nn.Module, ranks: RankGroup) -> nn.Module:
    """The ``model``, in DataParallel over the GPUs of these ``ranks``, which must be a single one.

    With a single GPU, and on a CPU, it stays as it is. Raises StrategyError if there are several ranks.
    """
    if ranks.world_size > 1:
        raise StrategyError(f"'strategy: dp' is a single process, but there are {ranks.world_size}: use 'ddp'")
    model = model.to(ranks.device)
    if ranks.device.type != "cuda" or torch.cuda.device_count() == 1:
        return model
    return DataParallel(model)


def completed(value: Tensor) -> Future[Tensor]:
    """A future that already has its ``value``."""
    future: Future[Tensor] = Future(devices=[value.device] if value.device.type == "cuda" else None)
    future.set_result(value)
    return future


# DistributedDataParallel refuses annotations that are texts, as in this module; and torch's own bf16_compress_hook, by
# its name, where there is no NCCL, though gloo can reduce bfloat16.
def _reduce(hook, bucket):  # type: ignore[no-untyped-def]
    return hook.reduce(bucket) if hook.is_settled else completed(bucket.buffer())


def _compress_by(name):  # type: ignore[no-untyped-def]
    def compress(state, bucket):  # type: ignore[no-untyped-def]
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

        return getattr(default_hooks, name)(state, bucket)

    return compress


_CASTS = {BF16: _compress_by("bf16_compress_hook"), FP16: _compress_by("fp16_compress_hook")}  # type: ignore[no-untyped-call]


class _Sum(nn.Module):
    """The sum of all parameters of a module. Autograd goes through its terms in reverse order."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.inner = module

    def forward(self) -> Tensor:
        """The sum."""
        terms = [parameter.sum().float() for parameter in self.inner.parameters() if parameter.requires_grad]
        return torch.stack(terms).sum()


class Pipeline(ABC):
    """What computes whole steps of a model that no rank has as a whole: its attribute ``pipeline``."""

    stages: Sequence[nn.Module]
    """The stages of this rank."""
    group: dist.ProcessGroup
    """The ranks of the pipeline."""

    @abstractmethod
    def forward_backward(
        self, gradients: Gradients, loss_of: LossOf, inputs: Any, targets: Any, accumulation: int
    ) -> Tensor:
        """Compute the gradients of a step; returns the mean loss of this part of the batch, on all ranks.

        Args:
            gradients: The gradients of the step.
            loss_of: The mean loss of a microbatch, called with the model's output and its targets.
            inputs: A tensor, or several in a tuple, with the same number of rows and the same shapes on all ranks.
            targets: A tensor with as many rows.
            accumulation: The number of parts that each microbatch is divided into.

        Raises:
            StrategyError: The rows cannot be divided into microbatches evenly.
        """

    @abstractmethod
    def evaluate(self, loss_of: LossOf, arguments: tuple[Any, ...], targets: Tensor, rows: int) -> Tensor | None:
        """Compute the loss of a part of a batch without gradients, in the modules' present modes.

        Args:
            loss_of: The mean loss of a microbatch, called with the model's output and its targets.
            arguments: Tensors with the same number of rows.
            targets: A tensor with as many rows.
            rows: The most rows of any rank's part.

        Returns:
            The sum over the rows of this part; None on ranks without the model's output.
        """


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
        # The ranks that have different parts of the model.
        self._parts: dist.ProcessGroup | None = None
        # The parameters of the models, whose gradients a step computes.
        self._parameters: list[weakref.ref[nn.Parameter]] = []
        # Communication hooks with a state.
        self._hooks: list[CommHook] = []
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
    def precision(self) -> str:
        """What this rank computes in: ``fp32``, ``bf16`` or ``fp16``."""
        return self._precision

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
        _check_plain(model)
        self._models += 1
        if self._spec.name == DP:
            return on_all_gpus(model, self._ranks)
        if not self._spec.is_sharded:
            recompute(model, self._spec.activation_checkpointing)
            if self._precision != FP32:
                compute_in(model, DTYPES[self._precision], self._ranks.device)
            replica, hook = replicate(model, self._spec, self._ranks, self._node)
            if hook is not None and hasattr(hook, "state_dict"):
                self._hooks.append(hook)
            self._parameters += map(weakref.ref, replica.parameters())
            return replica
        before = list(model.parameters())
        divided: nn.Module = load_plugin(STRATEGIES, "mesh")(model, self._spec, self._ranks, self._node)
        pipeline = _pipeline_of(divided)
        self._parts = None if pipeline is None else pipeline.group
        kept = {id(parameter) for parameter in divided.parameters()}
        self._replaced += [weakref.ref(parameter) for parameter in before if id(parameter) not in kept]
        return divided

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
        pipeline = _pipeline_of(model)
        if pipeline is not None:
            return pipeline.forward_backward(self.gradients, loss_of, *batch, microbatches)
        return self.gradients.accumulated(model, loss_of, batch, step, divide(len(batch[1])))

    def evaluate(self, model: nn.Module, loss_of: LossOf, batches: Iterable[tuple[Any, Any, bool]]) -> Tensor:
        """The mean loss over ``batches`` of all ranks, without gradients. Raises DataError.

        Args:
            model: What :meth:`parallelize` has returned.
            loss_of: The mean loss of samples, of the model's output and the targets; or several figures in a tensor.
            batches: This rank's part of each, as for a step: inputs, targets, and whether its samples count.
        """
        total: Tensor | None = None
        samples, pipeline = 0, _pipeline_of(model)
        with _evaluating([model] if pipeline is None else pipeline.stages):
            for inputs, targets, counts in batches:
                arguments = inputs if isinstance(inputs, tuple) else (inputs,)
                if pipeline is None:
                    loss: Tensor | None = len(targets) * loss_of(model(*arguments), targets)
                else:
                    loss = pipeline.evaluate(loss_of, arguments, targets, self._ranks.greatest(len(targets))[0])
                if loss is not None and counts:
                    # The sum over many batches in float32 would lose digits.
                    total = loss.detach().double() + (0 if total is None else total)
                    samples += len(targets)
        gathered = self._ranks.gather((None if total is None else total.tolist(), samples))
        samples = sum(samples for _, samples in gathered)
        if not samples:
            raise DataError("run.evaluate() needs batches of inputs and targets, and none had a sample")
        sums = [torch.tensor(total, dtype=torch.float64) for total, _ in gathered if total is not None]
        return (torch.stack(sums).sum(0) / samples).float().to(self._ranks.device)

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """A context for what the script computes outside of the model's forward pass, in the same precision."""
        # What shards return is float32, and so is what follows.
        if self._spec.is_sharded or self._precision == FP32:
            return contextlib.nullcontext()
        return torch.autocast(self._ranks.device.type, dtype=DTYPES[self._precision])

    def clip_grad_norm_(self, parameters: Iterable[Tensor] | Tensor, max_norm: float, norm_type: float) -> Tensor:
        """As torch's, over all ranks; nothing, and 0, before the last microbatch.

        ``parameters``: with gradients whose norm of ``norm_type`` becomes at most ``max_norm``.
        """
        device = self._ranks.device
        if not self.gradients.sync:
            return torch.zeros((), device=device)
        clipped = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        self.gradients.unscale(clipped)
        return clip_grad_norm_(clipped, max_norm, norm_type, device=device, parts=self._parts)

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
                    f"{name!r} was made before run.parallelize(model) replaced the parameters by their shards, so it "
                    "would train nothing; make it afterwards"
                )

    def check_applied(self) -> None:
        """Raise StrategyError if the spec has a strategy that the script has not applied."""
        if not self._demanded:
            return
        if not self._models:
            raise StrategyError(
                f"the spec has 'strategy: {self._spec.name}', but the script does not apply it: call model = "
                "run.parallelize(model) before the first step, or remove the key"
            )
        if self._scaler is not None and not self._optimizers:
            raise StrategyError(
                "'strategy.mixed_precision' makes a process compute in fp16, so losses are scaled: make the optimizer "
                "with run.optimizer(torch.optim.AdamW, model.parameters(), lr=...), and call run.backward(loss)"
            )
        if self._spec.name == ZERO1 and not self._optimizers:
            raise StrategyError(
                "the spec has 'strategy: zero1', but the optimizer is not sharded: make it with "
                "run.optimizer(torch.optim.AdamW, model.parameters(), lr=...)"
            )


def sizes_of(spec: StrategySpec, world_size: int) -> MeshSpec:
    """The sizes of a strategy's mesh with this many ranks.

    Args:
        spec: The strategy.
        world_size: How many ranks there are.

    Raises:
        StrategyError: Its sizes do not multiply to that.
    """
    try:
        return spec.layout.sizes(world_size)
    except ValueError as problem:
        raise StrategyError(f"'strategy.mesh': {problem}") from None


def _pipeline_of(model: nn.Module) -> Pipeline | None:
    pipeline = getattr(model, "pipeline", None)
    return pipeline if isinstance(pipeline, Pipeline) else None


def is_sharded(model: nn.Module) -> bool:
    """Whether ``fully_shard`` was applied to the ``model``."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(model, fsdp.FSDPModule)


@contextlib.contextmanager
def _evaluating(modules: Sequence[nn.Module]) -> Iterator[None]:
    """A context where ``modules`` are in eval mode and gradients are off; both are restored at its end."""
    inner = list({id(each): each for module in modules for each in module.modules()}.values())
    modes = [(module, module.training) for module in inner]
    for module in modules:
        module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes:
            module.training = mode
        for module in inner:
            # Some shards are freed by the backward pass alone; the optimizer would change them, and not what has been
            # gathered from them.
            if is_sharded(module):
                module.reshard()  # type: ignore[operator]


def _check_plain(model: nn.Module) -> None:
    """Raise StrategyError if the ``model`` is distributed or compiled already, or has no values yet."""
    if compiled_module(model) is not None:
        raise StrategyError("run.parallelize() needs the model before torch.compile: compile the returned model")
    wrappers = nn.parallel.DistributedDataParallel, nn.DataParallel
    is_divided = is_sharded(model) or any(isinstance(parameter, DTensor) for parameter in model.parameters())
    if isinstance(model, wrappers) or is_divided or _pipeline_of(model) is not None:
        raise StrategyError(
            f"the model is already distributed ({type(model).__name__}): call run.parallelize() with the module itself"
        )
    empty = next((name for name, value in model.named_parameters() if value.is_meta), None)
    if empty is not None:
        raise StrategyError(
            f"the parameter {empty!r} is on the meta device and has no values: make the model on the CPU or on "
            "run.device"
        )
