"""Train a small model whose ranks wait for data, and for the last rank, as long as the parameters say.

Each rank writes to the given folder how much of its time it has waited for data, from its second step on.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
from torch import nn

import slurmtrain


class Slow(torch.utils.data.Dataset):
    """Samples that take a while, and how long they have taken in all."""

    def __init__(self, sample_s: float) -> None:
        self.sample_s = sample_s
        self.took_s = 0.0

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        began = time.perf_counter()
        time.sleep(self.sample_s)
        self.took_s += time.perf_counter() - began
        return torch.full((16,), index / 64)


with slurmtrain.session() as run:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = run.parallelize(nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 1)))
    optimizer = run.optimizer(torch.optim.SGD, model.parameters(), lr=0.01)
    samples = Slow(run.params["sample_s"])
    loader = run.loader(samples, batch_size=4 * run.world_size)
    run.checkpoint(model=model, optimizer=optimizer)
    run.measure(flops_per_sample=1e6, tokens_per_sample=16)
    began = waited_s = 0.0
    for step, batch in run.steps(run.params["steps"], loader):
        if run.rank == run.world_size - 1:
            time.sleep(run.params["late_s"])
        loss = model(batch).square().mean()
        run.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        run.log(loss=loss)
        if step == 0:
            began, waited_s = time.perf_counter(), samples.took_s
    share = (samples.took_s - waited_s) / (time.perf_counter() - began)
    Path(sys.argv[1], f"{run.rank}.json").write_text(json.dumps(share))
