"""Objects to save, created from a seed so that two seeds differ in every value, and comparisons of their states.

``ALONE`` and ``TOGETHER`` name the functions that create the objects of a single rank, and of each of two ranks.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torchdata.stateful_dataloader import StatefulDataLoader

from helpers.ranks import Attempt
from helpers.rare import drawn
from slurmtrain.runtime.job.process_group import RankGroup

Objects = dict[str, Any]
Make = Callable[[int, RankGroup], Objects]
WIDTH = 6


def network(seed: int, *layers: nn.Module) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(*(layers or (nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH))))


def randomize(module: nn.Module) -> None:
    with torch.no_grad():
        for value in [*module.parameters(), *module.buffers()]:
            if value.is_floating_point():
                value.copy_(torch.randn(value.shape))


def train(model: nn.Module, *optimizers: torch.optim.Optimizer, steps: int = 2) -> None:
    for _ in range(steps):
        # The same on all ranks.
        model(torch.randn(4, WIDTH)).square().sum().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def plain(seed: int, ranks: RankGroup) -> Objects:
    model = network(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 * (seed + 1))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1 + seed)
    train(model, optimizer, steps=seed + 1)
    scheduler.step()
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler}


def unwrapped(seed: int, ranks: RankGroup) -> Objects:
    """Without any strategy, and without a scheduler."""
    objects = plain(seed, ranks)
    del objects["scheduler"]
    return objects


def ddp(seed: int, ranks: RankGroup) -> Objects:
    model = nn.parallel.DistributedDataParallel(network(seed))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 * (seed + 1))
    train(model, optimizer, steps=seed + 1)
    return {"model": model, "optimizer": optimizer}


def fsdp(seed: int, ranks: RankGroup) -> Objects:
    model = network(seed)
    for layer in (model[0], model[2]):
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 * (seed + 1))
    train(model, optimizer, steps=seed + 1)
    return {"model": model, "optimizer": optimizer}


def uneven_fsdp(seed: int, ranks: RankGroup) -> Objects:
    """Parameters of which a rank gets a smaller share than the others, or nothing."""
    model = fully_shard(network(seed, nn.Linear(WIDTH, 7), nn.Linear(7, 1), nn.Linear(1, WIDTH)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    train(model, optimizer)
    return {"model": model, "optimizer": optimizer}


class Compiled(nn.Module):
    """What torch.compile returns, without the seconds of compilation at its first use."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._orig_mod = module


def compiled(seed: int, ranks: RankGroup) -> Objects:
    return {"model": Compiled(network(seed))}


def frozen(seed: int, ranks: RankGroup) -> Objects:
    model = network(seed)
    model[0].requires_grad_(requires_grad=False)
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer)
    return {"model": model, "optimizer": optimizer}


def without_gradients(seed: int, ranks: RankGroup) -> Objects:
    """A parameter that training has not used yet, like that of an expert in a mixture."""
    model = nn.ModuleDict({"used": network(seed), "unused": nn.Linear(3, 3)})
    randomize(model["unused"])
    optimizer = torch.optim.AdamW(model.parameters())
    train(model["used"], optimizer)
    return {"model": model, "optimizer": optimizer}


def before_the_first_step(seed: int, ranks: RankGroup) -> Objects:
    model = network(seed)
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=0.1 * (seed + 1))}


def tied(seed: int, ranks: RankGroup) -> Objects:
    model = network(seed, nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    model[1].weight = model[0].weight
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer)
    return {"model": model, "optimizer": optimizer}


def two_modules(seed: int, ranks: RankGroup) -> Objects:
    """One optimizer over both, with its own groups, one of them added later."""
    encoder, decoder = network(seed), network(seed + 10)
    optimizer = torch.optim.AdamW(encoder.parameters(), lr=0.1)
    optimizer.add_param_group({"params": decoder[0].parameters(), "lr": 0.01 * (seed + 1), "betas": (0.8, 0.9)})
    optimizer.add_param_group({"params": [*decoder[1].parameters(), *decoder[2].parameters()], "weight_decay": 0.5})
    train(nn.Sequential(encoder, decoder), optimizer)
    return {"encoder": encoder, "decoder": decoder, "optimizer": optimizer}


def two_optimizers(seed: int, ranks: RankGroup) -> Objects:
    generator, critic = network(seed), network(seed + 10)
    adam = torch.optim.AdamW(generator.parameters(), lr=0.1)
    sgd = torch.optim.SGD(critic.parameters(), lr=0.1, momentum=0.9)
    train(nn.Sequential(generator, critic), adam, sgd)
    return {"generator": generator, "critic": critic, "g_opt": adam, "c_opt": sgd}


