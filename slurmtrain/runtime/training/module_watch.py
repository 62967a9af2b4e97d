"""What is measured of a script's modules while it trains: a rank's own time, and whether ranks train one model.

A rank's own time in a step is from its beginning to the end of the forward pass. In data-parallel training this is the
part where a rank does not wait for others: it loads its data and computes. In the backward pass ranks exchange
gradients, so all of them take as long as the slowest. Until the forward pass begins, a rank waits for data.
"""

from __future__ import annotations

import contextlib
import logging
import math
import sys
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from slurmtrain.model.diagnosis.rank_groups import Exchange, describe_unsynchronised
from slurmtrain.model.metrics.step_figures import Durations
from slurmtrain.model.run.events.agent_events import RanksApart
from slurmtrain.runtime.job.torch_private import collectives_started, compiles_hooks

if TYPE_CHECKING:
    from slurmtrain.runtime.job.process_group import RankGroup
    from slurmtrain.system.journal import Journal

# The weight of the newest measurement in the smoothed time.
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
        self.owns = Durations()
        """All of them that were measured."""
        self.waits = Durations()
        """Of the same steps, the time until the forward pass began."""
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
        waited, took = self._timer.begin()
        if took > 0:
            self.s = took if not self.s else (1 - _SMOOTHING) * self.s + _SMOOTHING * took
            self.owns.add(took)
            self.waits.add(waited)
        if not self._hooks:
            begun, ended = _Hook(self._timer.forward_begun), _Hook(self._timer.forward_ended)
            for module in self._modules:
                # Before the hooks of the script, and of libraries, which may take long.
                self._hooks.append(module.register_forward_pre_hook(begun, prepend=True))
                self._hooks.append(module.register_forward_hook(ended))

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
    """Tells a timer that a forward pass has begun or ended."""

    def __init__(self, note: Callable[[], None]) -> None:
        self._note = note

    def __call__(self, *_: object) -> None:
        # Add nothing to the graph of a function that the script compiles.
        if not torch.compiler.is_compiling():
            self._note()

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
        self._waited = self._took = 0.0

    def begin(self) -> tuple[float, float]:
        """Begin a step; returns the previous one's time until the forward pass began, and until it ended, in seconds.

        They are 0 if they are unknown.
        """
        figures = self._waited, self._took
        self._waited = self._took = 0.0
        self._began = time.perf_counter()
        return figures

    def discard(self) -> None:
        self._began = 0.0

    def forward_begun(self) -> None:
        if self._began and not self._waited:
            self._waited = time.perf_counter() - self._began

    def forward_ended(self) -> None:
        if self._began:
            self._took = time.perf_counter() - self._began
            self._began = 0.0


class _Events:
    """Own time of a step on a GPU, between CUDA events, which must have passed before another step is measured.

    The first event passes when the GPU has finished the previous step, or at once if it is idle, so that waiting for
    data counts.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream_of = device
        self._first: Any = None
        self._used: Any = None
        self._last: Any = None
        self._open = self._begun = self._closed = False

    def begin(self) -> tuple[float, float]:
        """As of :class:`_Clock`: the figures of an earlier step, 0 if they have not become known since."""
        figures = 0.0, 0.0
        if self._closed:
            if not self._last.query():
                return figures
            figures = self._first.elapsed_time(self._used) / 1e3, self._first.elapsed_time(self._last) / 1e3
            self._closed = False
        if self._first is None:
            event: Any = torch.cuda.Event
            self._first, self._used, self._last = (event(enable_timing=True) for _ in range(3))
        self._first.record(torch.cuda.current_stream(self._stream_of))
        self._open, self._begun = True, False
        return figures

    def discard(self) -> None:
        self._open = False

    def forward_begun(self) -> None:
        if self._open and not self._begun and not torch.cuda.is_current_stream_capturing():
            self._used.record(torch.cuda.current_stream(self._stream_of))
            self._begun = True

    def forward_ended(self) -> None:
        # Events recorded in a CUDA graph have no time.
        if self._open and self._begun and not torch.cuda.is_current_stream_capturing():
            self._last.record(torch.cuda.current_stream(self._stream_of))
            self._open, self._closed = False, True


# --- ranks that train models of their own -----------------------------------------------------------------------------
# As with a forgotten DistributedDataParallel (DDP). Two signs, both independent of how far the weights are from each
# other: the ranks have started no collective between two steps, in any process group but slurmtrain's own, and their
# weights have changed; or their weights have changed in different directions. Replicas that are averaged now and then
# differ by a small part of their progress, and rounding by much less.
#
# Only parameters that all ranks have whole and under the same name are compared, so that shards, stages of a pipeline
# and experts of one's own are accused of nothing. A few elements of each are enough: all ranks look at the same ones.


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
        # How far the changes are from each other: 0 if they are equal, about 1 or more if unrelated.
        length = float(max(change.norm(), first_change.norm())) if is_comparable else 0.0
        distance = float((change - first_change).norm()) / length if length else 0.0
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
            parameters = (
                (f"{number}.{name}", parameter)
                for number, module in enumerate(self._modules)
                for name, parameter in module.named_parameters()
            )
            for name, parameter in parameters:
                # Matrices that are trained, and not spread over ranks: biases may be parts of layers that are divided.
                is_whole = not isinstance(parameter, DTensor) and parameter.numel() and parameter.is_floating_point()
                if not is_whole or parameter.dim() < 2 or not parameter.requires_grad or parameter.is_meta:
                    continue
                flat = parameter.detach().reshape(-1)
                stride = max(1, flat.numel() // _SAMPLES)
                names.append((name, tuple(parameter.shape)))
                parts.append(flat[::stride][:_SAMPLES].to(self._ranks.device, torch.float64))
            # A single copy from the GPU.
            return names, torch.cat(parts).cpu() if parts else torch.zeros(0)
