"""A rank's own time in a step: from the beginning of the step to the end of the forward pass.

In data-parallel training this is the part where a rank does not wait for others: it loads its data and computes. In the
backward pass ranks exchange gradients, so all of them take as long as the slowest.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from slurmtrain.runtime.job.torch_private import compiles_hooks

_SMOOTHING = 0.2
# The classes of modules whose forward pass waits for other ranks.
_COMMUNICATING = ("DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule", "SyncBatchNorm")


class StepTime:
    """Measures a rank's own time in individual steps, smoothed, without waiting for the device.

    A forward hook makes torch take a slower path through the module, 12 microseconds with cold caches, so it is only
    registered in measured steps, which a session picks. It stays between consecutive measured steps: if torch.compile
    has traced a hook, it recompiles for each new one.
    """

    def __init__(self, device: torch.device) -> None:
        """``device``: where the rank computes."""
        self.s = 0.0
        """Seconds; 0: unknown."""
        self.is_measuring = False
        """Whether :meth:`begin` has been called since the last :meth:`end`."""
        self._timer: _Clock | _Events = _Events(device) if device.type == "cuda" else _Clock()
        self._modules: list[nn.Module] = []
        self._hooks: list[RemovableHandle] = []

    def watch(self, modules: Iterable[object]) -> None:
        """Take a step's first forward pass through any of these ``modules`` as its own part; called after setup.

        It ignores modules whose forward pass waits for other ranks (sharded over ranks, or with SyncBatchNorm), and
        modules whose compilation by torch.compile would include the measurement.
        """
        self._modules = [target for module in modules if (target := target_of(module)) is not None]

    def begin(self) -> None:
        """Begin a step that is measured."""
        if not self._modules:
            return
        self.is_measuring = True
        took = self._timer.begin()
        if took > 0:
            self.s = took if not self.s else (1 - _SMOOTHING) * self.s + _SMOOTHING * took
        if not self._hooks:
            self._hooks = [module.register_forward_hook(_Hook(self._timer)) for module in self._modules]

    def discard(self) -> None:
        """Measure nothing in this step: something else than training takes time in it."""
        self._timer.discard()

    def end(self) -> None:
        """Restore the modules: the step that begins is not measured, or there are no more steps."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self.is_measuring = False


class _Hook:
    """Tells a timer that a forward pass has ended."""

    def __init__(self, timer: _Clock | _Events) -> None:
        self._timer = timer

    def __call__(self, *_: object) -> None:
        # Add nothing to the graph of a function that the script compiles.
        if not torch.compiler.is_compiling():
            self._timer.forward_ended()

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy of a module, even one loaded where slurmtrain is not installed, has a hook that does nothing.
        return getattr, (contextlib.nullcontext(), "__exit__")


def target_of(module: object) -> nn.Module | None:
    """The module whose forward pass is a rank's own, inside whatever wraps it; None if there is none."""
    if isinstance(module, nn.parallel.DistributedDataParallel):
        # Its own forward pass broadcasts buffers.
        module = module.module
    if not isinstance(module, nn.Module) or isinstance(module, torch.jit.ScriptModule) or compiles_hooks(module):
        return None
    if any(isinstance(parameter, DTensor) for parameter in module.parameters()):
        return None
    names = {each.__name__ for inner in module.modules() for each in type(inner).__mro__}
    return module if names.isdisjoint(_COMMUNICATING) else None


class _Clock:
    """Own time of a step on the CPU."""

    def __init__(self) -> None:
        self._began = 0.0
        self._took = 0.0

    def begin(self) -> float:
        """Begin a step; returns the own time of the previous one, in seconds, 0 if unknown."""
        took, self._took = self._took, 0.0
        self._began = time.perf_counter()
        return took

    def discard(self) -> None:
        self._began = 0.0

    def forward_ended(self) -> None:
        if self._began:
            self._took = time.perf_counter() - self._began
            self._began = 0.0


class _Events:
    """Own time of a step on a GPU, between two CUDA events, which must have passed before another step is measured.

    The first event passes when the GPU has finished the previous step, or at once if it is idle, so that waiting for
    data counts.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream_of = device
        self._first: Any = None
        self._last: Any = None
        self._open = self._closed = False

    def begin(self) -> float:
        """Begin a step; returns the own time of an earlier one, in seconds, 0 if none has become known since."""
        took = 0.0
        if self._closed:
            if not self._last.query():
                return 0.0
            took, self._closed = self._first.elapsed_time(self._last) / 1e3, False
        if self._first is None:
            event: Any = torch.cuda.Event
            self._first, self._last = event(enable_timing=True), event(enable_timing=True)
        self._first.record(torch.cuda.current_stream(self._stream_of))
        self._open = True
        return took

    def discard(self) -> None:
        self._open = False

    def forward_ended(self) -> None:
        # Events recorded in a CUDA graph have no time.
        if self._open and not torch.cuda.is_current_stream_capturing():
            self._last.record(torch.cuda.current_stream(self._stream_of))
            self._open, self._closed = False, True
