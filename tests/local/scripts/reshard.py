"""Training whose losses depend on the step alone, not on how many ranks share the work or how the model is sharded."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import slurmtrain

PARAMS = {"steps": 18, "strategy": "ddp", "batch": 16}


def batch_of(step: int, size: int) -> tuple[Tensor, Tensor]:
    """The whole batch of a step, of all ranks together."""
    numbers = torch.Generator().manual_seed(step)
    inputs = torch.randn(size, 6, generator=numbers)
    return inputs, inputs.square().sum(1, keepdim=True)


def network() -> nn.Sequential:
    """Sizes that do not divide evenly among the ranks."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 13), nn.Tanh(), nn.Linear(13, 7), nn.Tanh(), nn.Linear(7, 1))


def distributed(model: nn.Sequential, strategy: str) -> nn.Module:
    if strategy == "ddp":
        return DistributedDataParallel(model)
    from torch.distributed.fsdp import fully_shard

    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    return fully_shard(model)


def main() -> None:
    with slurmtrain.session(params=PARAMS) as run:
        params = run.params
        model = distributed(network(), params["strategy"])
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.7)
        run.checkpoint(model=model, optimizer=optimizer, scheduler=scheduler)
        for step in run.steps(params["steps"]):
            inputs, targets = (part[run.rank :: run.world_size] for part in batch_of(step, params["batch"]))
            loss = nn.functional.mse_loss(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            whole = loss.detach().clone()
            dist.all_reduce(whole)
            whole /= run.world_size
            run.log(loss=whole)
            if run.rank == 0:
                print(f"loss {step} {whole.item():.9g}", flush=True)


if __name__ == "__main__":
    main()
