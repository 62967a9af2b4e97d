"""Training with gradients large enough to be seen on a wire. It needs neither an optimizer nor what it imports."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

import slurmtrain

with slurmtrain.session(params={"steps": 15, "width": 1000}) as run:
    torch.manual_seed(0)
    width = run.params["width"]
    model = nn.Linear(width, width, bias=False)
    for _ in run.steps(run.params["steps"]):
        loss = model(torch.randn(8, width)).pow(2).mean()
        model.zero_grad()
        loss.backward()
        with torch.no_grad():
            dist.all_reduce(model.weight.grad)
            model.weight -= 0.01 * model.weight.grad / run.world_size
        run.log(loss=loss.item())
