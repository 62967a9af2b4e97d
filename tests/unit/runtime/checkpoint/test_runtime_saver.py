"""Saving and restoring: every kind of state comes back bit for bit, on one rank and on two, and as plain torch's."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from helpers.ranks import Attempt, Pair, alone, listed
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torchdata.stateful_dataloader import StatefulDataLoader

from slurmtrain.errors import CheckpointError
from slurmtrain.runtime.checkpoint import files
from slurmtrain.runtime.checkpoint.index import Index
from slurmtrain.runtime.checkpoint.shard_plan import Sharding
from slurmtrain.runtime.job.process_group import RankGroup

Objects = dict[str, Any]
Make = Callable[[int, RankGroup], Objects]
WIDTH = 6


# --- states to save: each made from a seed, so that those of two seeds differ in everything ---------------------------


def _net(seed: int, *layers: nn.Module) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(*(layers or (nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH))))


def _randomize(module: nn.Module) -> None:
    with torch.no_grad():
        for value in [*module.parameters(), *module.buffers()]:
            if value.is_floating_point():
                value.copy_(torch.randn(value.shape))


def _train(model: nn.Module, *optimizers: torch.optim.Optimizer, steps: int = 2) -> None:
    for _ in range(steps):
        # The same on all ranks.
        model(torch.randn(4, WIDTH)).square().sum().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def plain(seed: int, ranks: RankGroup) -> Objects:
    model = _net(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 * (seed + 1))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1 + seed)
    _train(model, optimizer, steps=seed + 1)
    scheduler.step()
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler}


def unwrapped(seed: int, ranks: RankGroup) -> Objects:
    """Without any strategy, and without a scheduler."""
    objects = plain(seed, ranks)
    del objects["scheduler"]
    return objects


def ddp(seed: int, ranks: RankGroup) -> Objects:
    model = nn.parallel.DistributedDataParallel(_net(seed))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 * (seed + 1))
    _train(model, optimizer, steps=seed + 1)
    return {"model": model, "optimizer": optimizer}


def fsdp(seed: int, ranks: RankGroup) -> Objects:
    model = _net(seed)
    for layer in (model[0], model[2]):
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 * (seed + 1))
    _train(model, optimizer, steps=seed + 1)
    return {"model": model, "optimizer": optimizer}


def uneven_fsdp(seed: int, ranks: RankGroup) -> Objects:
    """Parameters that leave a rank with less than the others, or with nothing."""
    model = fully_shard(_net(seed, nn.Linear(WIDTH, 7), nn.Linear(7, 1), nn.Linear(1, WIDTH)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    _train(model, optimizer)
    return {"model": model, "optimizer": optimizer}


class _Compiled(nn.Module):
    """What torch.compile gives, without the seconds that its first use takes."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._orig_mod = module


def compiled(seed: int, ranks: RankGroup) -> Objects:
    return {"model": _Compiled(_net(seed))}


def frozen(seed: int, ranks: RankGroup) -> Objects:
    model = _net(seed)
    model[0].requires_grad_(requires_grad=False)
    optimizer = torch.optim.AdamW(model.parameters())
    _train(model, optimizer)
    return {"model": model, "optimizer": optimizer}


def without_gradients(seed: int, ranks: RankGroup) -> Objects:
    """A parameter that training has not used so far, as of a mixture's expert."""
    model = nn.ModuleDict({"used": _net(seed), "unused": nn.Linear(3, 3)})
    _randomize(model["unused"])
    optimizer = torch.optim.AdamW(model.parameters())
    _train(model["used"], optimizer)
    return {"model": model, "optimizer": optimizer}


def before_the_first_step(seed: int, ranks: RankGroup) -> Objects:
    model = _net(seed)
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=0.1 * (seed + 1))}


