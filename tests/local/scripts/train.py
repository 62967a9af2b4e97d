"""A small training run whose result depends on every step, every rank, and every random number drawn."""

from __future__ import annotations

import hashlib
import os
import random
import threading

import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import slurmtrain

PARAMS = {"steps": 20, "step_ms": 0, "crash_rank": -1, "crash_step": -1, "hold_rng": True}


def work(milliseconds: float) -> None:
    """Stands for a step's computation."""
    threading.Event().wait(milliseconds / 1000)


def main() -> None:
    with slurmtrain.session(params=PARAMS) as run:
        params = run.params
        torch.manual_seed(1)
        model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1)))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        seed = 100 + run.rank
        torch.manual_seed(seed), random.seed(seed), np.random.seed(seed)
        run.checkpoint(model=model, optimizer=optimizer)
        if not params["hold_rng"]:
            # The negative control: draw other numbers after a restore.
            run._restored_rng = None
            torch.manual_seed(1000 * run.attempt + run.rank)
        for step in run.steps(params["steps"]):
            batch = torch.randn(8, 4) + random.random() + float(np.random.rand())
            loss = model(batch).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            work(params["step_ms"])
            if run.rank == params["crash_rank"] and step == params["crash_step"]:
                raise ValueError("the loss went up to my_token=hunter2 and away")
            run.log(loss=loss)
        digest = hashlib.sha256()
        for value in model.state_dict().values():
            digest.update(value.numpy().tobytes())
        # One write, where unbuffered print makes two: ranks that torchrun has started share its output.
        print(f"weights {digest.hexdigest()} of rank {run.rank}\n", end="", flush=True)
        if run.rank == 0 and run.dir is not None:
            (run.dir / "weights.txt").write_text(digest.hexdigest())
        if os.environ.get("PRINT_LENGTH"):
            print(len(os.environ["MY_TOKEN"]), flush=True)


if __name__ == "__main__":
    main()
