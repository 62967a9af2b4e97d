"""What a step takes of a rank's own time."""

from __future__ import annotations

import copy
import json
import pickle
import time
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
from slurmtrain.runtime.training.module_watch import StepTime, SynchronyWatch, target_of
from slurmtrain.system.journal import Journal

CPU = torch.device("cpu")


class Clock:
    """A clock that is moved by hand."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time, "perf_counter", clock)
    return clock


class Slow(nn.Module):
    """A model whose forward pass takes this many seconds."""

    def __init__(self, clock: Clock, seconds: float) -> None:
        super().__init__()
        self.clock = clock
        self.seconds = seconds

    def forward(self) -> None:
        self.clock.now += self.seconds


def step(own: StepTime, clock: Clock, *parts: Callable[[], None] | float) -> None:
    own.begin()
    for part in parts:
        if isinstance(part, float):
            clock.now += part
        else:
            part()
    own.end()


def test_loading_and_the_first_forward_pass_are_a_ranks_own_time(clock: Clock) -> None:
    own, model = StepTime(CPU), Slow(clock, 2.0)
    own.watch([object(), model])
    step(own, clock, 1.0, model, 5.0, model, 7.0)
    assert own.s == 0, "a step's own time is known when the next begins"
    own.begin()
    assert own.s == 3.0


def test_only_a_step_that_is_measured_finds_hooks_on_the_model(clock: Clock) -> None:
    own, model = StepTime(CPU), Slow(clock, 1.0)
    own.watch([model])
    assert not model._forward_hooks
    own.begin()
    assert len(model._forward_hooks) == 1
    own.end()
    assert not model._forward_hooks
    model()
    own.begin()
    assert own.s == 0, "the pass was after the step's end"


def test_a_copy_of_a_model_measures_nothing_and_needs_no_slurmtrain(clock: Clock) -> None:
    own, model = StepTime(CPU), nn.Linear(1, 1)
    own.watch([model])
    own.begin()
    clock.now += 1.0
    pickled = pickle.dumps(model)
    assert b"slurmtrain" not in pickled
    for other in (copy.deepcopy(model), pickle.loads(pickled)):
        other(torch.zeros(1))
    own.begin()
    assert own.s == 0


def test_inside_a_compiled_function_nothing_is_measured(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    own, model = StepTime(CPU), Slow(clock, 1.0)
    own.watch([model])
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    step(own, clock, model)
    own.begin()
    assert own.s == 0


class Event:
    """An event of a GPU that is as far as the test says; it passes when the GPU comes to what was recorded."""

    passed = False
    gpu = 0.0

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing
        self.at = 0.0

    def record(self, _stream: object) -> None:
        self.at = Event.gpu

    def query(self) -> bool:
        return Event.passed

    def elapsed_time(self, end: Event) -> float:
        return (end.at - self.at) * 1e3


def test_on_a_gpu_a_time_is_taken_once_it_is_known_and_never_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: device)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    own, model = StepTime(torch.device("cuda", 0)), nn.Identity()
    own.watch([model])
    for passed, gpu, own_s in [(False, 1.0, 0.0), (False, 5.0, 0.0), (False, 6.0, 0.0), (True, 7.0, 1.0)]:
        Event.passed = passed
        own.begin()
        assert own.s == own_s
        Event.gpu = gpu
        model(0)
        Event.gpu += 0.5
        model(0)


def test_models_whose_forward_pass_waits_for_others_are_left_alone() -> None:
    class FSDPModule(nn.Module):
        """What ``fully_shard`` makes of a module has such a base."""

    plain = nn.Sequential(nn.Linear(1, 1))
    assert target_of(plain) is plain
    assert target_of(nn.Sequential(nn.SyncBatchNorm(1))) is None
    assert target_of(nn.Sequential(FSDPModule())) is None
    compiled_in_place = nn.Linear(1, 1)
    compiled_in_place._compiled_call_impl = lambda *_: None
    assert target_of(compiled_in_place) is None


# --- ranks that train models of their own -----------------------------------------------------------------------------


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