def tied(seed: int, ranks: RankGroup) -> Objects:
    model = _net(seed, nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    model[1].weight = model[0].weight
    optimizer = torch.optim.AdamW(model.parameters())
    _train(model, optimizer)
    return {"model": model, "optimizer": optimizer}


def two_modules(seed: int, ranks: RankGroup) -> Objects:
    """One optimizer over both, with groups of its own, one of them made later."""
    encoder, decoder = _net(seed), _net(seed + 10)
    optimizer = torch.optim.AdamW(encoder.parameters(), lr=0.1)
    optimizer.add_param_group({"params": decoder[0].parameters(), "lr": 0.01 * (seed + 1), "betas": (0.8, 0.9)})
    optimizer.add_param_group({"params": [*decoder[1].parameters(), *decoder[2].parameters()], "weight_decay": 0.5})
    _train(nn.Sequential(encoder, decoder), optimizer)
    return {"encoder": encoder, "decoder": decoder, "optimizer": optimizer}


def two_optimizers(seed: int, ranks: RankGroup) -> Objects:
    generator, critic = _net(seed), _net(seed + 10)
    one = torch.optim.AdamW(generator.parameters(), lr=0.1)
    other = torch.optim.SGD(critic.parameters(), lr=0.1, momentum=0.9)
    _train(nn.Sequential(generator, critic), one, other)
    return {"generator": generator, "critic": critic, "g_opt": one, "c_opt": other}


class _WithExtra(nn.Module):
    def __init__(self, extra: Any) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.extra = extra

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


def extra_state(seed: int, ranks: RankGroup) -> Objects:
    torch.manual_seed(seed)
    extras = [{"count": seed, "at": [1.5, None, "x"]}, torch.randn(3), (seed, "y")]
    return {"model": nn.ModuleList(_WithExtra(extra) for extra in extras)}


def odd_buffers(seed: int, ranks: RankGroup) -> Objects:
    """Not contiguous, lazily conjugated or negated, sparse, empty, without dimensions, with odd NaN."""
    torch.manual_seed(seed)
    model = nn.Module()
    model.register_parameter("transposed", nn.Parameter(torch.randn(4, 5).t()))
    model.register_buffer("strided", torch.randn(10)[::3])
    model.register_buffer("channels_last", torch.randn(2, 3, 4, 4).contiguous(memory_format=torch.channels_last))
    model.register_buffer("view", torch.randn(100)[50:53])
    model.register_buffer("conjugated", torch.randn(3, dtype=torch.complex64).conj())
    model.register_buffer("negated", torch.randn(3, dtype=torch.complex64).conj().imag)
    model.register_buffer("empty", torch.randn(0, 7))
    model.register_buffer("scalar", torch.randn(()))
    bits = torch.tensor([0x7FC00001 + seed, 0x7F800000, -1], dtype=torch.int32)
    model.register_buffer("nan", bits.view(torch.float32))
    model.register_buffer("sparse", (torch.eye(4) * (seed + 1)).to_sparse())
    model.register_buffer("temporary", torch.randn(2), persistent=False)
    return {"model": model}


DTYPES = [
    *(torch.bool, torch.uint8, torch.int8, torch.uint16, torch.int16, torch.uint32, torch.int32, torch.uint64),
    *(torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex32, torch.complex64),
    *(torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e8m0fnu),
]


def all_dtypes(seed: int, ranks: RankGroup) -> Objects:
    torch.manual_seed(seed)
    model = nn.Module()
    for dtype in DTYPES:
        raw = torch.randint(0, 2 if dtype is torch.bool else 256, (5 * dtype.itemsize,), dtype=torch.uint8)
        model.register_buffer(f"of_{str(dtype).removeprefix('torch.')}", raw.view(dtype))
    return {"model": model}


def _of(kind: type[torch.optim.Optimizer], **more: Any) -> Make:
    def make(seed: int, ranks: RankGroup) -> Objects:
        model = _net(seed)
        optimizer = kind(model.parameters(), lr=0.01 * (seed + 1), **more)
        _train(model, optimizer)
        return {"model": model, "optimizer": optimizer}

    return make


def lbfgs(seed: int, ranks: RankGroup) -> Objects:
    model = _net(seed, nn.Linear(WIDTH, 2))
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    data = torch.randn(8, WIDTH)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(data).square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    return {"model": model, "optimizer": optimizer}


def of_unregistered_parameters(seed: int, ranks: RankGroup) -> Objects:
    torch.manual_seed(seed)
    parameter = nn.Parameter(torch.randn(3))
    optimizer = torch.optim.AdamW([parameter])
    parameter.square().sum().backward()
    optimizer.step()
    return {"optimizer": optimizer}


def grad_scaler(seed: int, ranks: RankGroup) -> Objects:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** (4 + seed))
    model = _net(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    scaler.scale(model(torch.randn(4, WIDTH)).square().sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    return {"model": model, "optimizer": optimizer, "scaler": scaler}


def schedulers(seed: int, ranks: RankGroup) -> Objects:
    model = _net(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=3)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    both = torch.optim.lr_scheduler.SequentialLR(optimizer, [warmup, cosine], milestones=[3])
    for _ in range(2 + 3 * seed):
        _train(model, optimizer, steps=1)
        both.step()
    return {"model": model, "optimizer": optimizer, "scheduler": both}


class Counter:
    """An object of a script's own."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


def generic(seed: int, ranks: RankGroup) -> Objects:
    torch.manual_seed(seed)
    nested = {
        "epoch": seed,
        7: [1, 2.5, None, True, "x" * seed],
        "t": torch.randn(3),
        "b": b"\0\xff",
        "tuple": (1, (2,)),
    }
    return {"counter": Counter({"rank": ranks.rank, **nested}), "empty": Counter({}), "none": Counter(None)}


class _Numbers(torch.utils.data.Dataset[int]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> int:
        return index


def _loader(seed: int, workers: int = 0) -> Any:
    torch.manual_seed(seed)
    return StatefulDataLoader(_Numbers(), batch_size=4, shuffle=True, num_workers=workers)


ALONE: dict[str, Make] = {
    make.__name__: make
    for make in (plain, compiled, frozen, without_gradients, before_the_first_step, tied, two_modules, two_optimizers,
                 extra_state, odd_buffers, all_dtypes, lbfgs, of_unregistered_parameters, grad_scaler, schedulers,
                 generic)
} | {
    "sgd": _of(torch.optim.SGD),
    "sgd_with_momentum": _of(torch.optim.SGD, momentum=0.9),
    "adagrad": _of(torch.optim.Adagrad),
    "adamax": _of(torch.optim.Adamax),
    "adafactor": _of(torch.optim.Adafactor),
    "rmsprop": _of(torch.optim.RMSprop, centered=True, momentum=0.5),
    "amsgrad": _of(torch.optim.Adam, amsgrad=True),
    "capturable": _of(torch.optim.AdamW, foreach=False),
    "nadam": _of(torch.optim.NAdam),
}  # fmt: skip
TOGETHER: dict[str, Make] = {
    make.__name__: make
    for make in (
        plain,
        unwrapped,
        ddp,
        fsdp,
        uneven_fsdp,
        two_modules,
        extra_state,
        odd_buffers,
        all_dtypes,
        generic,
        lbfgs,
    )
}


# --- comparing --------------------------------------------------------------------------------------------------------


def raw(value: torch.Tensor) -> tuple[Any, ...]:
    """A tensor as it is comparable, also where it has NaN: type, shape and bytes."""
    if isinstance(value, DTensor):
        value = value.full_tensor()
    if value.layout is not torch.strided:
        value = value.to_dense()
    flat = value.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).clone()
    return value.dtype, tuple(value.shape), bytes(flat.untyped_storage().tolist())


def comparable(state: Any) -> Any:
    if isinstance(state, torch.Tensor):
        return raw(state)
    if isinstance(state, Mapping):
        return {key: comparable(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(comparable(value) for value in state)
    return copy.deepcopy(state)


def states(objects: Objects) -> dict[str, Any]:
    """The states of objects as they themselves have them."""
    inner = {name: getattr(obj, "module", obj) if isinstance(obj, nn.parallel.DistributedDataParallel) else obj
             for name, obj in objects.items()}  # fmt: skip
    return {name: comparable(obj.state_dict()) for name, obj in inner.items()}


def differing(one: Any, other: Any, name: str = "") -> list[str]:
    """Where two states differ, by name."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        keys = dict.fromkeys([*one, *other])
        return [said for key in keys
                for said in differing(one.get(key, "missing"), other.get(key, "missing"), f"{name}/{key}")]  # fmt: skip
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        return [
            said for i, (a, b) in enumerate(zip(one, other, strict=True)) for said in differing(a, b, f"{name}/{i}")
        ]
    return [] if one == other else [f"{name}: {one!r:.100} != {other!r:.100}"]


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


def save_as(ranks: RankGroup, root: Path, make: str) -> dict[str, Any]:
    objects = {**ALONE, **TOGETHER}[make](0, ranks)
    with Attempt(root, ranks, objects) as attempt:
        assert attempt.save(1) == ""
        return states(objects)


def restore_as(ranks: RankGroup, root: Path, make: str) -> tuple[dict[str, Any], tuple[str, ...]]:
    objects = {**ALONE, **TOGETHER}[make](1, ranks)
    with Attempt(root, ranks, objects, restart=1) as attempt:
        restored = attempt.restore()
        assert restored is not None
        return states(objects), restored.rederived


@pytest.mark.parametrize(
    ("saved", "restored"), [("ddp", "fsdp"), ("fsdp", "ddp"), ("plain", "fsdp"), ("fsdp", "unwrapped")]
)
def test_what_one_strategy_has_saved_another_restores(tmp_path: Path, pair: Pair, saved: str, restored: str) -> None:
    [before, _] = pair.run(save_as, tmp_path, saved)
    before.pop("scheduler", None)
    for after, rederived in pair.run(restore_as, tmp_path, restored):
        assert differing(before, after) == []
        assert rederived == ()


@pytest.mark.parametrize("saved", ["fsdp", "uneven_fsdp", "ddp"])
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
    model = _net(1, *layers)
    if saved == "uneven_fsdp":
        return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), momentum=0.5)}
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}


