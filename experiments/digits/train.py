"""Train a small CNN on scikit-learn's handwritten digits (1,797 images of 8 x 8 pixels), on all processes of a run.

How it is distributed is what the spec's ``strategy`` says; by default, each process has the whole model. Works as a
slurmtrain run, under torchrun, and as a plain ``python train.py``.
"""

from __future__ import annotations

import math

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import slurmtrain

PARAMS = {"lr": 0.05, "batch_size": 64, "steps": 600, "seed": 0}
TEST_SHARE = 0.2


def digits(device: torch.device) -> tuple[TensorDataset, TensorDataset]:
    """Images (n, 1, 8, 8) in 0..1 with labels (n,), for training and for testing: the same split on every rank."""
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32, device=device).unsqueeze(1) / 16
    labels = torch.tensor(data.target, device=device)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0)).to(device)
    test, train = order.split([int(len(order) * TEST_SHARE), len(order) - int(len(order) * TEST_SHARE)])
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


def network() -> nn.Module:
    """Two convolutions and two linear layers, with dropout: about 70,000 parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Dropout(0.25),
        nn.Linear(64 * 4 * 4, 64), nn.ReLU(), nn.Dropout(0.25),
        nn.Linear(64, 10),
    )  # fmt: skip


def cosine(step: int, steps: int) -> float:
    """The factor of the learning rate at a step: falls from 1 to 0, and stays 0 for steps beyond ``steps``."""
    return 0.5 * (1 + math.cos(math.pi * min(step, steps) / steps))


def accuracy_of(logits: Tensor, labels: Tensor) -> Tensor:
    """The share of images that are classified correctly, from their ``logits`` (n, 10)."""
    return (logits.argmax(1) == labels).float().mean()


def main() -> None:
    """Train, and print the accuracy on the test set."""
    with slurmtrain.session(params=PARAMS) as run:
        params = run.params
        torch.manual_seed(params["seed"])
        model = run.parallelize(network())
        optimizer = run.optimizer(torch.optim.SGD, model.parameters(), lr=params["lr"], momentum=0.9)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: cosine(step, params["steps"]))
        training, test = digits(run.device)
        loader = run.loader(training, params["batch_size"], seed=params["seed"])
        # Same initial weights on all ranks, but different dropout masks from here on.
        torch.manual_seed(params["seed"] + 1 + run.rank)
        run.checkpoint(model=model, optimizer=optimizer, scheduler=scheduler)

        def accuracy() -> Tensor:
            return run.evaluate(model, accuracy_of, (run.share(*test.tensors) for _ in range(1)))

        for step, (images, labels) in run.steps(params["steps"], loader):
            loss = nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            run.backward(loss)
            optimizer.step()
            scheduler.step()
            run.log(loss=loss.detach(), lr=scheduler.get_last_lr()[0])
            if (step + 1) % 100 == 0:
                run.log(test_accuracy=accuracy())
                if run.rank == 0:
                    print(f"step {step + 1}: loss {loss.item():.4f}", flush=True)

        final = accuracy()
        run.log(test_accuracy=final)
        if run.rank == 0:
            print(f"test accuracy {final.item():.4f}", flush=True)


if __name__ == "__main__":
    main()
