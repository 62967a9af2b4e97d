"""Every kind of state comes back bit for bit, on as many ranks or on others, whatever strategy saved it."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.object_states import (
    ALONE,
    TOGETHER,
    WIDTH,
    Counter,
    Objects,
    differing,
    make_loader,
    network,
    save_as,
    states,
)
from helpers.ranks import Attempt, Pair, alone
from helpers.rare import rare
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn.parallel import DistributedDataParallel

from slurmtrain.errors import CheckpointError
from slurmtrain.runtime.checkpoint.state_dicts import Attributes
from slurmtrain.runtime.job.process_group import RankGroup


def round_trip(ranks: RankGroup, root: Path, make: str) -> list[str]:
    """In what a set of objects differs, after restoring, from the one that was saved."""
    makers = {**ALONE, **TOGETHER}
    first = makers[make](0, ranks)
    with Attempt(root, ranks, first) as attempt:
        expected = states(first)
        assert attempt.save(1) == ""
        assert differing(expected, states(first)) == [], "saving has changed the state"
    second = makers[make](1, ranks)
    assert differing(expected, states(second)) != [], "the test is of no use"
    with Attempt(root, ranks, second, restart=1) as attempt:
        restored = attempt.restore()
        assert restored is not None
        assert (restored.step, restored.lost_steps, restored.rederived) == (1, 0, ())
        return differing(expected, states(second))


@pytest.mark.parametrize("make", ALONE)
def test_a_state_comes_back_bit_for_bit(tmp_path: Path, make: str) -> None:
    assert round_trip(alone(), tmp_path, make) == []


@pytest.mark.parametrize("make", TOGETHER)
def test_a_state_comes_back_bit_for_bit_on_two_ranks(tmp_path: Path, pair: Pair, make: str) -> None:
    assert list(pair.run(round_trip, tmp_path, make)) == [[], []]


# --- other strategies, other numbers of ranks -------------------------------------------------------------------------


def restore_as(ranks: RankGroup, root: Path, make: str) -> tuple[dict[str, Any], tuple[str, ...]]:
    objects = {**ALONE, **TOGETHER}[make](1, ranks)
    with Attempt(root, ranks, objects, restart=1) as attempt:
        restored = attempt.restore()
        assert restored is not None
        return states(objects), restored.rederived


@pytest.mark.parametrize(
    ("saved", "restored"),
    [
        ("ddp", "fsdp"),
        ("fsdp", "unwrapped"),
        *(pytest.param(*each, marks=rare) for each in (("fsdp", "ddp"), ("plain", "fsdp"))),
    ],
)
def test_what_one_strategy_has_saved_another_restores(tmp_path: Path, pair: Pair, saved: str, restored: str) -> None:
    [before, _] = pair.run(save_as, tmp_path, saved)
    before.pop("scheduler", None)
    for after, rederived in pair.run(restore_as, tmp_path, restored):
        assert differing(before, after) == []
        assert rederived == ()


@pytest.mark.parametrize("saved", ["uneven_fsdp", *(pytest.param(name, marks=rare) for name in ("fsdp", "ddp"))])
def test_what_two_ranks_have_saved_one_restores(tmp_path: Path, pair: Pair, saved: str) -> None:
    [before, _] = pair.run(save_as, tmp_path, saved)
    objects = _without_wrapping(saved)
    with Attempt(tmp_path, alone(), objects, restart=1) as attempt:
        restored = attempt.restore()
        assert restored is not None
        assert restored.rederived == ("rng",)
        assert differing(before, states(objects)) == []


def _without_wrapping(saved: str) -> Objects:
    layers = (nn.Linear(WIDTH, 7), nn.Linear(7, 1), nn.Linear(1, WIDTH)) if saved == "uneven_fsdp" else ()
    model = network(1, *layers)
    if saved == "uneven_fsdp":
        return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), momentum=0.5)}
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}


class Resharding(Counter):
    """An object that knows what becomes of it on another number of ranks."""

    def reshard_state_dict(self, states: list[Any], rank: int, world_size: int) -> None:
        self.state = [states, rank, world_size]


def save_own(ranks: RankGroup, root: Path) -> None:
    own, same = Counter({"seen": ranks.rank, "t": torch.tensor([ranks.rank])}), Counter({"t": torch.arange(3)})
    with Attempt(root, ranks, {"own": own, "same": same, "knowing": Resharding(ranks.rank)}) as attempt:
        assert attempt.save(1) == ""


def test_what_each_rank_has_of_its_own_is_carried_over_where_that_can_be_done(tmp_path: Path, pair: Pair) -> None:
    pair.run(save_own, tmp_path)
    own, same, knowing = Counter("as it was"), Counter(None), Resharding(None)
    with Attempt(tmp_path, alone(), {"own": own, "same": same, "knowing": knowing}, restart=1) as attempt:
        restored = attempt.restore()
        assert restored is not None
        assert restored.rng is None
        assert restored.rederived == ("rng", "own")
        assert attempt.events("restored")[0]["rederived"] == ["rng", "own"]
    assert own.state == "as it was"
    assert torch.equal(same.state["t"], torch.arange(3))
    assert knowing.state == [[0, 1], 0, 1]


# --- random numbers and data ------------------------------------------------------------------------------------------


def draw_again(ranks: RankGroup, root: Path) -> tuple[list[float], list[float]]:
    import random

    import numpy as np

    from slurmtrain.runtime.checkpoint import rng

    def draw() -> list[float]:
        return [random.random(), float(np.random.rand()), float(torch.rand(())), random.gauss(0, 1)]

    torch.manual_seed(ranks.rank)
    random.seed(ranks.rank)
    np.random.seed(ranks.rank)
    draw()
    with Attempt(root, ranks, {"model": network(0)}) as attempt:
        torch.manual_seed(100 + ranks.rank)
        assert attempt.save(1) == ""
    expected = draw()
    with Attempt(root, ranks, {"model": network(1)}, restart=1) as attempt:
        restored = attempt.restore()
        assert restored is not None
        assert restored.rng is not None
        rng.restore(restored.rng, ranks.device)
    return expected, draw()


def test_every_rank_draws_the_same_random_numbers_again(tmp_path: Path, pair: Pair) -> None:
    (first, again), (other, other_again) = pair.run(draw_again, tmp_path)
    assert first == again
    assert other == other_again
    assert not set(first) & set(other)


@pytest.mark.parametrize("workers", [0, 2])
def test_data_goes_on_where_it_was(tmp_path: Path, workers: int) -> None:
    loader = make_loader(0, workers)
    iterator = iter(loader)
    before = [next(iterator).tolist() for _ in range(5)]
    with Attempt(tmp_path, alone(), {"loader": loader}) as attempt:
        assert attempt.save(1) == ""
    rest = [batch.tolist() for batch in iterator]
    assert sorted(number for batch in before + rest for number in batch) == list(range(64))
    again = make_loader(1, workers)
    with Attempt(tmp_path, alone(), {"loader": again}, restart=1) as attempt:
        assert attempt.restore() is not None
    assert [batch.tolist() for batch in again] == rest


# --- objects without a state_dict -------------------------------------------------------------------------------------


# Together the two layers take more than the first bucket of gradients may have, in MB.
SMALL_BUCKETS = 0.001
STEPS, SAVED_AT = 10, 6


def waiting_hook(state: PowerSGDState, bucket: Any) -> torch.futures.Future[torch.Tensor]:
    """PowerSGD that is finished when it returns: with several buckets, its callbacks would wait for each other."""
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(powerSGD_hook(state, bucket).wait())
    return future


# Torch looks at annotations, which are strings here.
waiting_hook.__annotations__.clear()


class Compressed:
    """Training with PowerSGD, with one bucket of gradients or with several."""

    def __init__(self, seed: int, *, several: bool) -> None:
        torch.manual_seed(seed)
        size = {"bucket_cap_mb": SMALL_BUCKETS} if several else {}
        model = nn.Sequential(nn.Linear(16, 32, bias=False), nn.Tanh(), nn.Linear(32, 16, bias=False))
        self.model = DistributedDataParallel(model, **size)
        self.hook = PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2, min_compression_rate=0.5)
        self.model.register_comm_hook(self.hook, waiting_hook if several else powerSGD_hook)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)

    @property
    def objects(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "hook": self.hook}

    def train(self, rank: int, first: int, last: int) -> None:
        for step in range(first, last):
            batch = torch.randn(4, 16, generator=torch.Generator().manual_seed(100 * step + rank))
            self.optimizer.zero_grad()
            self.model(batch).square().mean().backward()
            self.optimizer.step()

    def weights(self) -> list[Any]:
        return [parameter.tolist() for parameter in self.model.parameters()]

    def errors(self) -> list[Any]:
        return [self.hook.error_dict[bucket].tolist() for bucket in sorted(self.hook.error_dict)]


def interrupted(ranks: RankGroup, root: Path, several: bool) -> dict[str, Any]:
    """What is saved and restored, and the weights of a run that is interrupted and of one that is not.

    Both compress nothing in one step.
    """
    first = Compressed(1, several=several)
    with Attempt(root, ranks, first.objects) as attempt:
        first.train(ranks.rank, 0, SAVED_AT)
        assert attempt.save(SAVED_AT) == ""
    saved = first.errors()
    first.hook.iter = first.hook.start_powerSGD_iter - 1
    first.train(ranks.rank, SAVED_AT, STEPS)
    second = Compressed(2, several=several)
    with Attempt(root, ranks, second.objects, restart=1) as attempt:
        assert attempt.restore() is not None
    restored = second.errors()
    second.train(ranks.rank, SAVED_AT, STEPS)
    assert second.hook.iter == first.hook.iter
    return {"errors": [saved, restored], "weights": [first.weights(), second.weights()]}


@pytest.mark.parametrize("several", [False, True], ids=["one_bucket", "several_buckets"])
def test_powersgd_continues_with_the_errors_of_each_rank_after_a_step_without_compression(
    tmp_path: Path, pair: Pair, several: bool
) -> None:
    results = pair.run(interrupted, tmp_path, several)
    for result in results:
        saved, restored = result["errors"]
        assert len(saved) > 1 if several else len(saved) == 1
        assert restored == saved
        undisturbed, resumed = result["weights"]
        assert resumed == undisturbed
    assert results[0]["errors"] != results[1]["errors"], "each rank has its own"


def average_locally(ranks: RankGroup, root: Path) -> list[Any]:
    """What torch's optimizer for local SGD has, and the momenta, when saved and when restored."""
    results = []
    for restart in (0, 1):
        torch.manual_seed(restart)
        model = nn.Linear(4, 4)
        averager = PeriodicModelAverager(period=3, warmup_steps=5)
        optimizer = PostLocalSGDOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), averager)
        with Attempt(root, ranks, {"model": model, "optimizer": optimizer}, restart=restart) as attempt:
            if restart:
                assert attempt.restore() is not None
            else:
                for _ in range(7):
                    optimizer.zero_grad()
                    model(torch.ones(1, 4) + 0.01 * ranks.rank).square().sum().backward()
                    optimizer.step()
                assert attempt.save(7) == ""
        momenta = [optimizer.state[parameter]["momentum_buffer"].tolist() for parameter in model.parameters()]
        results.append([averager.step, momenta])
    return results


