"""What ``run.loader`` costs: the time of a batch, compared with torch's DataLoader and DistributedSampler."""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Iterator
from typing import Any

import torch
from _measure import Report, say
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

from slurmtrain.runtime.data.loader import DataRank
from slurmtrain.runtime.data.loaders import Loaders

SAMPLES, BATCH, COLD = 20_000, 64, 5
CPU = torch.device("cpu")


class Memory(Dataset[torch.Tensor]):
    """Samples in memory, which draw nothing: the least work that a dataset can have."""

    def __init__(self) -> None:
        self.samples = torch.randn(SAMPLES, 64)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.samples[index]


class Noisy(Memory):
    """The same with an augmentation that draws."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.samples[index] * random.uniform(0.9, 1.1)


def run(arguments: argparse.Namespace) -> Report:
    rounds, batches = (2, 50) if arguments.quick else (15, 200)
    torch.set_num_threads(1)
    datasets = {"tensors": TensorDataset(torch.randn(SAMPLES, 64)), "memory": Memory(), "noisy": Noisy()}
    report = Report()
    for name, dataset in datasets.items():
        for workers in (0, 2):
            times: dict[str, list[float]] = {"loader": [], "torch": []}
            for number in range(rounds):
                for way in times if number % 2 else reversed(times):
                    times[way].append(batch_us(WAYS[way](dataset, workers), batches))
            case = f"{name}, {workers} workers"
            for way, values in times.items():
                report.figure(f"{case}: {way}_batch_us", values, "us")
            report.ratio(f"{case}: batch loader/torch", times["loader"], times["torch"])
            say(f"{case} done")
    report.notes = [f"batches of {BATCH} samples of 64 numbers; 'noisy' draws one number a sample"]
    return report


def batch_us(loaded: Iterator[Any], batches: int) -> float:
    """The mean time of a batch, without the first ones, in microseconds."""
    for _ in range(COLD):
        next(loaded)
    began = time.perf_counter()
    for _ in range(batches):
        next(loaded)
    return (time.perf_counter() - began) / batches * 1e6


def with_loader(dataset: Any, workers: int) -> Iterator[Any]:
    loaders = Loaders(DataRank(0, 1, CPU, lambda: None), 0)
    loader = loaders.make(dataset, BATCH, {"num_workers": workers}, shuffle=True, drop_last=False, seed=None)
    try:
        yield from loaders.with_steps(iter(range(10**9)), loader)
    finally:
        loaders.close()


def with_torch(dataset: Any, workers: int) -> Iterator[Any]:
    sampler: DistributedSampler[Any] = DistributedSampler(dataset, num_replicas=1, rank=0)
    yield from DataLoader(dataset, BATCH, sampler=sampler, num_workers=workers)


WAYS = {"loader": with_loader, "torch": with_torch}
