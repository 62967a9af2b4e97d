"""The modules of a model that a spec chooses, by the names of their classes or by default."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import nn

from slurmtrain.errors import StrategyError
from slurmtrain.model.spec.kinds import suggestion

_LISTS = (nn.ModuleList, nn.ModuleDict)


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
