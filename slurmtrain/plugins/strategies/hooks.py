"""Communication hooks of DistributedDataParallel: how it reduces gradients.

Hooks with error feedback add the compression error of a gradient to the gradient of the next step. So such a hook has a
state, which checkpoints contain: each rank's error is its own, and as large as the gradients. It is saved with the
names of the parameters, so that it does not matter which bucket their gradients are in. A hook's state of a bucket must
stay with the same gradients: buckets are made before the first step.
"""

from __future__ import annotations

import contextlib
import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from queue import SimpleQueue
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.futures import Future
from torch.nn.functional import pad

from slurmtrain.errors import StrategyError
from slurmtrain.model.experiment.strategy import StrategySpec
from slurmtrain.plugins.strategies.sharded import REPLICATE, SHARD, across_nodes
from slurmtrain.runtime.job.process_group import RankGroup
from slurmtrain.runtime.training.strategy_interface import CommHook, completed

ERRORS = "errors"
# Half as many bytes to send as the int64 that topk() returns.
_INDEX = torch.int32
# Of a PowerSGDState: its counters, and the settings that decide the sizes of its factors.
_COUNTERS = ("iter", "total_numel_before_compression", "total_numel_after_compression", "next_stats_report")
_SIZES = ("matrix_approximation_rank", "min_compression_rate", "batch_tensors_with_same_shape")
_RNG, _FACTORS = "rng", "factors"
_Names = tuple[str, ...]


