"""Train a model whose step is mostly sleep: as a slurmtrain run, or standalone with periodic checkpoints.

Standalone it does what most scripts do: rank 0 writes one file during training, and each start continues from it.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from _goodput_log import StepLog
from torch.nn.parallel import DistributedDataParallel

# Float32 numbers that no step changes, so that the state weighs some MB, and the all-reduce of a step nothing.
BALLAST = 1_000_000


class Task(NamedTuple):
    """``steps`` of ``pause_s`` each, and a checkpoint every ``every`` steps; ``out``: the directory of its log."""

    out: Path
    steps: int
    pause_s: float
    every: int

    @staticmethod
    def parse(words: list[str]) -> Task:
        """The task that the first words of a command line name."""
        out, steps, pause_s, every = words[:4]
        return Task(Path(out), int(steps), float(pause_s), int(every))


class Network(torch.nn.Module):
    """The trained model, and ballast that makes its state large."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(64, 10)
        self.ballast = torch.nn.Parameter(torch.zeros(BALLAST), requires_grad=False)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        answer: torch.Tensor = self.layer(images)
        return answer


class Training:
    """The same in all systems."""

    def __init__(self, pause_s: float) -> None:
        torch.manual_seed(0)
        self._pause_s = pause_s
        self.model = DistributedDataParallel(Network())
        self.optimizer = torch.optim.SGD(self.model.module.layer.parameters(), lr=0.01, momentum=0.9)
        self._images, self._labels = torch.randn(32, 64), torch.randint(10, (32,))

    def step(self) -> None:
        time.sleep(self._pause_s)
        self.optimizer.zero_grad()
        torch.nn.functional.cross_entropy(self.model(self._images), self._labels).backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()


def train(task: Task) -> None:
    """The loop without slurmtrain; the environment identifies the other ranks."""
    dist.init_process_group("gloo")
    log, training = StepLog(task.out, dist.get_rank()), Training(task.pause_s)
    checkpoint = task.out / "checkpoint.pt"
    begin = 0
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        training.model.load_state_dict(state["model"])
        training.optimizer.load_state_dict(state["optimizer"])
        begin = state["step"]
    for step in range(begin + 1, task.steps + 1):
        training.step()
        log.finished(step)
        if step % task.every == 0 and dist.get_rank() == 0:
            write(checkpoint, training, step)
    dist.barrier()
    log.finish()
    dist.destroy_process_group()


def write(checkpoint: Path, training: Training, step: int) -> None:
    """Write under a temporary name first: a job may be killed while it writes."""
    unfinished = checkpoint.with_suffix(".tmp")
    states = {"model": training.model.state_dict(), "optimizer": training.optimizer.state_dict(), "step": step}
    torch.save(states, unfinished)
    unfinished.replace(checkpoint)


def train_in_session(task: Task) -> None:
    """The run's spec decides when to save."""
    import slurmtrain

    with slurmtrain.session() as run:
        log, training = StepLog(task.out, run.rank), Training(task.pause_s)
        run.checkpoint(model=training.model, optimizer=training.optimizer)
        for step in run.steps(task.steps):
            training.step()
            log.finished(step + 1)
        log.finish()


if __name__ == "__main__":
    torch.set_num_threads(1)
    (train_in_session if "SLURMTRAIN_RUN_DIR" in os.environ else train)(Task.parse(sys.argv[1:]))