def test_the_step_of_torchs_optimizer_for_local_sgd_comes_back(tmp_path: Path, pair: Pair) -> None:
    [(saved, restored), _] = pair.run(average_locally, tmp_path)
    assert restored[0] == saved[0] == 7
    assert len(restored[1]) == 2


# --- other objects ----------------------------------------------------------------------------------------------------


class Averager:
    """An object of a script's own, with everything that can be saved."""

    def __init__(self, seed: int) -> None:
        self.step = seed
        self.rate = 0.5 * seed
        self.name = f"n{seed}"
        self.sums = {"a": torch.full((2,), float(seed)), "b": [torch.ones(1) * seed, None, True]}
        self.pair = (seed, 2 * seed)
        self.array = np.arange(3) * seed
        self.generator = np.random.RandomState(seed)


class Slots:
    __slots__ = ("count", "unset")

    def __init__(self, count: int) -> None:
        self.count = count


class OwnMethods:
    """It says itself what its state is."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {"doubled": 2 * self.total}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.total = state["doubled"] // 2


def test_all_attributes_of_an_object_come_back(tmp_path: Path) -> None:
    first = {
        "averager": Averager(3),
        "slots": Slots(4),
        "methods": OwnMethods(5),
        "local": PostLocalSGDState(None, None, 7),
    }
    first["local"].iter = 9
    drawn = np.random.RandomState(3).rand(2)
    with Attempt(tmp_path, alone(), first) as attempt:
        assert attempt.save(1) == ""
    second: dict[str, Any] = {
        "averager": Averager(1), "slots": Slots(1), "methods": OwnMethods(1), "local": PostLocalSGDState(None, None, 1),
    }  # fmt: skip
    with Attempt(tmp_path, alone(), second, restart=1) as attempt:
        assert attempt.restore() is not None
    averager = second["averager"]
    assert (averager.step, averager.rate, averager.name, averager.pair) == (3, 1.5, "n3", (3, 6))
    assert averager.sums["a"].tolist() == [3.0, 3.0]
    assert averager.sums["b"] == [torch.tensor([3.0]), None, True]
    assert averager.array.tolist() == [0, 3, 6]
    assert averager.generator.rand(2).tolist() == drawn.tolist()
    assert (second["slots"].count, second["methods"].total) == (4, 5)
    assert (second["local"].iter, second["local"].start_localSGD_iter) == (9, 7)


class Unusable:
    def __init__(self) -> None:
        self.steps = {"done": [lambda: None]}


@pytest.mark.parametrize(
    ("obj", "problem"),
    [
        (object(), "'obj' (object) cannot be saved: it has neither"),
        ({"a": 1}, "'obj' (dict) cannot be saved: it has neither"),
        (7, "'obj' (int) cannot be saved"),
        (Unusable(), "its attribute steps['done'][0] (function) is neither a tensor nor a plain value"),
        (
            threading.Thread(),
            "'obj' (Thread) has no state_dict() and load_state_dict(), and its attribute",
        ),
    ],
)
def test_what_has_no_state_that_can_be_saved_is_refused_when_it_is_registered(
    tmp_path: Path, obj: Any, problem: str
) -> None:
    with pytest.raises(TypeError) as raised:
        Attempt(tmp_path, alone(), {"obj": obj})
    assert problem in str(raised.value)


def test_tensors_go_back_to_the_kind_of_device_that_they_were_on() -> None:
    holder = Slots(0)
    holder.unset = torch.empty(2, device="meta")
    state = Attributes("holder", holder).state_dict()
    Attributes("holder", holder).load_state_dict({**state, "count": 5})
    assert (holder.unset.device.type, holder.count) == ("meta", 5)


# --- states that would be lost ----------------------------------------------------------------------------------------


class Wrapper(torch.optim.Optimizer):
    """An optimizer that keeps its state in one inside."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__([{"params": inner.param_groups[0]["params"]}], {})
        self.inner = inner

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)


class Empty:
    def __init__(self) -> None:
        self.average = [torch.ones(2)]

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError


@pytest.mark.parametrize("registered", [True, False])
def test_an_optimizer_whose_state_is_in_another_one_is_refused_when_saving(tmp_path: Path, registered: bool) -> None:
    model = nn.Linear(2, 2)
    wrapper = Wrapper(torch.optim.AdamW(model.parameters()))
    model(torch.ones(1, 2)).sum().backward()
    wrapper.step()
    objects = {"model": model, "optimizer": wrapper} if registered else {"optimizer": wrapper}
    with Attempt(tmp_path, alone(), objects) as attempt, pytest.raises(CheckpointError) as raised:
        attempt.save(1)
    expected = "'optimizer' (Wrapper) has an empty state, although its attribute 'inner' (AdamW) has one"
    assert expected in str(raised.value)


def test_an_object_with_tensors_and_an_empty_state_is_refused_when_saving(tmp_path: Path) -> None:
    with Attempt(tmp_path, alone(), {"average": Empty()}) as attempt, pytest.raises(CheckpointError) as raised:
        attempt.save(1)
    assert "'average' (Empty) has an empty state, although its attribute 'average' (list) has one" in str(raised.value)