@pytest.mark.parametrize("restored", ["fsdp", "ddp"])
def test_what_one_rank_has_saved_two_restore(tmp_path: Path, pair: Pair, restored: str) -> None:
    objects = plain(0, alone())
    with Attempt(tmp_path, alone(), objects) as attempt:
        assert attempt.save(1) == ""
    before = states(objects)
    del before["scheduler"]
    for after, rederived in pair.run(restore_as, tmp_path, restored):
        assert differing(before, after) == []
        assert rederived == ("rng",)


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
    with Attempt(root, ranks, {"model": _net(0)}) as attempt:
        torch.manual_seed(100 + ranks.rank)
        assert attempt.save(1) == ""
    expected = draw()
    with Attempt(root, ranks, {"model": _net(1)}, restart=1) as attempt:
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
    loader = _loader(0, workers)
    iterator = iter(loader)
    seen = [next(iterator).tolist() for _ in range(5)]
    with Attempt(tmp_path, alone(), {"loader": loader}) as attempt:
        assert attempt.save(1) == ""
    rest = [batch.tolist() for batch in iterator]
    assert sorted(number for batch in seen + rest for number in batch) == list(range(64))
    again = _loader(1, workers)
    with Attempt(tmp_path, alone(), {"loader": again}, restart=1) as attempt:
        assert attempt.restore() is not None
    assert [batch.tolist() for batch in again] == rest


