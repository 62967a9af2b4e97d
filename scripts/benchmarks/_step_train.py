"""Train nothing at a fixed cost per step, as a slurmtrain run or standalone under torchrun.

A step is ``--work`` products of matrices and an all-reduce of what the gradients of a small model weigh. What rank 0
writes to ``--out`` when it is done: for each step the times, in seconds since 1970, at which its body began and ended.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist

GRADIENTS = 250_000


class Work:
    """One step's computation and communication; ``weight`` stands for a model in a checkpoint."""

    def __init__(self, products: int) -> None:
        torch.manual_seed(0)
        self.products = products
        self.weight = torch.randn(256, 256) / 16
        self.gradients = torch.ones(GRADIENTS)

    def step(self) -> float:
        value = self.weight
        for _ in range(self.products):
            value = (value @ self.weight).tanh()
        dist.all_reduce(self.gradients)
        self.gradients /= dist.get_world_size()
        return float(value[0, 0])

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"weight": self.weight}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.weight = state["weight"]


def train(arguments: argparse.Namespace) -> None:
    """The training loop without slurmtrain."""
    dist.init_process_group("gloo")
    work, marks = Work(arguments.work), []
    for _ in range(arguments.steps):
        began = time.time()
        work.step()
        marks.append((began, time.time()))
    dist.barrier()
    if dist.get_rank() == 0:
        write(arguments.out, marks)
    dist.destroy_process_group()


def train_in_session(arguments: argparse.Namespace) -> None:
    """The same in a session: with checkpoints registered, and a metric logged at each step."""
    import slurmtrain

    with slurmtrain.session() as run:
        work, marks = Work(arguments.work), []
        run.checkpoint(work=work)
        for _ in run.steps(arguments.steps):
            began = time.time()
            loss = work.step()
            marks.append((began, time.time()))
            run.log(loss=loss)
        if run.rank == 0:
            write(arguments.out, marks)


def write(path: Path, marks: list[tuple[float, float]]) -> None:
    unfinished = path.with_suffix(".tmp")
    unfinished.write_text(json.dumps(marks))
    unfinished.replace(path)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--work", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if "SLURMTRAIN_RUN_DIR" in os.environ:
        train_in_session(arguments)
    else:
        train(arguments)


if __name__ == "__main__":
    main()
