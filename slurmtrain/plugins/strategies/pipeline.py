"""Models whose parts are divided over ranks, one after the other: torch.distributed.pipelining.

A model names its parts: modules that are applied in order, each to the output of the one before it. It does so by a
method ``pipeline_parts()``, which returns their names; an ``nn.Sequential`` has its elements. Each rank keeps its own
parts, under the names that they have in the whole model: checkpoints do not depend on the division.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from slurmtrain.errors import StrategyError
from slurmtrain.model.experiment.kinds import suggestion
from slurmtrain.model.experiment.strategy import SCHEDULES, StrategySpec, even_split
from slurmtrain.runtime.job.torch_private import map_tree
from slurmtrain.runtime.training.passes import Gradients, LossOf
from slurmtrain.runtime.training.strategy_interface import Pipeline


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

    def __init__(self, parts: Mapping[str, nn.Module], pipeline: TorchPipeline) -> None:
        """``parts``: by their names. ``pipeline``: what computes with them."""
        super().__init__()
        self.pipeline = pipeline
        for name, part in parts.items():
            *path, last = name.split(".")
            folder: nn.Module = self
            for each in path:
                # Empty modules on the way give parameters the names that they have in the whole model.
                if each not in dict(folder.named_children()):
                    folder.add_module(each, nn.Module())
                folder = folder.get_submodule(each)
            folder.add_module(last, part)

    def forward(self, *_inputs: Any) -> Any:
        """Raise StrategyError: no rank has the whole model."""
        raise StrategyError(
            "a pipelined model cannot be called, because each process has only some of its parts: compute a step with "
            "run.forward_backward(model, loss_of, inputs, targets), and a loss without gradients with "
            "run.evaluate(model, loss_of, batches)"
        )


class TorchPipeline(Pipeline):
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
        self.stages = list(stages.values())
        self.group = group
        self._device = device
        self._ranks = group.size()
        self._microbatches = spec.microbatches or self._ranks
        self._count = self._ranks * self._schedule_spec.per_rank
        # By microbatches and shapes, since torch's schedules are for microbatches of a single shape. The last batch of
        # an evaluation often has another one.
        self._training = lru_cache(maxsize=1)(lambda count, _: self._schedule(count))
        self._evaluation = lru_cache(maxsize=2)(lambda count, _: self._schedule(count, evaluates=True))
        self._loss_of: LossOf | None = None

    def forward_backward(
        self, gradients: Gradients, loss_of: LossOf, inputs: Any, targets: Any, accumulation: int
    ) -> Tensor:
        """As its base says; the first stage uses the ``inputs``, the last one the ``targets``.

        ``gradients``: of the step. ``loss_of``: of a microbatch, which ``accumulation`` divides further.
        """
        arguments = inputs if isinstance(inputs, tuple) else (inputs,)
        microbatches = self._microbatches * accumulation
        rows = len(arguments[0])
        if rows % microbatches:
            raise StrategyError(
                f"{rows} samples cannot be divided into {microbatches} microbatches evenly: change the batch size, "
                "'strategy.microbatches' or 'resources.accumulation'"
            )
        # On all ranks, since the gradients of all have the scale of the loss.
        scale = gradients.scaled(torch.ones((), device=self._device))
        self._loss_of = lambda output, target: gradients.scaled(loss_of(output, target) / microbatches)
        losses: list[Tensor] = []
        self._apply(self._training(microbatches, _shapes(arguments)), arguments, target=targets, losses=losses)
        mean = torch.stack(losses).sum().detach().float() / scale if losses else torch.zeros((), device=self._device)
        # Only the last stage, which is on the last rank, computes a loss.
        dist.broadcast(mean, group_src=self._ranks - 1, group=self.group)
        return mean

    def evaluate(self, loss_of: LossOf, arguments: tuple[Any, ...], targets: Tensor, rows: int) -> Tensor | None:
        """As its base says, for this rank's ``arguments`` and ``targets``; other ranks may have more.

        Where stages are sharded, all ranks have to call them equally often, also with parts of other sizes. So each
        part is filled up with its first row to microbatches of equal size, as many as ``rows`` need; the loss, by
        ``loss_of``, is the loss of its own rows.
        """
        if self._ranks == 1:
            # torch's schedules for several stages on a single rank cannot do without a backward pass.
            output: Any = arguments
            for stage in self.stages:
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
            # torch's schedule wants a loss, and nothing depends on it: the sums are collected here.
            return torch.zeros(())

        self._loss_of = note
        filled = []
        for each in (*arguments, targets):
            lacking = size * microbatches - len(each)
            more = [each[:1].expand(lacking, *each.shape[1:])] if lacking else []
            filled.append(torch.cat([each, *more]) if more else each)
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
            PipelineStage(module, index, self._count, self._device, group=self.group)
            for index, module in self._stages.items()
        ]
        cls = get_schedule_class(self._schedule_spec.forward if evaluates else self._schedule_spec.name)
        of_rank = stages if issubclass(cls, PipelineScheduleMulti) else stages[0]

        def loss(output: Any, target: Any) -> Tensor:
            assert self._loss_of is not None
            return self._loss_of(output, target)

        try:
            # Loss and not gradients are divided: there may be gradients of an earlier call.
            schedule = cls(of_rank, microbatches, loss_fn=loss, scale_grads=False)
        except ValueError as error:
            raise StrategyError(f"'strategy.schedule': {error}") from error
        for stage in stages:
            _keep_state(stage)
        # Joining the outputs of all microbatches would take the memory that dividing the batch has saved.
        joined = "return_outputs" in inspect.signature(schedule.step).parameters
        return partial(schedule.eval if evaluates else schedule.step, **({"return_outputs": False} if joined else {}))


def _shapes(arguments: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(getattr(argument, "shape", None) for argument in arguments)


def _first(own: int, rows: int, value: Any) -> Any:
    """The first ``own`` ones of so many ``rows``, if a ``value`` has them."""
    has_rows = own < rows and isinstance(value, Tensor) and value.ndim > 0 and len(value) == rows
    return value[:own] if has_rows else value


def _keep_state(stage: Any) -> None:
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


def parts_of(model: nn.Module) -> dict[str, nn.Module]:
    """The parts of a model that stages consist of, in order, by their names.

    Args:
        model: The whole model.

    Raises:
        StrategyError: It does not say what its parts are, names a module twice, or has parameters outside of the parts
            or in two of them.
    """
    # Including modules in several places, such as an activation function that a sequence has more than once.
    modules = dict(model.named_modules(remove_duplicate=False))
    names: Any = getattr(model, "pipeline_parts", None)
    if callable(names):
        names = list(names())
    elif isinstance(model, nn.Sequential):
        names = [name for name in modules if name and "." not in name]
    else:
        raise StrategyError(
            f"{type(model).__name__} does not say what its parts are: give it a method pipeline_parts() that returns "
            'the names of modules which are applied one after the other, such as ["embedding", "blocks.0", "head"]'
        )
    for index, name in enumerate(names):
        if name not in modules:
            near = suggestion(str(name), modules)
            raise StrategyError(f"pipeline_parts() names {name!r}, but the model has no such module{near}")
        if name in names[:index]:
            raise StrategyError(
                f"pipeline_parts() names {name!r} twice: give the model a module of its own for each place"
            )
        outer = next((each for each in names if name.startswith(f"{each}.")), None)
        if outer is not None:
            raise StrategyError(
                f"pipeline_parts() names {name!r}, which is in the part {outer!r}: it would be applied twice; name one "
                "of them"
            )
    # Each parameter and buffer must be in exactly one part.
    owners: dict[int, str] = {}
    state = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    for name, value in state:
        part = next((each for each in names if name.startswith(f"{each}.")), None)
        if part is None:
            raise StrategyError(
                f"{name!r} is in none of the parts that pipeline_parts() names, so no stage would have it"
            )
        if owners.setdefault(id(value), part) != part:
            raise StrategyError(
                f"{name!r} is also in the part {owners[id(value)]!r} (tied weights): two stages cannot train the same "
                "parameter; untie them"
            )
    return {name: modules[name] for name in names}


def stages_of(
    parts: Mapping[str, nn.Module], spec: StrategySpec, rank: int, ranks: int
) -> Iterator[tuple[int, list[str]]]:
    """The stages of a rank: the index of each, and the names of its parts.

    Args:
        parts: All parts of the model.
        spec: The strategy.
        rank: The rank in the pipeline.
        ranks: How many ranks it has.

    Raises:
        StrategyError: There are fewer parts than stages, ``split`` does not fit them, or a stage has no parameters.
    """
    names, schedule = list(parts), SCHEDULES[spec.schedule]
    stages = ranks * schedule.per_rank
    if len(names) < stages:
        raise StrategyError(
            f"the model has {len(names)} parts, fewer than the {stages} stages of 'schedule: {spec.schedule}' on "
            f"{ranks} processes: use a shorter pipeline ('strategy.mesh.pp'), or divide the model into more parts"
        )
    if spec.split:
        for name in spec.split:
            if name not in names:
                raise StrategyError(
                    f"'strategy.split' names {name!r}, which is not a part of the model{suggestion(name, names)}"
                )
        begins = [0, *map(names.index, spec.split)]
        if begins != sorted(set(begins)) or len(begins) != stages:
            raise StrategyError(
                f"'strategy.split' must name the first parts of the stages 2 to {stages}, in the model's order, which "
                f"is {', '.join(names)}"
            )
    else:
        begins = even_split([sum(each.numel() for each in part.parameters()) for part in parts.values()], stages)
    ends = [*begins[1:], len(names)]
    for number, (begin, end) in enumerate(zip(begins, ends, strict=True), 1):
        if not any(True for name in names[begin:end] for _ in parts[name].parameters()):
            raise StrategyError(
                f"stage {number} of {stages} would have no parameters ({', '.join(names[begin:end])}): use a shorter "
                "pipeline ('strategy.mesh.pp'), or name other parts in 'strategy.split'"
            )
    for index in schedule.stages_of(rank, ranks):
        yield index, names[begins[index] : ends[index]]
