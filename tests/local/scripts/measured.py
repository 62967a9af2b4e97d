"""Train a small model whose ranks wait for data, and for each other, as long as the parameters say."""

import time

import torch
from torch import nn

import slurmtrain


class Slow(torch.utils.data.Dataset):
    def __init__(self, sample_s):
        self.sample_s = sample_s

    def __len__(self):
        return 64

    def __getitem__(self, index):
        time.sleep(self.sample_s)
        return torch.full((16,), index / 64)


def late(module, inputs):
    """The part of the forward pass in which the last rank keeps the others waiting."""
    if run.rank == run.world_size - 1:
        time.sleep(run.params["late_s"])


with slurmtrain.session() as run:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = run.parallelize(nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 1)))
    optimizer = run.optimizer(torch.optim.SGD, model.parameters(), lr=0.01)
    model.register_forward_pre_hook(late)
    loader = run.loader(Slow(run.params["sample_s"]), batch_size=4 * run.world_size)
    run.checkpoint(model=model, optimizer=optimizer)
    run.measure(flops_per_sample=6e3, tokens_per_sample=16)
    for _, batch in run.steps(run.params["steps"], loader):
        loss = model(batch).square().mean()
        run.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        run.log(loss=loss)
    if hold := run.params.get("hold"):
        time.sleep(hold)
