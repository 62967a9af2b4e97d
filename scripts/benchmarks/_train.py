"""Train for a few steps, as a slurmtrain run or standalone under torchrun: for the benchmarks launch and step.

Rank 0 writes to ``--out`` at its end when it came where, in seconds since 1970. ``started``, ``imported`` and
``joined``: to the first line of this script, to the end of its imports, and into the process group. ``steps``: when the
body of each step began and ended.
"""

from __future__ import annotations

import time

STARTED = time.time()

import argparse  # noqa: E402 (the clock first)
import json  # noqa: E402
import os  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

GRADIENTS = 250_000


class Model:
    """A small model under DistributedDataParallel, and its optimizer."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = DistributedDataParallel(torch.nn.Linear(64, 10))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.state: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer}
        self._images, self._labels = torch.randn(32, 64), torch.randint(0, 10, (32,))

    def step(self) -> float:
        self.optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(self.model(self._images), self._labels)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        return loss.item()


class Work:
    """A fixed cost: products of matrices, and an all-reduce of what the gradients of a small model weigh.

    It trains nothing; ``weight`` stands for a model in a checkpoint.
    """

    def __init__(self, products: int) -> None:
        torch.manual_seed(0)
        self.products = products
        self.weight = torch.randn(256, 256) / 16
        self.gradients = torch.ones(GRADIENTS)
        self.state: dict[str, Any] = {"work": self}

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


def train(arguments: argparse.Namespace, marks: dict[str, Any]) -> None:
    """The script without slurmtrain."""
    dist.init_process_group("gloo")
    marks["joined"] = time.time()
    training = Work(arguments.products) if arguments.products else Model()
    for _ in range(arguments.steps):
        began = time.time()
        training.step()
        marks["steps"].append((began, time.time()))
    dist.barrier()
    write(arguments.out, marks)
    dist.destroy_process_group()


def train_in_session(arguments: argparse.Namespace, marks: dict[str, Any]) -> None:
    """The same in a session: with a checkpoint registered, and a metric logged at each step."""
    import slurmtrain

    with slurmtrain.session() as run:
        marks["joined"] = time.time()
        training = Work(arguments.products) if arguments.products else Model()
        run.checkpoint(**training.state)
        for _ in run.steps(arguments.steps):
            began = time.time()
            loss = training.step()
            marks["steps"].append((began, time.time()))
            run.log(loss=loss)
        write(arguments.out, marks)


def write(out: Path, marks: dict[str, Any]) -> None:
    if dist.get_rank() == 0:
        unfinished = out.with_suffix(".tmp")
        unfinished.write_text(json.dumps(marks))
        unfinished.replace(out)


def main() -> None:
    marks: dict[str, Any] = {"started": STARTED, "imported": time.time(), "steps": []}
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--products", type=int, help="train nothing, at the cost of so many products a step")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    (train_in_session if "SLURMTRAIN_RUN_DIR" in os.environ else train)(arguments, marks)


if __name__ == "__main__":
    main()
