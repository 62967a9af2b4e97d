"""How long a rank computes in a step, without the time that it waits for others.

That is from the beginning of the step to the last gradient, and the optimizer's step. DistributedDataParallel reduces
gradients meanwhile, and waits for them only after the last one.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import register_multi_grad_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook


class ComputeTime:
    """Measures single steps; it has hooks only in these."""

    def __init__(self, device: torch.device) -> None:
        """``device``: where the rank computes."""
        self._device = device
        self._parameters: list[nn.Parameter] = []
        self._hooks: list[Any] = []
        self._began: Any = None
        self._has_gradients: Any = None
        # The beginning and end of each optimizer's step.
        self._steps: list[tuple[Any, Any]] = []
        self._step_began: Any = None

    def watch(self, parameters: Iterable[nn.Parameter]) -> None:
        """Take the gradients of these ``parameters`` for a step's."""
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]

    def begin(self) -> None:
        """Begin a step that is measured."""
        self._steps, self._step_began, self._has_gradients = [], None, None
        if self._parameters:
            self._hooks = [
                register_multi_grad_hook(self._parameters, self._note_gradients),
                register_optimizer_step_pre_hook(self._note_begin),
                register_optimizer_step_post_hook(self._note_end),
            ]
            self._began = self._now()

    def end(self) -> float | None:
        """End the step; returns its seconds. None: it was not measured, or had no backward pass."""
        if not self._hooks:
            return None
        self.close()
        if self._has_gradients is None:
            return None
        parts = [(self._began, self._has_gradients), *self._steps]
        return sum(self._seconds(*part) for part in parts)

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    # Of several microbatches the last one counts; a step has no other gradients after it.
    def _note_gradients(self, _gradients: object) -> None:
        self._has_gradients = self._now()

    # One optimizer's step may consist of another one's, as with zero1, and then wait for other ranks.
    def _note_begin(self, *_: object) -> None:
        self._step_began = self._now()

    def _note_end(self, *_: object) -> None:
        if self._step_began is not None:
            self._steps.append((self._step_began, self._now()))
            self._step_began = None

    def _now(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter()
        make_event: Any = torch.cuda.Event
        event = make_event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _seconds(self, since: Any, until: Any) -> float:
        if self._device.type != "cuda":
            return float(until - since)
        until.synchronize()
        return float(since.elapsed_time(until)) / 1e3
