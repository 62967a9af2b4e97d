"""One rank of the benchmark of strategies: trains the same GPT by ``strategy`` and by hand in plain torch, in turns.

Rank 0 writes to ``--out``, for each side: the seconds of its steps, and the bytes that all ranks sent in each of its
turns, by the counters of the loopback interface. With ``--only`` one side trains alone, and its peak memory is written.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from slurmtrain.model.spec.strategy.mesh import MeshSpec

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")
RANKS_PER_NODE = 2
WIDTH, HEADS, LAYERS, CONTEXT, BATCH = 256, 8, 6, 64, 32
MICROBATCHES = 8
# A turn of so many steps ends with all ranks at the same point.
STEPS = 4
# One step: the part of the batch that is this rank's goes in.
Step = Callable[[Tensor, Tensor], object]


def experiment() -> Any:
    """The module of experiments/gpt."""
    place = importlib.util.spec_from_file_location("gpt", ROOT / "experiments" / "gpt" / "train.py")
    assert place is not None
    assert place.loader is not None
    module = importlib.util.module_from_spec(place)
    place.loader.exec_module(module)
    return module


GPT = experiment()


def new_model() -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = GPT.Gpt(WIDTH, HEADS, LAYERS, CONTEXT)
    return model


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.001)


RANK, BEGIN = 4, 2
# In MB. torch's PowerSGD may wait for itself on gloo if there are several buckets.
ONE_BUCKET = 1000

# --- by strategy ---

STRATEGIES: dict[str, dict[str, Any]] = {
    "ddp": {"name": "ddp"},
    "ddp-fp16-hook": {"name": "ddp", "hook": "fp16"},
    "zero1": {"name": "zero1"},
    "zero2": {"name": "fsdp", "reshard_after_forward": False},
    "zero3": {"name": "fsdp"},
    "offload": {"name": "fsdp", "offload": True},
    "hsdp": {"name": "hsdp"},
    "mesh": {"name": "fsdp", "mesh": MeshSpec(dp=2, tp=2)},
    "powersgd": {
        "name": "ddp",
        "hook": "powersgd",
        "matrix_approximation_rank": RANK,
        "start_powersgd_iter": BEGIN,
        "bucket_cap_mb": ONE_BUCKET,
    },
    "tensor": {"name": "tensor"},
    "pipeline": {"name": "pipeline", "microbatches": MICROBATCHES},
}


def by_strategy(name: str) -> tuple[Step, int, int]:
    """A step, and this rank's part of the batch, and of how many, as a session computes it."""
    from slurmtrain.model.spec.strategy.section import StrategySpec
    from slurmtrain.runtime.job.process_group import RankGroup
    from slurmtrain.runtime.strategies.strategy import Strategy

    ranks = RankGroup(dist.get_rank(), dist.get_world_size(), CPU)
    strategy = Strategy(StrategySpec(**STRATEGIES[name]), ranks, ranks.rank // RANKS_PER_NODE)
    model = strategy.parallelize(new_model())
    optimizer = strategy.optimizer(torch.optim.AdamW, model.parameters(), {"lr": 0.001})

    def step(text: Tensor, following: Tensor) -> None:
        strategy.forward_backward(model, GPT.loss_of, (text, following), 0, microbatches=1, divide=lambda rows: (rows,))
        optimizer.step()
        optimizer.zero_grad()

    return step, strategy.dp_rank, strategy.dp_size


# --- by hand ---


def plain_step(model: nn.Module, optimizer: Any) -> Step:
    def step(text: Tensor, following: Tensor) -> None:
        GPT.loss_of(model(text), following).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def ddp_by_hand(name: str) -> Step:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = DistributedDataParallel(new_model(), bucket_cap_mb=ONE_BUCKET if name == "powersgd" else None)
    if name == "powersgd":
        # Importing it takes NumPy, as torch's random matrices do.
        from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

        model.register_comm_hook(powerSGD_hook.PowerSGDState(None, RANK, BEGIN), powerSGD_hook.powerSGD_hook)
    if name == "ddp-fp16-hook":
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    if name == "zero1":
        return plain_step(model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.001))
    return plain_step(model, adam(model))


def fsdp_by_hand(name: str) -> Step:
    from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

    nodes = dist.get_world_size() // RANKS_PER_NODE
    shape = (nodes, RANKS_PER_NODE) if name == "hsdp" else (dist.get_world_size(),)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    model: Any = new_model()
    offload = CPUOffloadPolicy(pin_memory=False) if name == "offload" else OffloadPolicy()
    for module in (*model.blocks, *model.head, model):
        fully_shard(module, mesh=mesh, reshard_after_forward=False if name == "zero2" else None, offload_policy=offload)
    return plain_step(model, adam(model))


