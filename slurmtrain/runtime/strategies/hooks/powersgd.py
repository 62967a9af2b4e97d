"""PowerSGD (torch's powerSGD_hook): each matrix of gradients is reduced as a product of two that have few columns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.futures import Future

from slurmtrain.model.spec.strategy import POWERSGD, StrategySpec
from slurmtrain.runtime.strategies.hooks.backend import has_nccl
from slurmtrain.runtime.strategies.hooks.feedback import FeedbackHook, completed

_COUNTERS = ("iter", "total_numel_before_compression", "total_numel_after_compression", "next_stats_report")
# On these the sizes of the factors depend.
_SIZES = ("matrix_approximation_rank", "min_compression_rate", "batch_tensors_with_same_shape")
_RNG, _FACTORS = "rng", "factors"
_Names = tuple[str, ...]


class PowerSgd(FeedbackHook):
    """torch's hook and its PowerSGDState."""

    def __init__(self, module: nn.Module, spec: StrategySpec) -> None:
        """For the gradients of a ``module``, with the options of ``spec``. Raises StrategyError as its base does."""
        super().__init__(module, POWERSGD)
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
        future = powerSGD_hook(self._state, bucket)
        # Its callbacks wait for collectives. With gloo these need the threads that run the callbacks: the callbacks of
        # two buckets would wait for each other.
        return future if has_nccl(buffer.device) else completed(future.wait())

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
