"""Trains on a data loader with workers, and notes which samples each step had and which numbers they drew."""

from __future__ import annotations

import json
import random
import sys
import threading
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector
from torch.utils.data import Dataset

import slurmtrain

PARAMS = {"steps": 30, "step_ms": 0, "workers": 0}
# The last batch of an epoch has 2 samples: too few for 3 ranks.
SAMPLES, BATCH = 50, 12


class Noisy(Dataset[Any]):
    """Numbers with noise, as augmentations add it."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[int, Tensor]:
        return index, torch.tensor([index / SAMPLES, random.random()], dtype=torch.float64)


def mean_over_ranks(value: Tensor) -> Tensor:
    value = value.detach().clone()
    if dist.is_initialized():
        dist.all_reduce(value)
        value /= dist.get_world_size()
    return value


def main() -> None:
    with slurmtrain.session(params=PARAMS) as run:
        torch.manual_seed(1)
        model = run.parallelize(nn.Linear(2, 1, dtype=torch.float64))
        optimizer = run.optimizer(torch.optim.Adam, model.parameters(), lr=0.01)
        loader = run.loader(Noisy(), BATCH, num_workers=run.params["workers"], seed=3)
        run.checkpoint(model=model, optimizer=optimizer)
        notes = Path(sys.argv[1]) / f"samples-{run.attempt}-{run.rank}.jsonl"
        with notes.open("w") as file:
            for step, (indices, samples) in run.steps(run.params["steps"], loader):
                loss = (model(samples).squeeze(1) - samples.sum(1)).square().mean()
                optimizer.zero_grad()
                run.backward(loss)
                optimizer.step()
                own = zip(indices.tolist(), samples[:, 1].tolist(), strict=True) if loader.weight else ()
                # One write a line: a step that was killed has it whole or not at all.
                file.write(json.dumps([step, [[loader.epoch, *sample] for sample in own]]) + "\n")
                file.flush()
                run.log(loss=mean_over_ranks(loader.weight * loss))
                threading.Event().wait(run.params["step_ms"] / 1000)
        if run.rank == 0:
            (notes.parent / "weights.json").write_text(json.dumps(parameters_to_vector(model.parameters()).tolist()))


if __name__ == "__main__":
    main()
