"""Models whose parts are divided over ranks, one after the other: torch.distributed.pipelining.

A model says what its parts are: modules that are applied in order, each to what the one before it returns. It does so
by a method ``pipeline_parts()``, which returns their names; an ``nn.Sequential`` has its elements. Each rank keeps its
own parts, under the names that they have in the whole model: checkpoints do not depend on the division.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from slurmtrain.errors import StrategyError
from slurmtrain.model.spec.kinds import suggestion
from slurmtrain.model.spec.strategy.pipeline import SCHEDULES, even_split
from slurmtrain.model.spec.strategy.section import StrategySpec
from slurmtrain.runtime.strategies.step.gradients import Gradients

# The loss of a microbatch, from the model's output and the targets.
LossOf = Callable[[Any, Any], Tensor]


class StageModule(nn.Module):
    """Consecutive parts of a model."""

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        """``parts``: in the order in which they are applied."""
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
            "run.forward_backward(model, loss_of, inputs, targets)"
        )


class Pipeline:
    """Computes the steps of a model by one of torch's schedules."""

    def __init__(
        self, stages: Mapping[int, nn.Module], spec: StrategySpec, group: dist.ProcessGroup, device: torch.device
    ) -> None:
        """The pipeline of the ranks of a ``group``.

        Args:
            stages: Those of this rank, by their indices.
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
        # torch's schedules are for microbatches of a single shape.
        self._shape: object = None
        self._schedule: Callable[..., Any] | None = None
        self._loss_of: LossOf | None = None

    def forward_backward(
        self, gradients: Gradients, loss_of: LossOf, inputs: Any, targets: Any, accumulation: int
    ) -> Tensor:
        """Compute the gradients of a step; returns the mean loss of this part of the batch, on all ranks.

        Args:
            gradients: Those of the step.
            loss_of: The mean loss of a microbatch, called with the model's output and its targets.
            inputs: A tensor, or several in a tuple, with the same number of rows; used by the first stage, and of the
                same shapes on all ranks.
            targets: A tensor with as many rows; used by the last stage.
            accumulation: Into how many parts each microbatch is divided.

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
        first, last = 0 in self._stages, self._count - 1 in self._stages
        schedule = self._schedule_of(microbatches, arguments)
        schedule(*(arguments if first else ()), **({"target": targets, "losses": losses} if last else {}))
        mean = torch.stack(losses).sum().detach().float() / scale if last else torch.zeros((), device=self._device)
        dist.broadcast(mean, group_src=self._ranks - 1, group=self._group)
        return mean

    def _schedule_of(self, microbatches: int, arguments: tuple[Any, ...]) -> Callable[..., Any]:
        """The step of torch's schedule with this many microbatches of a batch with the shapes of ``arguments``."""
        shape = microbatches, [getattr(argument, "shape", None) for argument in arguments]
        if self._schedule is None or shape != self._shape:
            self._schedule, self._shape = self._make_schedule(microbatches), shape
        return self._schedule

    def _make_schedule(self, microbatches: int) -> Callable[..., Any]:
        # Importing it takes a while, and only pipelines need it.
        from torch.distributed.pipelining import PipelineStage
        from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class

        stages = [
            PipelineStage(module, index, self._count, self._device, group=self._group)
            for index, module in self._stages.items()
        ]
        cls = get_schedule_class(self._schedule_spec.name)
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
        return lambda *arguments, **more: schedule.step(
            *arguments, **more, **({"return_outputs": False} if joined else {})
        )

    def _loss(self, output: Any, target: Any) -> Tensor:
        assert self._loss_of is not None
        return self._loss_of(output, target)


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


def parts_of(model: nn.Module) -> dict[str, nn.Module]:
    """The parts of a model that stages consist of, in order, by their names.

    Args:
        model: The whole model.

    Raises:
        StrategyError: It does not say what its parts are, names a module twice, has parameters outside of the parts or
            in two of them, or norms with running statistics.
    """
    # With those that are in several places, such as an activation function that a sequence has more than once.
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
    for name in names:
        if name not in modules:
            near = suggestion(str(name), modules)
            raise StrategyError(f"pipeline_parts() names {name!r}, and the model has no such module{near}")
    _check_distinct(names)
    _check_whole(model, names)
    _check_norms(model)
    return {name: modules[name] for name in names}


def _check_distinct(names: Sequence[str]) -> None:
    """Raise StrategyError if a module is named twice, by itself or with one that it is in."""
    for index, name in enumerate(names):
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


def _check_norms(model: nn.Module) -> None:
    """Raise StrategyError if a model has a norm with running statistics.

    Before the first step torch calls stages with tensors that have no values, to learn the shapes of what they return.
    """
    for name, module in model.named_modules():
        if getattr(module, "running_mean", None) is not None:
            raise StrategyError(
                f"{name!r} ({type(module).__name__}) has running statistics, which a pipeline would spoil: use "
                "LayerNorm or GroupNorm, or track_running_stats=False"
            )


def _check_whole(model: nn.Module, names: Sequence[str]) -> None:
    """Raise StrategyError unless each parameter and buffer of a model is in exactly one of the parts ``names``."""
    owners: dict[int, str] = {}
    state = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    for name, value in state:
        part = next((each for each in names if name.startswith(f"{each}.")), None)
        if part is None:
            raise StrategyError(
                f"{name!r} is in none of the parts that pipeline_parts() names, and no stage would have it"
            )
        if owners.setdefault(id(value), part) != part:
            raise StrategyError(
                f"{name!r} is also in the part {owners[id(value)]!r} (tied weights): two stages cannot train the same "
                "parameter; untie them"
            )


def divide(
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
    begins = [0, *_split_at(names, spec.split, stages)] if spec.split else _even(parts, stages)
    ends = [*begins[1:], len(names)]
    for number, (begin, end) in enumerate(zip(begins, ends, strict=True), 1):
        if not any(True for name in names[begin:end] for _ in parts[name].parameters()):
            raise StrategyError(
                f"stage {number} of {stages} would have no parameters ({', '.join(names[begin:end])}): use a shorter "
                "pipeline ('strategy.mesh.pp'), or name other parts in 'strategy.split'"
            )
    for index in schedule.stages_of(rank, ranks):
        yield index, names[begins[index] : ends[index]]


def _even(parts: Mapping[str, nn.Module], stages: int) -> list[int]:
    return even_split([sum(each.numel() for each in part.parameters()) for part in parts.values()], stages)


def _split_at(names: Sequence[str], split: Sequence[str], stages: int) -> list[int]:
    for name in split:
        if name not in names:
            raise StrategyError(
                f"'strategy.split' names {name!r}, which is no part of the model{suggestion(name, names)}"
            )
    begins = [names.index(name) for name in split]
    if begins != sorted(set(begins)) or begins[0] == 0 or len(begins) != stages - 1:
        raise StrategyError(
            f"'strategy.split' must name the first parts of the stages 2 to {stages}, in the model's order, which is "
            f"{', '.join(names)}"
        )
    return begins
