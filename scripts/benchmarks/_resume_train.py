"""Train a small model whose every step draws from all random number generators, and publish a digest of the end.

Rank 0 writes ``final.json`` into the run directory: {"steps": ..., "sha256": of weights, optimizer and draws}.
"""

from __future__ import annotations

import hashlib
import json
import random
import time

import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import slurmtrain


def digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """SHA-256 of every byte of the weights and the optimizer's state, and of each generator's next draw."""
    hashed = hashlib.sha256()
    states = optimizer.state_dict()["state"]
    tensors = [*model.state_dict().values(), *(states[key]["momentum_buffer"] for key in sorted(states))]
    for tensor in tensors:
        hashed.update(tensor.detach().contiguous().numpy().tobytes())
    hashed.update(repr((random.random(), float(np.random.random()), torch.rand(1).item())).encode())
    return hashed.hexdigest()


def main() -> None:
    torch.set_num_threads(1)
    with slurmtrain.session() as run:
        torch.manual_seed(0)
        network = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 8))
        model = DistributedDataParallel(network)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        for generator in (random.seed, np.random.seed, torch.manual_seed):
            generator(run.rank)
        run.checkpoint(model=model, optimizer=optimizer)
        for _ in run.steps(run.params["steps"]):
            scale = random.uniform(0.5, 1.5) + float(np.random.uniform(-0.1, 0.1))
            inputs = torch.randn(16, 32) * scale
            labels = torch.randint(0, 8, (16,))
            loss = nn.functional.cross_entropy(model(inputs), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            run.log(loss=loss.item())
            time.sleep(run.params["pause"])
        if run.rank == 0:
            assert run.dir is not None
            result = {"steps": run.params["steps"], "sha256": digest(network, optimizer)}
            (run.dir / "final.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
