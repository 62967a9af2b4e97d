"""What ``deterministic: true`` costs on CPUs: a training step of small models, with torch's switches and without."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from _measure import Report, say
from torch import Tensor, nn
from torch.nn import functional

COLD = 5


def run(arguments: argparse.Namespace) -> Report:
    rounds, steps = (3, 10) if arguments.quick else (12, 40)
    report = Report()
    torch.manual_seed(0)
    for name, step in {"convolutions": convolutions(), "transformer": transformer(), "scatter": scatter()}.items():
        times: dict[str, list[float]] = {"deterministic": [], "default": []}
        for number in range(rounds):
            for way in times if number % 2 else reversed(times):
                torch.set_deterministic_debug_mode("error" if way == "deterministic" else "default")
                times[way].append(median_ms(step, steps))
        torch.set_deterministic_debug_mode("default")
        for way, values in times.items():
            report.figure(f"{name}: {way}_step_ms", values, "ms")
        report.ratio(f"{name}: step deterministic/default", times["deterministic"], times["default"])
        say(f"{name} done")
    report.notes = ["on CPUs; no GPU was measured, whose convolutions and scattered sums cost more"]
    return report


def median_ms(step: Callable[[], None], steps: int) -> float:
    """The median time of a step, without the first ones."""
    took = []
    for _ in range(COLD + steps):
        began = time.perf_counter()
        step()
        took.append((time.perf_counter() - began) * 1e3)
    return statistics.median(took[COLD:])


def trained(model: nn.Module, loss: Callable[[], Tensor]) -> Callable[[], None]:
    """A step of training."""
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()

    return step


def convolutions() -> Callable[[], None]:
    layers = [nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 32, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    model = nn.Sequential(*layers, nn.Linear(32, 10))
    images, labels = torch.randn(16, 3, 32, 32), torch.randint(10, (16,))
    return trained(model, lambda: functional.cross_entropy(model(images), labels))


def transformer() -> Callable[[], None]:
    layer = nn.TransformerEncoderLayer(128, 4, 256, batch_first=True)
    model = nn.Sequential(nn.Embedding(1000, 128), nn.TransformerEncoder(layer, 2), nn.Linear(128, 1000))
    tokens = torch.randint(1000, (8, 64))
    return trained(model, lambda: functional.cross_entropy(model(tokens).transpose(1, 2), tokens))


def scatter() -> Callable[[], None]:
    """Sums over the neighbours in a graph, whose order is what differs on GPUs."""
    model = nn.Linear(64, 64)
    nodes, places = torch.randn(20_000, 64), torch.randint(2_000, (20_000,))
    return trained(model, lambda: torch.zeros(2_000, 64).index_add(0, places, model(nodes)).square().mean())
