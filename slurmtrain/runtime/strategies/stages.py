"""How a model is divided into the stages of a pipeline: its parts, and which rank has which parts.

A model names its parts: modules that are applied in order, each to the output of the one before it. It does so by a
method ``pipeline_parts()``, which returns their names; an ``nn.Sequential`` has its elements.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from slurmtrain.errors import StrategyError
from slurmtrain.model.spec.kinds import suggestion
from slurmtrain.model.spec.strategy import SCHEDULES, StrategySpec, even_split


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
    for name in names:
        if name not in modules:
            near = suggestion(str(name), modules)
            raise StrategyError(f"pipeline_parts() names {name!r}, and the model has no such module{near}")
    _check_distinct(names)
    _check_whole(model, names)
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
