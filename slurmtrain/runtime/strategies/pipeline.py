"""Models whose parts are divided over ranks, one after the other: torch.distributed.pipelining.

Each rank keeps its own parts, under the names that they have in the whole model: checkpoints do not depend on the
division.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from slurmtrain.errors import StrategyError
from slurmtrain.model.spec.strategy import SCHEDULES, StrategySpec
from slurmtrain.runtime.job.torch_private import map_tree
from slurmtrain.runtime.strategies.step.gradients import Gradients

# The loss of a microbatch, from the model's output and the targets.
LossOf = Callable[[Any, Any], Tensor]


class StageModule(nn.Module):
    """Consecutive parts of a model."""

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        """``parts``: the modules, in the order of their application."""
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, *inputs: Any) -> Any:
        """What the last part returns. ``inputs``: of the first one."""
        outputs: Any = inputs
        for part in self.parts:
            outputs = part(*outputs) if isinstance(outputs, tuple) else part(outputs)
        return outputs


class PipelinedModel(nn.Module):
    """The parts that a rank has, under their names in the whole model."""

    def __init__(self, parts: Mapping[str, nn.Module], pipeline: Pipeline) -> None:
        """``parts``: by their names. ``pipeline``: what computes with them."""
        super().__init__()
        self.pipeline = pipeline
        for name, part in parts.items():
            *path, last = name.split(".")
            folder: nn.Module = self
            for each in path:
                if each not in dict(folder.named_children()):
                    folder.add_module(each, nn.Module())
                folder = folder.get_submodule(each)
            folder.add_module(last, part)

    def forward(self, *_inputs: Any) -> Any:
        """Raise StrategyError: no rank has the whole model."""
        raise StrategyError(
            "a pipelined model cannot be called, since each process has some of its parts: compute a step with "
            "run.forward_backward(model, loss_of, inputs, targets), and a loss without gradients with "
            "run.evaluate(model, loss_of, batches)"
        )


class Pipeline:
    """Computes the steps of a model by one of torch's schedules."""

    def __init__(
        self, stages: Mapping[int, nn.Module], spec: StrategySpec, group: dist.ProcessGroup, device: torch.device
    ) -> None:
        """The pipeline of the ranks of a ``group``.

        Args:
            stages: The stages of this rank, by their indices.
            spec: The strategy, with its schedule and microbatches.
            group: The ranks of the pipeline.
            device: Where this rank computes.
        """
        self._schedule_spec = SCHEDULES[spec.schedule]
        self._stages = stages
        self._group = group
        self._device = device
        self._ranks = group.size()
        self._microbatches = spec.microbatches or self._ranks
        self._count = self._ranks * self._schedule_spec.per_rank
        # By microbatches and shapes, since torch's schedules are for microbatches of a single shape. The last batch of
        # an evaluation often has another one.
        self._training = lru_cache(maxsize=1)(lambda count, _: self._schedule(count))
        self._evaluation = lru_cache(maxsize=2)(lambda count, _: self._schedule(count, evaluates=True))
        self._loss_of: LossOf | None = None

    @property
    def stages(self) -> list[nn.Module]:
        """The stages of this rank."""
        return list(self._stages.values())

    def forward_backward(
        self, gradients: Gradients, loss_of: LossOf, inputs: Any, targets: Any, accumulation: int
    ) -> Tensor:
        """Compute the gradients of a step; returns the mean loss of this part of the batch, on all ranks.

        Args:
            gradients: The gradients of the step.
            loss_of: The mean loss of a microbatch, called with the model's output and its targets.
            inputs: A tensor, or several in a tuple, with the same number of rows; used by the first stage, and of the
                same shapes on all ranks.
            targets: A tensor with as many rows; used by the last stage.
            accumulation: The number of parts that each microbatch is divided into.

        Raises:
            StrategyError: The rows cannot be divided into microbatches evenly.
        """
        arguments = inputs if isinstance(inputs, tuple) else (inputs,)
        microbatches = self._microbatches * accumulation
        rows = len(arguments[0])
        if rows % microbatches:
            raise StrategyError(
                f"{rows} samples cannot be divided into {microbatches} microbatches evenly: change the batch size, or "
                "'strategy.microbatches' and 'resources.accumulation', whose product they are"
            )
        # On all ranks, since the gradients of all have the scale of the loss.
        scale = gradients.scaled(torch.ones((), device=self._device))
        self._loss_of = lambda output, target: gradients.scaled(loss_of(output, target) / microbatches)
        losses: list[Tensor] = []
        self._apply(self._training(microbatches, _shapes(arguments)), arguments, target=targets, losses=losses)
        mean = torch.stack(losses).sum().detach().float() / scale if losses else torch.zeros((), device=self._device)
        dist.broadcast(mean, group_src=self._ranks - 1, group=self._group)
        return mean

    def evaluate(self, loss_of: LossOf, arguments: tuple[Any, ...], targets: Tensor, rows: int) -> Tensor | None:
        """Compute the loss of a part of a batch without gradients, in the modules' present modes.

        Where stages are sharded, all ranks have to call them equally often, also with parts of other sizes. So each
        part is filled up with its first row to microbatches of equal size; the loss is the loss of its own rows.

        Args:
            loss_of: The mean loss of a microbatch, called with the model's output and its targets.
            arguments: Tensors with the same number of rows.
            targets: A tensor with as many rows.
            rows: The most rows of any rank's part.

        Returns:
            The sum over the rows of this part, on the last rank; None on the others.
        """
        if self._ranks == 1:
            # torch's schedules for several stages on a single rank cannot do without a backward pass.
            output: Any = arguments
            for stage in self._stages.values():
                output = stage(*output) if isinstance(output, tuple) else stage(output)
            return len(targets) * loss_of(output, targets)
        size = -(-rows // self._microbatches)
        microbatches = -(-rows // size)
        left, sums = len(targets), list[Tensor]()

        def note(output: Any, target: Tensor) -> Tensor:
            nonlocal left
            own = min(left, size)
            left -= own
            if own:
                sums.append(own * loss_of(map_tree(partial(_first, own, size), output), target[:own]))
            return torch.zeros(())

        self._loss_of = note
        filled = [_filled(each, size * microbatches) for each in (*arguments, targets)]
        self._apply(self._evaluation(microbatches, _shapes(filled)), filled[:-1], target=filled[-1])
        return torch.stack(sums).sum(0) if sums else None

    def _apply(self, step: Callable[..., Any], arguments: Sequence[Any], **of_last: Any) -> None:
        """Call a ``step`` of a schedule with what the stages of this rank need."""
        step(*(arguments if 0 in self._stages else ()), **(of_last if self._count - 1 in self._stages else {}))

    def _schedule(self, microbatches: int, *, evaluates: bool = False) -> Callable[..., Any]:
        """A step of a new schedule of torch, or a forward pass alone."""
        # Importing it takes a while, and only pipelines need it.
        from torch.distributed.pipelining import PipelineStage
        from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class

        stages = [
            PipelineStage(module, index, self._count, self._device, group=self._group)
            for index, module in self._stages.items()
        ]
        cls = get_schedule_class(self._schedule_spec.forward if evaluates else self._schedule_spec.name)
        of_rank = stages if issubclass(cls, PipelineScheduleMulti) else stages[0]
        try:
            # Loss and not gradients are divided: there may be gradients of an earlier call.
            schedule = cls(of_rank, microbatches, loss_fn=self._loss, scale_grads=False)
        except ValueError as error:
            raise StrategyError(f"'strategy.schedule': {error}") from error
        for stage in stages:
            keep_state(stage)
        # Joining the outputs of all microbatches would take the memory that dividing the batch has saved.
        joined = "return_outputs" in inspect.signature(schedule.step).parameters
        return partial(schedule.eval if evaluates else schedule.step, **({"return_outputs": False} if joined else {}))

    def _loss(self, output: Any, target: Any) -> Tensor:
        assert self._loss_of is not None
        return self._loss_of(output, target)


def _shapes(arguments: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(getattr(argument, "shape", None) for argument in arguments)


def _filled(tensor: Tensor, rows: int) -> Tensor:
    """A ``tensor`` extended to this many ``rows`` by repeating its first one."""
    lacking = rows - len(tensor)
    return torch.cat([tensor, tensor[:1].expand(lacking, *tensor.shape[1:])]) if lacking else tensor


def _first(own: int, rows: int, value: Any) -> Any:
    """The first ``own`` ones of so many ``rows``, if a ``value`` has them."""
    has_rows = own < rows and isinstance(value, Tensor) and value.ndim > 0 and len(value) == rows
    return value[:own] if has_rows else value


def keep_state(stage: Any) -> None:
    """Give the module of a stage other buffers and gradients until the first microbatch of its schedule.

    Before that, torch learns shapes by calling the module with tensors that have no values. This would change buffers,
    and at the end of it torch drops the gradients of shards.

    Args:
        stage: A PipelineStage of torch, which no schedule has used yet.
    """
    module, forward = stage.submod, stage.forward_one_chunk
    buffers = [
        (inner, name, buffer) for inner in module.modules() for name, buffer in inner.named_buffers(recurse=False)
    ]
    gradients = [(parameter, parameter.grad) for parameter in module.parameters()]
    for inner, name, buffer in buffers:
        setattr(inner, name, buffer.clone())
    for parameter, _ in gradients:
        parameter.grad = None

    def forward_first(*args: Any, **options: Any) -> Any:
        stage.forward_one_chunk = forward
        for inner, name, buffer in buffers:
            setattr(inner, name, buffer)
        for parameter, gradient in gradients:
            parameter.grad = gradient
        return forward(*args, **options)

    stage.forward_one_chunk = forward_first
