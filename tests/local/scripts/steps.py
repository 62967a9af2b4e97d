"""As train.py, but without an optimizer of torch's and without DistributedDataParallel.

Either of them imports the compiler of torch, which takes as long as torch itself.
"""

from __future__ import annotations

import hashlib
import os
import threading
from pathlib import Path

import torch
import torch.distributed as dist

import slurmtrain

# From ``slow_from`` on, steps of the first attempt take so long that whatever is to interrupt it comes before its end.
# ``init``: a checkpoint whose weights it begins with.
PARAMS = {"steps": 20, "step_ms": 0, "slow_from": 1 << 30, "crash_rank": -1, "crash_step": -1, "init": ""}
SLOW_MS = 300


def train() -> None:
    with slurmtrain.session(params=PARAMS) as run:
        params = run.params
        torch.manual_seed(1)
        model = torch.nn.Linear(4, 1)
        torch.manual_seed(100 + run.rank)
        if params["init"]:
            begin_with(model, params["init"])
        run.checkpoint(model=model)
        for step in run.steps(params["steps"]):
            loss = model(torch.randn(8, 4)).square().mean()
            model.zero_grad()
            loss.backward()
            with torch.no_grad():
                for weights in model.parameters():
                    dist.all_reduce(weights.grad)
                    weights -= 0.01 * weights.grad / run.world_size
            is_slow = run.attempt == 1 and step >= params["slow_from"]
            threading.Event().wait((SLOW_MS if is_slow else params["step_ms"]) / 1000)
            if run.rank == params["crash_rank"] and step == params["crash_step"]:
                raise ValueError("the loss went up to my_token=hunter2 and away")
            run.log(loss=loss)
        digest = hashlib.sha256(model.weight.detach().numpy().tobytes()).hexdigest()
        # One write, where unbuffered print makes several: ranks that torchrun has started share a log.
        print(f"weights {digest} of rank {run.rank}\n", end="", flush=True)
        if os.environ.get("PRINT_LENGTH"):
            print(len(os.environ["MY_TOKEN"]), flush=True)


def begin_with(model: torch.nn.Module, checkpoint: str) -> None:
    from torch.distributed.checkpoint import FileSystemReader, load

    weights = {f"model.{name}": value for name, value in model.state_dict().items()}
    load(weights, storage_reader=FileSystemReader(checkpoint), no_dist=True)
    print(f"began with {Path(checkpoint).name}\n", end="", flush=True)


if __name__ == "__main__":
    train()
    # Those of a group that is still referred to would be left.
    names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    print(f"gloo threads: {sum(name.startswith('pt_gloo') for name in names)}\n", end="", flush=True)