class FeedbackHook(CommHook):
    """A communication hook with error feedback, and its state."""

    def __init__(self, module: nn.Module, spec: StrategySpec) -> None:
        """For the gradients of a ``module``, as ``spec`` says. Raises StrategyError for float16, or sparse ones."""
        self._names = {id(parameter): name for name, parameter in module.named_parameters()}
        self._buckets: dict[int, Sequence[tuple[str, int]]] = {}
        # Errors of a checkpoint, flat, by parameter, until the bucket of the parameter is reduced.
        self._restored: dict[str, Tensor] = {}
        cannot = f"'strategy.hook: {spec.hook}' does not work with"
        for name, parameter in module.named_parameters():
            if parameter.requires_grad and parameter.dtype is torch.float16:
                raise StrategyError(
                    f"{cannot} float16, and the parameter {name!r} has it: an overflow would stay in its errors for "
                    "ever; use float32 or bfloat16"
                )
        for name, part in module.named_modules():
            if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse:
                raise StrategyError(f"{cannot} sparse gradients, and {name!r} has them: make it with sparse=False")

    def reduce(self, bucket: dist.GradBucket) -> Future[Tensor]:
        """The future mean over ranks of the gradients in a ``bucket``."""
        if bucket.index() not in self._buckets:
            contents = [(self._names[id(each)], each.numel()) for each in bucket.parameters()]
            self._buckets[bucket.index()] = contents
            if any(name in self._restored for name, _ in contents):
                # On the device and in the type of the gradients.
                parts = [self._restored.pop(name, torch.zeros(count)).flatten() for name, count in contents]
                self._errors[bucket.index()] = torch.cat([part.to(bucket.buffer()) for part in parts])
        return self._reduce(bucket)

    def state_dict(self) -> dict[str, Any]:
        """The state of this rank: the errors by parameter, and what :meth:`_more_state` has."""
        errors = dict(self._restored)
        for index, error in self._errors.items():
            parts = torch.split(error, [count for _, count in self._buckets[index]])
            # Copies, since torch.save would write all of the error for each view of it.
            errors.update(zip(self._names_in(index), (part.clone() for part in parts), strict=True))
        return {ERRORS: errors, **self._more_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set the state to one that :meth:`state_dict` returned."""
        self._buckets.clear()
        self._errors.clear()
        self._restored = dict(state[ERRORS])
        self._load_more(state)

    def reshard_state_dict(self, states: Sequence[Mapping[str, Any]], rank: int, world_size: int) -> None:
        """Take over a part of the ``states`` of all ranks of another number of ranks.

        The mean over ranks of the errors stays as it was: it is what has yet to be added to the parameters.

        Args:
            states: The states, by rank; each is read when it is asked for, since all together may be large.
            rank: This rank.
            world_size: How many ranks there are now.
        """
        scale = world_size / len(states)
        errors: dict[str, Tensor] = {}
        for number in range(rank, len(states), world_size):
            for name, error in states[number][ERRORS].items():
                errors[name] = errors[name] + error * scale if name in errors else error * scale
        self.load_state_dict({**states[0], ERRORS: errors})

    @property
    @abstractmethod
    def _errors(self) -> dict[int, Tensor]:
        """The error of each bucket that has one, flat, by the bucket's index."""

    @abstractmethod
    def _reduce(self, bucket: dist.GradBucket) -> Future[Tensor]:
        """Reduce a ``bucket``, and remember its error."""

    def _more_state(self) -> dict[str, Any]:
        """What the state has besides the errors."""
        return {}

    def _load_more(self, state: Mapping[str, Any]) -> None:
        """Set the values that :meth:`_more_state` returns from ``state``."""

    def _names_in(self, index: int) -> _Names:
        """The names of the parameters in the bucket with this ``index``."""
        return tuple(name for name, _ in self._buckets[index])


class PowerSgd(FeedbackHook):
    """PowerSGD: each matrix of gradients is reduced as a product of two that have few columns.

    It is torch's hook, and its PowerSGDState.
    """

    def __init__(self, module: nn.Module, spec: StrategySpec, *_place: Any) -> None:
        """For the gradients of a ``module``, with the options of ``spec``. Raises StrategyError as its base does."""
        # torch's hook needs NumPy.
        from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

        super().__init__(module, spec)
        self._hook = powerSGD_hook
        self._state = PowerSGDState(
            None,
            matrix_approximation_rank=spec.matrix_approximation_rank,
            start_powerSGD_iter=spec.start_powersgd_iter,
            min_compression_rate=spec.min_compression_rate,
            use_error_feedback=spec.use_error_feedback,
            warm_start=spec.warm_start,
            orthogonalization_epsilon=spec.orthogonalization_epsilon,
            batch_tensors_with_same_shape=spec.batch_tensors_with_same_shape,
        )
        # The two factors of each bucket in a checkpoint, by the parameters in it, until it is reduced.
        self._factors: dict[_Names, tuple[Tensor, Tensor]] = {}

    @property
    def _errors(self) -> dict[int, Tensor]:
        return self._state.error_dict

    def _reduce(self, bucket: dist.GradBucket) -> Future[Tensor]:
        index, buffer = bucket.index(), bucket.buffer()
        if self._factors and (factors := self._factors.pop(self._names_in(index), None)):
            first, second = (factor.to(buffer, copy=True) for factor in factors)
            self._state.p_memory_dict[index], self._state.q_memory_dict[index] = first, second
        future: Future[Tensor] = self._hook(self._state, bucket)
        # Its callbacks wait for collectives. With gloo these need the threads that run the callbacks: the callbacks of
        # two buckets would wait for each other.
        return future if _has_nccl(buffer.device) else completed(future.wait())

    def _more_state(self) -> dict[str, Any]:
        state = self._state
        factors = dict(self._factors)
        for index, first in state.p_memory_dict.items():
            factors[self._names_in(index)] = first, state.q_memory_dict[index]
        numbers: Any = state.rng.get_state()
        name, keys, position, has_gauss, gauss = numbers
        return {
            **{key: getattr(state, key) for key in (*_COUNTERS, *_SIZES)},
            _RNG: [str(name), torch.from_numpy(keys.copy()), int(position), int(has_gauss), float(gauss)],
            _FACTORS: [[list(names), *pair] for names, pair in factors.items()],
        }

    def _load_more(self, state: Mapping[str, Any]) -> None:
        for counter in _COUNTERS:
            setattr(self._state, counter, state[counter])
        name, keys, *rest = state[_RNG]
        self._state.rng.set_state((name, keys.numpy(), *rest))
        self._state.p_memory_dict.clear()
        self._state.q_memory_dict.clear()
        # Without factors, PowerSGD begins with new ones.
        fit = all(state[key] == getattr(self._state, key) for key in _SIZES)
        self._factors = {tuple(names): (first, second) for names, first, second in state[_FACTORS] if fit}


class TopK(FeedbackHook):
    """Only the largest gradients of each bucket are sent; the rest is added to the gradients of the next step."""

    def __init__(self, module: nn.Module, spec: StrategySpec, *_place: Any) -> None:
        """For the gradients of a ``module``, with the density of ``spec``. Raises StrategyError as its base does."""
        super().__init__(module, spec)
        self._density = spec.density
        self._unsent: dict[int, Tensor] = {}
        # What all ranks have sent, by the index of the bucket. It is kept, since a GPU adds it up later, on a stream of
        # which the allocator of memory does not know.
        self._received: dict[int, list[Tensor]] = {}

    @property
    def _errors(self) -> dict[int, Tensor]:
        return self._unsent

    def _reduce(self, bucket: dist.GradBucket) -> Future[Tensor]:
        index, buffer, ranks = bucket.index(), bucket.buffer(), dist.get_world_size()
        if index not in self._unsent:
            self._unsent[index] = torch.zeros_like(buffer)
        unsent = self._unsent[index]
        unsent += buffer
        count = math.ceil(self._density * len(buffer))
        chosen = unsent.abs().topk(count, sorted=False).indices
        # Both as bytes, so that a single collective sends them.
        message = torch.cat([chosen.to(_INDEX).view(torch.uint8), unsent[chosen].view(torch.uint8)])
        unsent[chosen] = 0
        if index not in self._received:
            self._received[index] = [torch.empty_like(message) for _ in range(ranks)]
        received = self._received[index]
        work = dist.all_gather(received, message, async_op=True)

        def add(_: object) -> Tensor:
            buffer.zero_()
            # Rank after rank, so that the order of the sums is always the same.
            for each in received:
                indices = each[: count * _INDEX.itemsize]
                # A copy, since the values may begin where numbers of their size cannot.
                values = each[len(indices) :].clone()
                buffer.index_add_(0, indices.view(_INDEX), values.view(buffer.dtype))
            return buffer.div_(ranks)

        summed: Future[Tensor] = work.get_future().then(add)
        return summed


class Hierarchical(CommHook):
    """Gradients are reduced by layers: first within each node, then across nodes, each process a part of them.

    The three collectives of a bucket follow each other, and the collectives of all buckets have the same order on all
    ranks, as they must. With NCCL a stream of the GPU keeps it. Collectives of gloo are waited for by the thread that
    calls them, so there a thread of its own calls them, and the backward pass goes on meanwhile. Callbacks would not
    do: gloo runs the callbacks of several buckets in any order.
    """

    def __init__(self, mesh: DeviceMesh, device: torch.device) -> None:
        """For the ranks of a ``mesh`` of nodes and their ranks; this one computes on ``device``."""
        self._ranks = mesh.size()
        self._within = mesh[SHARD].get_group()
        self._across = mesh[REPLICATE].get_group()
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._buckets: SimpleQueue[tuple[Tensor, Future[Tensor]]] | None = None
        # A daemon, so that a rank that fails ends although the others do not answer any more.
        if not _has_nccl(device):
            buckets = self._buckets = SimpleQueue()

            def reduce_in_order() -> None:
                while True:
                    self._settle(*buckets.get())

            Thread(target=reduce_in_order, name="slurmtrain-reduce", daemon=True).start()

    def reduce(self, bucket: dist.GradBucket) -> Future[Tensor]:
        """The future mean over ranks of the gradients in a ``bucket``, which changes."""
        buffer = bucket.buffer()
        future: Future[Tensor] = Future(devices=None if self._stream is None else [buffer.device])
        # First, as torch does without a hook, so that sums of float16 do not overflow.
        buffer.div_(self._ranks)
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(buffer.device))
        if self._buckets is None:
            self._settle(buffer, future)
        else:
            self._buckets.put((buffer, future))
        return future

    def _settle(self, bucket: Tensor, future: Future[Tensor]) -> None:
        """Give the ``future`` of a ``bucket`` its value, or what went wrong."""
        with contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            try:
                total = self._sum(bucket) if self._buckets is None else self._sum(bucket.cpu()).to(bucket.device)
            except Exception as error:  # noqa: BLE001 (any error: the backward pass waits for it)
                future.set_exception(error)  # type: ignore[arg-type]
            else:
                future.set_result(total)

    def _sum(self, bucket: Tensor) -> Tensor:
        """The sum of a ``bucket`` over all ranks."""
        per_node = self._within.size()
        # Collectives take parts of the same size.
        whole = pad(bucket, (0, -len(bucket) % per_node)) if len(bucket) % per_node else bucket
        part = whole.new_empty(len(whole) // per_node)
        dist.reduce_scatter_tensor(part, whole, group=self._within)
        dist.all_reduce(part, group=self._across)
        dist.all_gather_into_tensor(whole, part, group=self._within)
        return whole[: len(bucket)]


def reduce_by_layers(_model: nn.Module, spec: StrategySpec, ranks: RankGroup, node: int) -> Hierarchical | None:
    """The hook by its ``spec``, for any ``_model``; None if there is one node, or one rank on each.

    ``ranks``: the ranks that reduce gradients; this one is on this ``node``.
    """
    mesh = across_nodes(ranks.gather(node), ranks.device, f"hook: {spec.hook}")
    return None if mesh is None else Hierarchical(mesh, ranks.device)


def _has_nccl(device: torch.device) -> bool:
    """Whether collectives of tensors on a ``device`` use NCCL."""
    backends = dict(part.split(":") for part in dist.get_backend_config().split(","))
    return backends.get(device.type) == dist.Backend.NCCL
