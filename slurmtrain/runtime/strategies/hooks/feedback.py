"""Hooks with error feedback: the compression error of a gradient is added to the gradient of the next step.

So such a hook has a state, which checkpoints contain: each rank's error is its own, and as large as the gradients. It
is saved with the names of the parameters, so that it does not matter which bucket their gradients are in.

A hook's state of a bucket must stay with the same gradients: buckets are made before the first step.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from slurmtrain.errors import StrategyError
from slurmtrain.runtime.strategies.buckets import make_buckets

ERRORS = "errors"


class FeedbackHook(ABC):
    """A communication hook with error feedback, and its state."""

    def __init__(self, module: nn.Module, key: str) -> None:
        """For the gradients of a ``module``; the ``key`` of the spec chose it. Raises StrategyError for float16."""
        self._names = {id(parameter): name for name, parameter in module.named_parameters()}
        self._buckets: dict[int, Sequence[tuple[str, int]]] = {}
        # Errors of a checkpoint, flat, by parameter, until the bucket of the parameter is reduced.
        self._restored: dict[str, Tensor] = {}
        self._settled = False
        _check(module, key)

    def register(self, replica: DistributedDataParallel) -> None:
        """Let the ``replica`` reduce its gradients with this hook. Call it on all ranks, before the first step."""
        replica.register_comm_hook(self, _reduce)
        # Otherwise it keeps its first buckets, which depend on the model alone.
        if not replica.find_unused_parameters:
            make_buckets(replica)
        self._settled = True

    def reduce(self, bucket: dist.GradBucket) -> Future[Tensor]:
        """The future mean over ranks of the gradients in a ``bucket``."""
        if not self._settled:
            return completed(bucket.buffer())
        if bucket.index() not in self._buckets:
            self._meet(bucket)
        return self._reduce(bucket)

    def _meet(self, bucket: dist.GradBucket) -> None:
        """Note which parameters a ``bucket`` has, and give it their errors from a checkpoint."""
        contents = [(self._names[id(each)], each.numel()) for each in bucket.parameters()]
        self._buckets[bucket.index()] = contents
        if any(name in self._restored for name, _ in contents):
            self._errors[bucket.index()] = self._restored_error(contents, bucket.buffer())

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

    def _load_more(self, state: Mapping[str, Any]) -> None:  # noqa: B027 (a hook may have nothing more)
        """Set the values that :meth:`_more_state` returns from ``state``."""

    def _names_in(self, index: int) -> tuple[str, ...]:
        """The names of the parameters in the bucket with this ``index``."""
        return tuple(name for name, _ in self._buckets[index])

    def _restored_error(self, contents: Iterable[tuple[str, int]], like: Tensor) -> Tensor:
        """The error of a bucket with these ``contents``, as a checkpoint has it, on the device of ``like``."""
        parts = [self._restored.pop(name, torch.zeros(count)).flatten() for name, count in contents]
        return torch.cat([part.to(like) for part in parts])


# DistributedDataParallel refuses annotations that are texts, as in this module.
def _reduce(hook, bucket):  # type: ignore[no-untyped-def]
    return hook.reduce(bucket)


def completed(value: Tensor) -> Future[Tensor]:
    """A future that already has its ``value``."""
    future: Future[Tensor] = Future(devices=[value.device] if value.device.type == "cuda" else None)
    future.set_result(value)
    return future


def _check(module: nn.Module, key: str) -> None:
    """Raise StrategyError if the ``module`` has gradients in float16, or sparse ones; the spec has this ``key``."""
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and parameter.dtype is torch.float16:
            raise StrategyError(
                f"'strategy.hook: {key}' does not work with float16, and the parameter {name!r} has it: what overflows "
                "once stays in the errors for ever; use float32 or bfloat16"
            )
    for name, part in module.named_modules():
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse:
            raise StrategyError(
                f"'strategy.hook: {key}' does not work with sparse gradients, which {name!r} has: make it with "
                "sparse=False"
            )
