"""Train a small model for a few steps, as a slurmtrain run or standalone under torchrun.

Rank 0 writes to ``--out`` when it came where, in seconds since 1970: to the first line of this script, to the end of
its imports, into the process group, and to the end of its first step.
"""

from __future__ import annotations

import time

STARTED = time.time()

import argparse  # noqa: E402 (the clock first)
import json  # noqa: E402
import os  # noqa: E402
from pathlib import Path  # noqa: E402

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

STEPS = 3


class Training:
    """What both sides do once their process group exists."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = DistributedDataParallel(torch.nn.Linear(64, 10))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.images, self.labels = torch.randn(32, 64), torch.randint(10, (32,))

    def step(self) -> float:
        self.optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(self.model(self.images), self.labels)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        return loss.item()


def train(out: Path, marks: dict[str, float]) -> None:
    """The script without slurmtrain."""
    dist.init_process_group("gloo")
    marks["joined"] = time.time()
    training = Training()
    for step in range(STEPS):
        training.step()
        if step == 0:
            stepped(out, marks)
    dist.barrier()
    dist.destroy_process_group()


def train_in_session(out: Path, marks: dict[str, float]) -> None:
    """The same in a session: with a checkpoint registered, and a metric logged at each step."""
    import slurmtrain

    with slurmtrain.session() as run:
        marks["joined"] = time.time()
        training = Training()
        run.checkpoint(model=training.model, optimizer=training.optimizer)
        for step in run.steps(STEPS):
            run.log(loss=training.step())
            if step == 0:
                stepped(out, marks)


def stepped(out: Path, marks: dict[str, float]) -> None:
    """The first step is finished."""
    marks["stepped"] = time.time()
    if dist.get_rank() == 0:
        unfinished = out.with_suffix(".tmp")
        unfinished.write_text(json.dumps(marks))
        unfinished.replace(out)


def main() -> None:
    marks = {"started": STARTED, "imported": time.time()}
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--without-session", action="store_true", help="also where slurmtrain runs this")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if "SLURMTRAIN_RUN_DIR" in os.environ and not arguments.without_session:
        train_in_session(arguments.out, marks)
    else:
        train(arguments.out, marks)


if __name__ == "__main__":
    main()
