"""Train a layer on ranks that take different times for a sample: ``seconds`` has those of each rank.

When it is started again, the first rank takes as long as the last one did.
"""

from __future__ import annotations

import time

import torch
from torch import nn

import slurmtrain

BATCH = 24

with slurmtrain.session(params={"steps": 40, "seconds": [0.001, 0.001]}) as run:
    torch.manual_seed(0)
    model = run.parallelize(nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1)))
    optimizer = run.optimizer(torch.optim.AdamW, model.parameters(), lr=0.01)
    run.checkpoint(model=model, optimizer=optimizer)
    assert run.dir is not None
    mark = run.dir / "began"
    seconds = list(reversed(run.params["seconds"])) if mark.exists() else run.params["seconds"]
    for step in run.steps(run.params["steps"]):
        inputs = torch.randn(BATCH, 16, generator=torch.Generator().manual_seed(step))
        own, targets = run.share(inputs, inputs.mean(1, keepdim=True))
        time.sleep(seconds[run.rank] * len(own))
        loss = nn.functional.mse_loss(model(own), targets)
        optimizer.zero_grad()
        run.backward(loss)
        optimizer.step()
        if step == 1 and run.rank == 0:
            mark.touch()
        # Rank 0's own part, every bit of which depends on the shares of all steps before.
        run.log(loss=loss, samples=len(own))
