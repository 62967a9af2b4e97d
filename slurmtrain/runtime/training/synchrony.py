"""Notices ranks that train models of their own, as with a forgotten DistributedDataParallel (DDP).

Two signs, both independent of how far the weights are from each other:

* the ranks have started no collective between two steps, in any process group but slurmtrain's own, and their weights
  have changed;
* their weights have changed in different directions. Replicas that are averaged now and then differ by little of what
  they have learned, and rounding by much less.

Only parameters that all ranks have whole and under the same name are compared, so that shards, stages of a pipeline
and experts of one's own are accused of nothing. A few elements of each are enough: all ranks look at the same ones.
"""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from slurmtrain.model.diagnosis.rank_groups import Exchange, describe_unsynchronised
from slurmtrain.model.run.events.agent_events import RanksApart
from slurmtrain.runtime.job.torch_private import collectives_started

if TYPE_CHECKING:
    from slurmtrain.runtime.job.process_group import RankGroup
    from slurmtrain.system.journal import Journal

_log = logging.getLogger("slurmtrain")
_SAMPLES = 8
# The first look is after this many steps, each further one after twice as many.
_FIRST_LOOK = 8
# With these, ranks communicate by other ways than torch's.
_OTHER_WAYS = ("horovod", "mpi4py", "byteps")
_MILLION = 1_000_000


class SynchronyWatch:
    """Watches whether ranks train one model. Every method must be called on all ranks, after the same step."""

    def __init__(self, objects: Iterable[object], ranks: RankGroup, journal: Journal | None, step: int) -> None:
        """Watch the modules among ``objects`` from the end of ``step`` on, on several ``ranks``.

        ``journal``: rank 0's, for its conclusions; None on other ranks.
        """
        self._modules = [module for module in objects if isinstance(module, nn.Module)]
        self._ranks = ranks
        self._journal = journal
        self._first = step
        self._look_at = step + _FIRST_LOOK
        self._names, self._before = self._sample()
        self._started = self._collectives()
        self._is_reported = False

    def is_due(self, step: int) -> bool:
        """Whether to look after ``step``. Not collective."""
        return step >= self._look_at

    def look(self, step: int) -> None:
        """Compare the ranks after ``step``, and report if they train apart, or no longer do."""
        self._look_at = self._first + 2 * max(_FIRST_LOOK, step - self._first)
        if step == self._first:
            return
        why = describe_unsynchronised(self._compare(), ranks=self._ranks.world_size, steps=step - self._first)
        # Sentences of later looks differ in the number of steps alone.
        if self._journal is None or bool(why) == self._is_reported:
            return
        self._is_reported = bool(why)
        if why:
            _log.warning("%s", why)
        self._journal.write(RanksApart(why=why))

    def _compare(self) -> Exchange:
        names, now = self._sample()
        is_comparable = names == self._names and bool(names)
        change = now - self._before if is_comparable else torch.zeros(0)
        first_names, first_change = self._ranks.broadcast((names, change))
        is_comparable = is_comparable and names == first_names
        distance = _distance(change, first_change) if is_comparable else 0.0
        # Weights that have become infinite have no distance.
        is_comparable = is_comparable and not math.isnan(distance)
        started, before = self._collectives(), self._started
        has_exchanged = started is None or before is None or started > before
        incomparable, unchanged, exchanged, apart = self._ranks.greatest(
            int(not is_comparable),
            int(not bool(change.any())),
            int(has_exchanged),
            round(min(distance, 2.0) * _MILLION) if is_comparable else 0,
        )
        return Exchange(
            is_comparable=not incomparable and not unchanged, has_exchanged=bool(exchanged), distance=apart / _MILLION
        )

    def _collectives(self) -> int | None:
        if any(name in sys.modules for name in _OTHER_WAYS):
            return None
        return collectives_started(self._ranks.group)

    def _sample(self) -> tuple[list[tuple[str, tuple[int, ...]]], torch.Tensor]:
        """The names and shapes of what is compared, and some elements of each, one after the other."""
        names, parts = [], []
        with torch.no_grad():
            for name, parameter in self._replicated():
                flat = parameter.detach().reshape(-1)
                stride = max(1, flat.numel() // _SAMPLES)
                names.append((name, tuple(parameter.shape)))
                parts.append(flat[::stride][:_SAMPLES].to(self._ranks.device, torch.float64))
            # A single copy from the GPU.
            return names, torch.cat(parts).cpu() if parts else torch.zeros(0)

    def _replicated(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Matrices that are trained, and not spread over ranks: biases may be parts of layers that are divided."""
        for number, module in enumerate(self._modules):
            for name, parameter in module.named_parameters():
                is_whole = not isinstance(parameter, DTensor) and parameter.numel() and parameter.is_floating_point()
                if is_whole and parameter.dim() > 1 and parameter.requires_grad and not parameter.is_meta:
                    yield f"{number}.{name}", parameter


def _distance(first: torch.Tensor, second: torch.Tensor) -> float:
    """How far two changes of weights are from each other: 0 if they are equal, about 1 or more if unrelated."""
    length = float(max(first.norm(), second.norm()))
    return float((first - second).norm()) / length if length else 0.0
