"""Batches of ``run.loader`` for a GPU: pinned by workers, or on it from the beginning; its generator is left alone."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch.utils.data import Dataset, TensorDataset

from slurmtrain.runtime.training.loader import Loader, Loaders
from slurmtrain.runtime.training.parallel import Shares

BATCH = 4


class Noisy(Dataset[Any]):
    """Samples that draw."""

    def __len__(self) -> int:
        return 3 * BATCH

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.rand(2) + random.random() + index


def batches(device: torch.device, dataset: Any, **options: Any) -> list[Any]:
    """Those of an epoch."""
    loaders = Loaders(Shares(0, 1, device), 0)
    loader: Loader = loaders.make(dataset, BATCH, options, shuffle=True, drop_last=False, seed=None)
    loaded = [batch for _, batch in loaders.with_steps(iter(range(3)), loader)]
    loaders.close()
    return loaded


def test_workers_leave_batches_in_pinned_memory_unless_the_script_says_otherwise(device: torch.device) -> None:
    assert all(batch.is_pinned() for batch in batches(device, Noisy(), num_workers=2))
    assert not any(batch.is_pinned() for batch in batches(device, Noisy(), num_workers=2, pin_memory=False))
    assert all(batch.is_pinned() for batch in batches(device, Noisy(), pin_memory=True))


def test_a_dataset_may_be_on_the_gpu(device: torch.device) -> None:
    numbers = torch.arange(3 * BATCH, device=device)
    loaded = torch.cat([batch for (batch,) in batches(device, TensorDataset(numbers))])
    assert loaded.device == numbers.device
    assert sorted(loaded.tolist()) == numbers.tolist()


def test_loading_draws_none_of_the_gpu_s_numbers(device: torch.device) -> None:
    torch.cuda.manual_seed(7)
    alone = torch.rand(3, device=device).tolist()
    torch.cuda.manual_seed(7)
    batches(device, Noisy())
    assert torch.rand(3, device=device).tolist() == alone
