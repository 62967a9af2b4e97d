"""Train a little, and print in JSON what this rank has imported: with the session's start, and after its first step."""

from __future__ import annotations

import json
import sys

import torch
from torch.nn.parallel import DistributedDataParallel

import slurmtrain

before = set(sys.modules)
with slurmtrain.session() as run:
    model = DistributedDataParallel(torch.nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    run.checkpoint(model=model, optimizer=optimizer)
    started: set[str] = set()
    for _ in run.steps(6):
        optimizer.zero_grad()
        model(torch.ones(3, 4)).sum().backward()
        optimizer.step()
        run.log(loss=1.0)
        started = started or set(sys.modules)
print(json.dumps({"start": sorted(started - before), "later": sorted(set(sys.modules) - started)}))
