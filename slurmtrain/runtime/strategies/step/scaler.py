"""The loss scale of fp16: torch's GradScaler, which all ranks of a run follow alike."""

from __future__ import annotations

import weakref
from typing import Any

import torch
import torch.distributed as dist

from slurmtrain.runtime.job.process_group import RankGroup
from slurmtrain.runtime.job.torch_private import infinities, scale_of


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

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """As GradScaler's: ``args`` and ``kwargs`` are for the ``optimizer``. Call it on all ranks."""
        self.unscale_(optimizer)
        result = super().step(optimizer, *args, **kwargs)
        self._has_stepped = True
        return result

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
