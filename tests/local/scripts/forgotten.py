"""Trains with a session, on each rank a model of its own: nothing wraps it."""

from __future__ import annotations

import torch

import slurmtrain

with slurmtrain.session() as run:
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 4).to(run.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    run.checkpoint(model=model, optimizer=optimizer)
    torch.manual_seed(run.rank)
    for _ in run.steps(12):
        loss = (model(torch.randn(16, 8, device=run.device)) - 1).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.log(loss=loss)
