"""Ranks that train models of their own, and those that only look as if they did."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.ranks import Pair
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from slurmtrain.runtime.job.process_group import RankGroup
from slurmtrain.runtime.training.module_watch import SynchronyWatch
from slurmtrain.system.journal import Journal

STEPS = 40


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    pair = Pair()
    yield pair
    pair.close()


def sync_nothing(_model: nn.Module, _step: int) -> None:
    """What a script without DDP does."""


def log_loss(_model: nn.Module, _step: int) -> None:
    """The same script, which averages the loss that it logs."""
    dist.all_reduce(torch.ones(1))


def average_gradients(model: nn.Module, _step: int) -> None:
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)


def average_weights_seldom(model: nn.Module, step: int) -> None:
    """Local SGD: the first average is after the first look."""
    if step % 15 == 14:
        for parameter in model.parameters():
            dist.all_reduce(parameter.data)
            parameter.data /= dist.get_world_size()


def train(
    ranks: RankGroup, root: Path, sync: Callable[[nn.Module, int], None], kind: str, rate: float
) -> list[dict[str, Any]]:
    """Train for some steps; what the watch has journaled."""
    torch.manual_seed(1)
    own: nn.Module = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    if kind == "pipeline":
        # Rank 1 has a layer of another name.
        own = nn.ModuleDict({f"stage{ranks.rank}": nn.Linear(8, 4)})
    model: nn.Module = own["stage" + str(ranks.rank)] if kind == "pipeline" else own  # type: ignore[index]
    if kind == "fsdp":
        model = own = fully_shard(own, mesh=init_device_mesh("cpu", (ranks.world_size,)))
    elif kind == "ddp":
        model = DistributedDataParallel(own)
    optimizer = torch.optim.AdamW(own.parameters(), lr=rate)
    journal = Journal(root / "rank-0.jsonl", durable=False) if ranks.rank == 0 else None
    watch = SynchronyWatch([own, optimizer, 3], ranks, journal, 0)
    torch.manual_seed(0 if kind == "same data" else ranks.rank)
    for step in range(STEPS):
        optimizer.zero_grad()
        if kind != "evaluation":
            (model(torch.randn(16, 8)) - 1).square().mean().backward()
            sync(own, step)
            optimizer.step()
        if watch.is_due(step + 1):
            watch.look(step + 1)
    watch.look(STEPS)
    if journal is None:
        return []
    journal.close()
    text = journal.path.read_text() if journal.path.exists() else ""
    return [json.loads(line) for line in text.splitlines()]


def reports(pair: Pair, root: Path, *case: Any) -> list[str]:
    return [event["why"] for event in pair.run(train, root, *case)[0]]


def test_ranks_without_ddp_are_noticed_however_little_their_weights_differ(tmp_path: Path, pair: Pair) -> None:
    [why] = reports(pair, tmp_path, sync_nothing, "plain", 1e-9)
    assert why.startswith(
        "the 2 ranks have exchanged no gradients in 8 steps, as with a forgotten DDP: each trains a model of its own; "
    )
    assert "DistributedDataParallel(model)" in why


def test_ranks_that_all_do_the_same_are_noticed(tmp_path: Path, pair: Pair) -> None:
    [why] = reports(pair, tmp_path, sync_nothing, "same data", 0.01)
    assert "as with a forgotten DDP: the same training runs 2 times" in why


def test_ranks_that_exchange_only_their_losses_are_noticed(tmp_path: Path, pair: Pair) -> None:
    [why] = reports(pair, tmp_path, log_loss, "plain", 0.01)
    assert why.startswith("the weights of the 2 ranks have changed in different directions in 8 steps, as with a")


def test_what_ranks_that_average_seldom_seem_to_do_wrong_is_taken_back(tmp_path: Path, pair: Pair) -> None:
    assert [bool(why) for why in reports(pair, tmp_path, average_weights_seldom, "plain", 0.01)][-1:] == [False]


@pytest.mark.parametrize(
    ("sync", "kind"),
    [
        (average_gradients, "plain"),
        (sync_nothing, "ddp"),
        (sync_nothing, "fsdp"),
        (sync_nothing, "pipeline"),
        (sync_nothing, "evaluation"),
    ],
)
def test_ranks_that_train_one_model_are_accused_of_nothing(
    tmp_path: Path, pair: Pair, sync: Callable[[nn.Module, int], None], kind: str
) -> None:
    assert reports(pair, tmp_path, sync, kind, 0.01) == []
