"""Training whose losses depend on the step alone, not on how many ranks share the work or how the model is sharded."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

import slurmtrain

PARAMS = {"steps": 18, "pipeline": False, "batch": 16}


def batch_of(step: int, size: int) -> tuple[Tensor, Tensor]:
    """The whole batch of a step, of all ranks together."""
    numbers = torch.Generator().manual_seed(step)
    inputs = torch.randn(size, 6, generator=numbers)
    return inputs, inputs.square().sum(1, keepdim=True)


def network() -> nn.Sequential:
    """Sizes that do not divide evenly among the ranks."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 13), nn.Tanh(), nn.Linear(13, 7), nn.Tanh(), nn.Linear(7, 1))


class Pipeline:
    """Two stages of the model, each on half of the ranks: rank 0 has the first, rank 1 the second, and so on."""

    def __init__(self, rank: int, world_size: int) -> None:
        from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

        pipelines = [dist.new_group([first, first + 1]) for first in range(0, world_size, 2)]
        replicas = [dist.new_group(range(stage, world_size, 2)) for stage in (0, 1)]
        self.index, self.replicas = rank % 2, replicas[rank % 2]
        self.number, self.count = rank // 2, world_size // 2
        # The layers keep the names that they have in the whole model.
        self.model = nn.Sequential()
        for name, layer in network().named_children():
            if (int(name) >= 2) == bool(self.index):
                self.model.add_module(name, layer)
        stage = PipelineStage(self.model, self.index, 2, torch.device("cpu"), group=pipelines[self.number])
        self.schedule = ScheduleGPipe(stage, n_microbatches=2, loss_fn=nn.functional.mse_loss)

    def train(self, step: int, size: int) -> Tensor:
        """The gradients of a step, averaged over the replicas, and the loss of the whole batch, on all ranks."""
        # Contiguous, since torch 2.10 and 2.11 refuse inputs of a stage whose strides change.
        inputs, targets = (part[self.number :: self.count].contiguous() for part in batch_of(step, size))
        losses: list[Tensor] = []
        self.schedule.step(*([] if self.index else [inputs]), target=targets, losses=losses)
        for parameter in self.model.parameters():
            dist.all_reduce(parameter.grad, group=self.replicas)
            parameter.grad /= self.count
        return torch.stack(losses).mean() * 2 if self.index else torch.zeros(())


def main() -> None:
    with slurmtrain.session(params=PARAMS) as run:
        params = run.params
        pipeline = Pipeline(run.rank, run.world_size) if params["pipeline"] else None
        model = pipeline.model if pipeline else run.parallelize(network())
        optimizer = run.optimizer(torch.optim.AdamW, model.parameters(), lr=0.02)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.7)
        run.checkpoint(model=model, optimizer=optimizer, scheduler=scheduler)
        for step in run.steps(params["steps"]):
            optimizer.zero_grad()
            if pipeline:
                loss = pipeline.train(step, params["batch"])
            else:
                inputs, targets = (part[run.rank :: run.world_size] for part in batch_of(step, params["batch"]))
                loss = nn.functional.mse_loss(model(inputs), targets)
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
