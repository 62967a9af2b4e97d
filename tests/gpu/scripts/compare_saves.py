"""Saves a state on one GPU, by slurmtrain and by torch's own ways, in turns; prints their times as JSON.

``compare_saves.py FOLDER BYTES ROUNDS``. Seconds of each save: ``stall``, until training may go on, and ``wall``, until
the checkpoint is complete. Training goes on beside saves that do not stall it.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from helpers.ranks import Attempt

from slurmtrain.model.experiment.checkpoint import KeepSpec
from slurmtrain.runtime.job.process_group import RankGroup

# Parameters, their gradients' moments: what AdamW keeps of each.
COPIES, FLOAT, WIDTH = 3, 4, 2048
Save = Callable[[int, Callable[[], None]], tuple[float, float]]


class Training:
    """A model and its optimizer's state of ``size`` bytes, on the GPU."""

    def __init__(self, size: int) -> None:
        layers = max(1, size // (COPIES * FLOAT * WIDTH * WIDTH))
        self.model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers))).cuda()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-6, fused=True)
        self.batch = torch.randn(256, WIDTH, device="cuda")
        self.bytes = layers * WIDTH * WIDTH * FLOAT * COPIES

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(self.batch).square().mean().backward()
        self.optimizer.step()


def by_slurmtrain(training: Training, folder: Path) -> tuple[Save, Callable[[], None]]:
    objects = {"model": training.model, "optimizer": training.optimizer}
    attempt = Attempt(folder / "run", RankGroup(0, 1, torch.device("cuda", 0)), objects, keep=KeepSpec(last=1))
    attempt.saver.prepare()

    def save(number: int, train: Callable[[], None]) -> tuple[float, float]:
        began = time.perf_counter()
        problem = attempt.begin(number + 1)
        stall = time.perf_counter() - began
        if problem is not None:
            raise RuntimeError(problem)
        while (outcome := attempt.advance()) is None:
            train()
        if outcome.problem:
            raise RuntimeError(outcome.problem)
        return stall, time.perf_counter() - began

    return save, lambda: attempt.__exit__(None)


def by_dcp(training: Training, folder: Path) -> Save:
    def save(number: int, train: Callable[[], None]) -> tuple[float, float]:
        path = folder / f"dcp-{number}"
        began = time.perf_counter()
        dcp.save(_state(training), checkpoint_id=path)
        wall = time.perf_counter() - began
        shutil.rmtree(path)
        return wall, wall

    return save


def by_dcp_async(training: Training, folder: Path) -> Save:
    def save(number: int, train: Callable[[], None]) -> tuple[float, float]:
        path = folder / f"dcp-async-{number}"
        began = time.perf_counter()
        future = dcp.async_save(_state(training), checkpoint_id=path)
        stall = time.perf_counter() - began
        assert isinstance(future, Future)
        while not future.done():
            train()
        future.result()
        wall = time.perf_counter() - began
        shutil.rmtree(path)
        return stall, wall

    return save


def _state(training: Training) -> dict[str, object]:
    return dict(zip(("model", "optimizer"), get_state_dict(training.model, training.optimizer), strict=True))


def main() -> None:
    folder, size, rounds = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    training = Training(size)
    training.step()

    def train() -> None:
        training.step()
        torch.cuda.synchronize()

    ours, close = by_slurmtrain(training, folder)
    ways = {"slurmtrain": ours, "dcp.save": by_dcp(training, folder), "dcp.async_save": by_dcp_async(training, folder)}
    times: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    for number in range(rounds):
        for way, save in ways.items():
            train()
            times[way].append(save(number, train))
    close()
    print(json.dumps({"bytes": training.bytes, "times": times}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