# --- what a save costs, and what it leaves ----------------------------------------------------------------------------


def count_plans(ranks: RankGroup, root: Path) -> list[int]:
    """How often ranks have planned after each of some saves; before the last the model has got another buffer."""
    planned = [0]
    plan = Sharding.plan

    def counting(self: Sharding, state: Mapping[str, Any]) -> None:
        planned[0] += 1
        plan(self, state)

    Sharding.plan = counting  # type: ignore[method-assign]
    try:
        objects = ddp(0, ranks)
        counts = []
        with Attempt(root, ranks, objects) as attempt:
            attempt.saver.prepare()
            for step in range(1, 5):
                if step == 4 and ranks.rank == 1:
                    objects["model"].module.register_buffer("late", torch.ones(2))
                if step == 4 and ranks.rank == 0:
                    objects["model"].module.register_buffer("late", torch.ones(2))
                _train(objects["model"], objects["optimizer"])
                assert attempt.save(step) == ""
                counts.append(planned[0])
        return counts
    finally:
        Sharding.plan = plan  # type: ignore[method-assign]


def test_ranks_plan_once_until_the_state_changes(tmp_path: Path, pair: Pair) -> None:
    assert pair.run(count_plans, tmp_path) == [[1, 1, 1, 2]] * 2


def save_wide(ranks: RankGroup, root: Path) -> None:
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
    with Attempt(root, ranks, {"model": nn.parallel.DistributedDataParallel(model)}) as attempt:
        assert attempt.save(1) == ""


