"""The state of a ZeroRedundancyOptimizer: each rank has the state of its share of the parameters.

It is in the optimizer inside (``optim``): the outer one's ``state`` is empty, and its ``state_dict`` collects the
states of all ranks on one. Saved by parameter, as other optimizers' states are, it fits any number of ranks, and any
other optimizer.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeGuard

import torch

from slurmtrain.errors import CheckpointError
from slurmtrain.runtime.checkpoint.rank_parts import find_options, group_options
from slurmtrain.runtime.job.torch_private import overlaps_with_ddp

if TYPE_CHECKING:
    from torch.distributed.optim import ZeroRedundancyOptimizer

# Importing it compiles a dozen optimizers: only scripts that use it have done so.
_MODULE = "torch.distributed.optim.zero_redundancy_optimizer"


def is_zero(optimizer: object) -> TypeGuard[ZeroRedundancyOptimizer]:
    """Whether this is a ZeroRedundancyOptimizer."""
    module = sys.modules.get(_MODULE)
    return module is not None and isinstance(optimizer, module.ZeroRedundancyOptimizer)


def check_zero(name: str, optimizer: ZeroRedundancyOptimizer, *, registered: bool) -> None:
    """Raise TypeError if the state of the ``optimizer`` called ``name`` cannot be saved.

    ``registered``: whether all of its parameters are in registered modules.
    """
    if not registered:
        raise TypeError(f"{name!r} (ZeroRedundancyOptimizer) needs names for its parameters: register the module too")
    if overlaps_with_ddp(optimizer):
        raise TypeError(
            f"{name!r} (ZeroRedundancyOptimizer) cannot be restored with overlap_with_ddp=True, since "
            "DistributedDataParallel then creates its state only after a few steps; leave that out"
        )


def zero_has_begun(optimizer: ZeroRedundancyOptimizer) -> bool:
    """Whether it has a state, as far as this rank has any of its parameters."""
    return bool(optimizer.optim.state) or not any(group["params"] for group in optimizer.optim.param_groups)


def states(optimizer: ZeroRedundancyOptimizer, names: Mapping[int, str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The name and the state of each parameter of this rank's share. ``names``: of parameters, by id."""
    for parameter, state in optimizer.optim.state.items():
        yield names[id(parameter)], state


def groups(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> list[dict[str, Any]]:
    """The options of the groups of all parameters, with the names of these."""
    return [
        {**group_options(group), "params": [names[id(parameter)] for parameter in group["params"]]}
        for group in optimizer.param_groups
    ]


def own_names(optimizer: ZeroRedundancyOptimizer, names: Mapping[int, str]) -> Iterable[str]:
    """The names of the parameters of this rank's share."""
    return (names[id(parameter)] for group in optimizer.optim.param_groups for parameter in group["params"])


def load_zero(
    optimizer: ZeroRedundancyOptimizer,
    names: Mapping[int, str],
    saved: Mapping[str, Mapping[str, Any]],
    saved_groups: Sequence[Mapping[str, Any]],
) -> None:
    """Restore the ``optimizer``, whose parameters have these ``names``, by id.

    It gets the ``saved`` states, by parameter, and the options of ``saved_groups``.
    Raises CheckpointError if a group of the script's is not in ``saved_groups``.
    """
    for group, inner in zip(optimizer.param_groups, optimizer.optim.param_groups, strict=True):
        saved_options = find_options((names[id(parameter)] for parameter in group["params"]), saved_groups)
        if saved_options is None:
            raise CheckpointError("it has no parameter of one of the optimizer's groups")
        group.update(saved_options)
        inner.update(saved_options)
    # The positions of parameters in the state_dict of an optimizer: in their order in its groups.
    own = [names[id(parameter)] for group in optimizer.optim.param_groups for parameter in group["params"]]
    plain = optimizer.optim.state_dict()
    plain["state"] = {position: dict(saved[name]) for position, name in enumerate(own) if name in saved}
    optimizer.optim.load_state_dict(plain)