class WithExtraState(nn.Module):
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
    return {"model": nn.ModuleList(WithExtraState(extra) for extra in extras)}


def odd_buffers(seed: int, ranks: RankGroup) -> Objects:
    """Tensors that are non-contiguous, lazily conjugated or negated, sparse, empty, 0-dimensional, or with odd NaNs."""
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


def with_optimizer(kind: type[torch.optim.Optimizer], **more: Any) -> Make:
    def make(seed: int, ranks: RankGroup) -> Objects:
        model = network(seed)
        optimizer = kind(model.parameters(), lr=0.01 * (seed + 1), **more)
        train(model, optimizer)
        return {"model": model, "optimizer": optimizer}

    return make


def lbfgs(seed: int, ranks: RankGroup) -> Objects:
    torch.manual_seed(seed)  # all ranks alike: its only layer is made before network() seeds
    model = network(seed, nn.Linear(WIDTH, 2))
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
    model = network(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    scaler.scale(model(torch.randn(4, WIDTH)).square().sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    return {"model": model, "optimizer": optimizer, "scaler": scaler}


def schedulers(seed: int, ranks: RankGroup) -> Objects:
    model = network(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=3)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    both = torch.optim.lr_scheduler.SequentialLR(optimizer, [warmup, cosine], milestones=[3])
    for _ in range(2 + 3 * seed):
        train(model, optimizer, steps=1)
        both.step()
    return {"model": model, "optimizer": optimizer, "scheduler": both}


class Counter:
    """An object defined by a script."""

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


class Numbers(torch.utils.data.Dataset[int]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> int:
        return index


def make_loader(seed: int, workers: int = 0) -> Any:
    torch.manual_seed(seed)
    return StatefulDataLoader(Numbers(), batch_size=4, shuffle=True, num_workers=workers)


ALONE: dict[str, Make] = {
    make.__name__: make
    for make in (plain, compiled, frozen, without_gradients, before_the_first_step, tied, two_modules, two_optimizers,
                 extra_state, odd_buffers, all_dtypes, lbfgs, of_unregistered_parameters, grad_scaler, schedulers,
                 generic)
}  # fmt: skip
OPTIMIZERS: dict[str, Make] = {
    "sgd": with_optimizer(torch.optim.SGD),
    "sgd_with_momentum": with_optimizer(torch.optim.SGD, momentum=0.9),
    "adagrad": with_optimizer(torch.optim.Adagrad),
    "adamax": with_optimizer(torch.optim.Adamax),
    "adafactor": with_optimizer(torch.optim.Adafactor),
    "rmsprop": with_optimizer(torch.optim.RMSprop, centered=True, momentum=0.5),
    "amsgrad": with_optimizer(torch.optim.Adam, amsgrad=True),
    "capturable": with_optimizer(torch.optim.AdamW, foreach=False),
    "nadam": with_optimizer(torch.optim.NAdam),
}
# The state of each optimizer is saved in the same way.
ALONE |= {name: OPTIMIZERS[name] for name in drawn([*OPTIMIZERS], 3)}
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


def raw(value: torch.Tensor) -> tuple[Any, ...]:
    """A comparable form of a tensor, even with NaNs: type, shape and bytes."""
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
    """The states that the objects themselves report."""
    inner = {name: getattr(obj, "module", obj) if isinstance(obj, nn.parallel.DistributedDataParallel) else obj
             for name, obj in objects.items()}  # fmt: skip
    return {name: comparable(obj.state_dict()) for name, obj in inner.items()}


def differing(first: Any, second: Any, name: str = "") -> list[str]:
    """Where two states differ, by name."""
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        pairs = {key: (first.get(key, "missing"), second.get(key, "missing")) for key in [*first, *second]}
    elif isinstance(first, list) and isinstance(second, list) and len(first) == len(second):
        pairs = dict(enumerate(zip(first, second, strict=True)))
    else:
        return [] if first == second else [f"{name}: {first!r:.100} != {second!r:.100}"]
    return [difference for key, pair in pairs.items() for difference in differing(*pair, f"{name}/{key}")]


def save_as(ranks: RankGroup, root: Path, make: str) -> dict[str, Any]:
    """Save the objects that ``make`` names; return their states."""
    objects = {**ALONE, **TOGETHER}[make](0, ranks)
    with Attempt(root, ranks, objects) as attempt:
        assert attempt.save(1) == ""
        return states(objects)