def test_what_all_ranks_have_is_written_by_each_in_part(tmp_path: Path, pair: Pair) -> None:
    pair.run(save_wide, tmp_path)
    manifest = files.read_manifest(tmp_path / "checkpoints" / "step-1")
    one, other = (manifest.files[f"__{rank}_0.distcp"][0] for rank in (0, 1))
    tensors = 8 * (64 * 64 + 64) * 4
    assert abs(one - other) < 0.2 * tensors
    # Each holds, beside its tensors, what they are framed with and the state of its generators.
    assert tensors < one + other < tensors + 100_000


def save_while_training(ranks: RankGroup, root: Path) -> list[str]:
    """In what a state that was restored differs from that of when the save began, after which training went on."""
    objects = fsdp(0, ranks)
    with Attempt(root, ranks, objects) as attempt:
        expected = states(objects)
        assert attempt.begin(1) is None
        _train(objects["model"], objects["optimizer"])
        outcome = attempt.saver.finish()
        assert outcome is not None
        assert outcome.problem == ""
    again = fsdp(1, ranks)
    with Attempt(root, ranks, again, restart=1) as attempt:
        assert attempt.restore() is not None
        return differing(expected, states(again))


def test_what_training_does_during_a_save_is_not_in_it(tmp_path: Path, pair: Pair) -> None:
    assert list(pair.run(save_while_training, tmp_path)) == [[], []]


def save_by_agreement(ranks: RankGroup, root: Path) -> list[int]:
    """As a session does it: ranks agree now and then, and go on in between."""
    objects = ddp(0, ranks)
    ended = []
    with Attempt(root, ranks, objects) as attempt:
        for step in range(1, 4):
            assert attempt.begin(step) is None
            outcome = None
            while outcome is None:
                outcome = attempt.advance()
            assert outcome.problem == ""
            ended.append(outcome.step)
    return ended


def test_ranks_that_agree_now_and_then_publish_each_save(tmp_path: Path, pair: Pair) -> None:
    assert pair.run(save_by_agreement, tmp_path) == [[1, 2, 3]] * 2
    assert listed(tmp_path) == ["step-1", "step-2", "step-3"]


def test_a_manifest_says_how_a_checkpoint_came_to_be(tmp_path: Path, pair: Pair) -> None:
    pair.run(save_as, tmp_path, "fsdp")
    manifest = files.read_manifest(tmp_path / "checkpoints" / "step-1")
    assert (manifest.step, manifest.world_size, manifest.attempt, manifest.why) == (1, 2, "1.0", "steps")
    assert [dict(mesh) for mesh in manifest.mesh] == [{"names": [], "shape": [2]}]
    assert manifest.objects == {
        "model": {"kind": "module", "per_rank": False},
        "optimizer": {"kind": "optimizer", "per_rank": False},
    }
    assert sorted(manifest.files) == [".metadata", "__0_0.distcp", "__1_0.distcp"]
    assert 0 < manifest.stall_s <= manifest.seconds
    assert manifest.versions["torch"] == torch.__version__


# --- plain torch reads it ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", ["fsdp", "ddp"])
def test_plain_torch_loads_a_published_checkpoint(tmp_path: Path, pair: Pair, make: str) -> None:
    [before, _] = pair.run(save_as, tmp_path, make)
    directory = tmp_path / "checkpoints" / "step-1"
    model = _net(1)
    wanted = {f"model.{name}": value for name, value in model.state_dict().items()}
    dcp.load(wanted, storage_reader=dcp.FileSystemReader(directory), no_dist=True)
    assert differing(before["model"], comparable(model.state_dict())) == []


