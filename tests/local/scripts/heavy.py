"""Training with gradients large enough to be seen on a wire."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import slurmtrain

with slurmtrain.session(params={"steps": 15, "width": 1000}) as run:
    torch.manual_seed(0)
    width = run.params["width"]
    model = DistributedDataParallel(nn.Linear(width, width, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in run.steps(run.params["steps"]):
        loss = model(torch.randn(8, width)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.log(loss=loss.item())