def tensor_by_hand(name: str) -> Step:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model: Any = new_model()
    plan = {
        "embedding.bytes": RowwiseParallel(input_layouts=Replicate()),
        "embedding.places": RowwiseParallel(input_layouts=Replicate()),
        "blocks.*.attention": ColwiseParallel(), "blocks.*.projection": RowwiseParallel(),
        "blocks.*.mlp.1": ColwiseParallel(), "blocks.*.mlp.3": RowwiseParallel(),
        "head.1": ColwiseParallel(output_layouts=Replicate()),
    }  # fmt: skip
    ranks = dist.get_world_size()
    divided = 2 if name == "mesh" else ranks
    mesh = init_device_mesh("cpu", (ranks // divided, divided), mesh_dim_names=("dp", "tp"))
    parallelize_module(model, mesh["tp"], plan)
    if divided < ranks:
        for module in (*model.blocks, *model.head, model):
            fully_shard(module, mesh=mesh["dp"])
    return plain_step(model, adam(model))


def pipeline_by_hand(_name: str) -> Step:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    rank, count = dist.get_rank(), dist.get_world_size()
    model: Any = new_model()
    parts = [model.embedding, *model.blocks, model.head]
    # As even as eight parts can be: the embedding and the head have few parameters.
    bounds = [0, 2, 4, 6, len(parts)]
    own = nn.Sequential(*parts[bounds[rank] : bounds[rank + 1]])
    optimizer = adam(own)
    schedule = Schedule1F1B(PipelineStage(own, rank, count, CPU), MICROBATCHES, GPT.loss_of)

    def step(text: Tensor, following: Tensor) -> None:
        if rank == 0:
            schedule.step(text)
        elif rank == count - 1:
            schedule.step(target=following, losses=[])
        else:
            schedule.step()
        optimizer.step()
        optimizer.zero_grad()

    return step


BY_HAND: dict[str, Callable[[str], Step]] = {
    **dict.fromkeys(("ddp", "ddp-fp16-hook", "powersgd", "zero1"), ddp_by_hand),
    **dict.fromkeys(("zero2", "zero3", "offload", "hsdp"), fsdp_by_hand),
    **dict.fromkeys(("tensor", "mesh"), tensor_by_hand),
    "pipeline": pipeline_by_hand,
}


def by_accelerate() -> Step:
    """Accelerate's own way to train with DDP. On CPUs it has no other: there it takes an FSDP plugin for DDP."""
    from accelerate import Accelerator

    accelerator, model = Accelerator(cpu=True), new_model()
    model, optimizer = accelerator.prepare(model, adam(model))

    def step(text: Tensor, following: Tensor) -> None:
        accelerator.backward(GPT.loss_of(model(text), following))
        optimizer.step()
        optimizer.zero_grad()

    return step


def by_lightning(name: str) -> Step:
    """Lightning Fabric's DDP, or its FSDP2, which leaves what is sharded to a function of the user."""
    from lightning.fabric import Fabric
    from lightning.fabric.strategies import DDPStrategy, ModelParallelStrategy
    from torch.distributed.fsdp import fully_shard

    def sharded(model: Any, mesh: Any) -> Any:
        for module in (*model.blocks, *model.head, model):
            fully_shard(module, mesh=mesh["data_parallel"])
        return model

    ranks = dist.get_world_size()
    strategy = (
        DDPStrategy()
        if name == "ddp"
        else ModelParallelStrategy(sharded, data_parallel_size=ranks, tensor_parallel_size=1)
    )
    fabric = Fabric(accelerator="cpu", devices=ranks, strategy=strategy)
    fabric.launch()
    model: Any = fabric.setup_module(new_model())
    optimizer: Any = fabric.setup_optimizers(adam(model))

    def step(text: Tensor, following: Tensor) -> None:
        fabric.backward(GPT.loss_of(model(text), following))
        optimizer.step()
        optimizer.zero_grad()

    return step


# --- measuring ---


def sent() -> int:
    """Bytes that the loopback interface has sent."""
    return int(Path("/sys/class/net/lo/statistics/tx_bytes").read_text())


def turn(step: Step, share: tuple[Tensor, Tensor], steps: int) -> tuple[list[float], float]:
    """The seconds of each step of a turn, and the bytes a step that all ranks have sent in it."""
    dist.barrier()
    before, seconds = sent(), []
    for _ in range(steps):
        began = time.perf_counter()
        step(*share)
        seconds.append(time.perf_counter() - began)
    dist.barrier()
    return seconds, (sent() - before) / steps


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--strategy", choices=STRATEGIES, required=True)
    parser.add_argument("--turns", type=int, required=True)
    parser.add_argument("--only")
    parser.add_argument("--accelerate", action="store_true")
    parser.add_argument("--lightning", action="store_true")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    name = arguments.strategy
    sides: dict[str, Step] = {}
    part, parts = 0, 1
    if arguments.only != "hand":
        sides["strategy"], part, parts = by_strategy(name)
    elif name == "mesh":
        part, parts = dist.get_rank() // 2, 2
    elif name not in ("tensor", "pipeline"):
        part, parts = dist.get_rank(), dist.get_world_size()
    if arguments.only != "strategy":
        sides["hand"] = BY_HAND[name](name)
    if arguments.accelerate:
        sides["accelerate"] = by_accelerate()
    if arguments.lightning:
        sides["lightning"] = by_lightning(name)
    whole = GPT.batch_of(GPT.standard_library(), 0, BATCH, CONTEXT, 0)
    share = (whole[0][part::parts], whole[1][part::parts])
    results: dict[str, dict[str, list[float]]] = {side: {"seconds": [], "bytes": []} for side in sides}
    for number in range(-1, arguments.turns):
        for side in list(sides) if number % 2 else reversed(sides):
            seconds, sent_bytes = turn(sides[side], share, STEPS)
            if number >= 0:
                results[side]["seconds"].append(sum(seconds) / len(seconds))
                results[side]["bytes"].append(sent_bytes)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    if dist.get_rank() == 0:
        arguments.out.write_text(json.dumps({"sides": results, "peak_mib": peak}))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