def test_torchs_own_converter_makes_one_file_of_a_checkpoint(tmp_path: Path, pair: Pair) -> None:
    [before, _] = pair.run(save_as, tmp_path, "fsdp")
    dcp_to_torch_save(tmp_path / "checkpoints" / "step-1", tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=True)
    found = {name.removeprefix("model."): value for name, value in loaded.items() if name.startswith("model.")}
    assert differing(before["model"], comparable(found)) == []
    assert loaded["shared"]["optimizer"]["param_groups"][0]["lr"] == 0.1
    assert sorted(name for name in loaded if name.startswith("ranks.")) == ["ranks.0", "ranks.1"]


def test_the_index_has_everything_that_is_in_the_files(tmp_path: Path) -> None:
    objects = two_modules(0, alone())
    with Attempt(tmp_path, alone(), objects) as attempt:
        assert attempt.save(1) == ""
    index = Index(tmp_path / "checkpoints" / "step-1")
    tensors = index.empty(index.shapes())
    index.read(tensors)
    expected = {f"{part}.{name}": value for part in ("encoder", "decoder")
                for name, value in objects[part].state_dict().items()}  # fmt: skip
    assert differing(comparable(expected), {name: raw(tensors[name]) for name in expected}) == []
    assert all(name.startswith("optimizer.state.") for name in tensors.keys() - expected.keys())


# --- what cannot be saved ---------------------------------------------------------------------------------------------


def save_sharded_object(ranks: RankGroup, root: Path) -> str:
    mesh = init_device_mesh("cpu", (ranks.world_size,))
    from torch.distributed.tensor import Shard, distribute_tensor

    sharded = distribute_tensor(torch.ones(4), mesh, [Shard(0)])
    with Attempt(root, ranks, {"average": Counter({"deep": [{"t": sharded}]})}) as attempt:
        with pytest.raises(CheckpointError) as error:
            attempt.begin(1)
        assert attempt.saver.step is None
    return str(error.value)


def test_an_object_with_a_sharded_tensor_is_refused_by_name(tmp_path: Path, pair: Pair) -> None:
    one, other = pair.run(save_sharded_object, tmp_path)
    assert one == other
    assert "'average' has a tensor that is sharded over ranks (DTensor)" in one
    assert "register the module too" in one
    assert listed(tmp_path) == []


@pytest.mark.parametrize("value", [object(), Path("x"), {1: [Counter]}])
def test_a_state_that_cannot_be_loaded_safely_is_refused_at_the_first_save(tmp_path: Path, value: Any) -> None:
    refused = pytest.raises(CheckpointError, match="cannot be loaded with weights_only=True")
    with Attempt(tmp_path, alone(), {"counter": Counter({"x": value})}) as attempt, refused:
        attempt.begin(1)
    assert listed(tmp_path) == []


def test_a_state_that_cannot_be_pickled_ends_the_first_save_and_says_why(tmp_path: Path) -> None:
    with (
        Attempt(tmp_path, alone(), {"counter": Counter(lambda: None)}) as attempt,
        pytest.raises(CheckpointError, match=r"holds what cannot be saved: Can't pickle"),
    ):
        attempt.save(1)
    assert listed(tmp_path) == []


@pytest.mark.parametrize("obj", [3, "text", object(), None])
def test_an_object_without_a_state_is_refused_by_name(tmp_path: Path, obj: object) -> None:
    with pytest.raises(TypeError, match=r"'thing' \(\w+\) has no state_dict\(\) and load_state_dict\(\)"):
        Attempt(tmp_path, alone(), {"thing": obj}, lease=False)


def test_where_nothing_was_ever_saved_nothing_is_restored(tmp_path: Path) -> None:
    with Attempt(tmp_path, alone(), plain(0, alone())) as attempt:
        assert attempt.restore() is None
        assert attempt.events("restored") == []


@pytest.mark.parametrize("stalls", [False, True])
def test_waiting_for_a_save_is_a_stall_only_where_training_goes_on_after_it(tmp_path: Path, stalls: bool) -> None:
    with Attempt(tmp_path, alone(), plain(0, alone())) as attempt:
        assert attempt.begin(1) is None
        begun = attempt.saver._save
        assert begun is not None
        before = begun.stall_s
        outcome = attempt.saver.finish(stalls=stalls)
    assert outcome is not None
    assert (outcome.stall_s > before) is stalls
