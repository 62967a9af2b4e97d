"""Train a small network on processes of which a cgroup limits some to a part of a CPU.

``params.parts`` has the part of each rank. Rank 0 writes to ``params.out`` how many samples all ranks have trained
on in a second, in the steps after ``params.skip``, and the loss of the last one.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import torch
from torch import nn

import slurmtrain

_CGROUPS = Path("/sys/fs/cgroup")
# Short, so that a step has many periods.
_PERIOD_US = 10_000
_WIDTH = 256
_BATCHES = 8


def limit(part: float) -> None:
    """Let this process use only a part of a CPU, as root."""
    if part >= 1:
        return
    parent = _CGROUPS / "cpu" if (_CGROUPS / "cpu").is_dir() else _CGROUPS
    own = parent / f"slurmtrain-bench-{os.getpid()}"
    own.mkdir()
    quota = round(part * _PERIOD_US)
    if (own / "cpu.max").exists():
        (own / "cpu.max").write_text(f"{quota} {_PERIOD_US}")
    else:
        (own / "cpu.cfs_period_us").write_text(str(_PERIOD_US))
        (own / "cpu.cfs_quota_us").write_text(str(quota))
    (own / "cgroup.procs").write_text(str(os.getpid()))


def main() -> None:
    """Train, and write the throughput."""
    with slurmtrain.session() as run:
        params = run.params
        torch.set_num_threads(1)
        limit(params["parts"][run.rank])
        torch.manual_seed(0)
        layers = [layer for _ in range(4) for layer in (nn.Linear(_WIDTH, _WIDTH), nn.Tanh())]
        model = run.parallelize(nn.Sequential(*layers, nn.Linear(_WIDTH, 1)))
        optimizer = run.optimizer(torch.optim.SGD, model.parameters(), lr=0.01)
        run.checkpoint(model=model, optimizer=optimizer)
        # Drawn beforehand: all ranks have the whole batch, and drawing it would take as long on each.
        draw = torch.Generator().manual_seed(0)
        batches = [torch.randn(params["batch"], _WIDTH, generator=draw) for _ in range(_BATCHES)]
        began, loss = 0.0, torch.zeros(())
        for step in run.steps(params["steps"]):
            if step == params["skip"]:
                began = time.perf_counter()
            inputs = batches[step % _BATCHES]
            own, targets = run.share(inputs, inputs.mean(1, keepdim=True))
            loss = nn.functional.mse_loss(model(own), targets)
            optimizer.zero_grad()
            run.backward(loss)
            optimizer.step()
        took = time.perf_counter() - began
        if run.rank == 0:
            samples = (params["steps"] - params["skip"]) * params["batch"]
            Path(params["out"]).write_text(json.dumps({"samples_per_s": samples / took, "loss": loss.item()}))


if __name__ == "__main__":
    main()
