"""Save checkpoints between the steps of a loop that trains nothing: as a slurmtrain run, or with torch alone.

The state is that of a transformer under Adam: its parameters and two moments of each, in float32, which no step
changes. A step is ``products`` matrix products and an all-reduce the size of a small model's gradients.

Each rank writes ``rank-<r>.json`` to ``out`` at its end. Times are of the monotonic clock, in seconds, which all
processes of a machine share. ``bytes``: what the tensors of the state weigh, those of all shards together. ``ready``:
when the state was there, and nothing of checkpoints yet. ``bodies``: for each step since then when it began and ended.
``saves``: for each save how many steps had been finished, and its wall time; a session leaves that to its journal.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

GRADIENTS = 250_000
# Steps before the first save, and between the end of a save and the beginning of the next one.
QUIET = 10
FLOAT = 4
# Each parameter is stored with Adam's two moments.
COPIES = 3
# Width and number of the blocks that make up most of a state that is at least so large; the embedding is the rest.
SHAPES = {1_000_000_000: (1024, 6), 200_000_000: (512, 5), 0: (128, 4)}


@dataclass(frozen=True)
class Task:
    """What to train: the size of the state in bytes, and whether the ranks share it (FSDP2) or each have all of it."""

    size: int
    sharded: bool
    products: int
    out: Path


class Training:
    """A rank's model and optimizer, and its steps."""

    def __init__(self, task: Task) -> None:
        self.task = task
        with torch.device("meta"):
            self.model = Transformer(task.size)
        if task.sharded:
            mesh = init_device_mesh("cpu", (dist.get_world_size(),))
            for block in self.model.blocks:
                fully_shard(block, mesh=mesh)
            fully_shard(self.model, mesh=mesh)
        self.model.to_empty(device="cpu")
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self._fill()
        self._weight = torch.randn(256, 256) / 16
        self._gradients = torch.zeros(GRADIENTS)
        self.bodies: list[tuple[float, float]] = []
        self.saves: list[tuple[int, float]] = []
        for _ in range(QUIET):
            self.step()
        self.bodies.clear()
        self.ready = time.monotonic()

    def _fill(self) -> None:
        """Write to all of the state: memory that was never written to costs nothing to copy."""
        # The same on all ranks: a session refuses to save replicas that differ.
        noise = torch.rand(2**20, generator=torch.Generator().manual_seed(0))
        for parameter in self.model.parameters():
            moments = {name: torch.empty_like(parameter, requires_grad=False) for name in ("exp_avg", "exp_avg_sq")}
            self.optimizer.state[parameter] = {"step": torch.tensor(1.0), **moments}
            for tensor in (parameter.detach(), *moments.values()):
                local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
                for part in local.view(-1).split(len(noise)):
                    part.copy_(noise[: len(part)])

    @property
    def bytes(self) -> int:
        return sum(parameter.numel() for parameter in self.model.parameters()) * FLOAT * COPIES

    def step(self, *, waiting: bool = False) -> bool:
        """Returns whether any rank said that it is waiting for a save."""
        began = time.monotonic()
        value = self._weight
        for _ in range(self.task.products):
            value = (value @ self._weight).tanh()
        self._gradients[0] = float(waiting)
        dist.all_reduce(self._gradients)
        any_waiting = bool(self._gradients[0] > 0)
        self.bodies.append((began, time.monotonic()))
        return any_waiting

    def write(self) -> None:
        report = {name: getattr(self, name) for name in ("bytes", "ready", "bodies", "saves")}
        (self.task.out / f"rank-{dist.get_rank()}.json").write_text(json.dumps(report))


class Transformer(torch.nn.Module):
    """A model whose parameters and Adam moments take ``size`` bytes, to within 1 %."""

    def __init__(self, size: int) -> None:
        super().__init__()
        width, depth = next(shape for least, shape in SHAPES.items() if size >= least)
        layers = (torch.nn.TransformerEncoderLayer(width, 8, 4 * width) for _ in range(depth))
        self.blocks = torch.nn.ModuleList(layers)
        rest = size // (FLOAT * COPIES) - sum(one.numel() for one in self.blocks.parameters())
        self.embedding = torch.nn.Embedding(rest // width, width)


# --- ways to save: each returns a future if it is not done yet -------------------------------------------------------


def torch_save(training: Training, path: Path) -> None:
    """Rank 0 writes one file, and the others wait for it."""
    model, optimizer = training.model, training.optimizer
    if training.task.sharded:
        whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
        states: tuple[Any, Any] = get_state_dict(model, optimizer, options=whole)
    else:
        states = model.state_dict(), optimizer.state_dict()
    if dist.get_rank() == 0:
        unfinished = path.with_suffix(".tmp")
        with unfinished.open("wb") as file:
            torch.save(dict(zip(("model", "optimizer"), states, strict=True)), file)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
        folder = os.open(path.parent, os.O_RDONLY)
        os.fsync(folder)
        os.close(folder)
    dist.barrier()


def dcp_save(training: Training, path: Path) -> None:
    """torch.distributed.checkpoint with its defaults: each rank writes one file, and fsyncs it."""
    dcp.save(_states(training), checkpoint_id=path)


@dataclass
class DcpAsync:
    """The same in the background, on a process group of its own."""

    kind: AsyncCheckpointerType
    group: dist.ProcessGroup | None = field(default=None, init=False)

    def __call__(self, training: Training, path: Path) -> Future[Any]:
        if self.group is None:
            self.group = dist.new_group(backend="gloo")
        future = dcp.async_save(
            _states(training), checkpoint_id=path, process_group=self.group, async_checkpointer_type=self.kind
        )
        assert isinstance(future, Future)
        return future


def _states(training: Training) -> dict[str, Any]:
    return dict(zip(("model", "optimizer"), get_state_dict(training.model, training.optimizer), strict=True))


Way = Callable[[Training, Path], Future[Any] | None]
WAYS: dict[str, Callable[[], Way]] = {
    "torch_save": lambda: torch_save,
    "dcp_async_thread": partial(DcpAsync, AsyncCheckpointerType.THREAD),
    "dcp_async_process": partial(DcpAsync, AsyncCheckpointerType.PROCESS),
    "dcp_save": lambda: dcp_save,
}


# --- loops --------------------------------------------------------------------------------------------------------


def train(task: Task, save: Way, saves: int) -> None:
    """Save this many times, one after another; the newest checkpoint stays in ``task.out``."""
    training = Training(task)
    for number in range(saves):
        for _ in range(QUIET):
            training.step()
        began = time.monotonic()
        ended: list[float] = []
        future = save(training, task.out / f"step-{number}")
        if future is None:
            ended.append(time.monotonic())
        else:
            future.add_done_callback(lambda _, ended=ended: ended.append(time.monotonic()))
        finished = len(training.bodies)
        while training.step(waiting=not ended):
            pass
        if future is not None:
            future.result()
        training.saves.append((finished, ended[0] - began))
        if number and dist.get_rank() == 0:
            delete(task.out / f"step-{number - 1}")
    training.write()


def train_in_session(task: Task, steps: int) -> None:
    """The run's spec decides when to save."""
    import slurmtrain

    with slurmtrain.session() as run:
        training = Training(task)
        run.checkpoint(model=training.model, optimizer=training.optimizer)
        for _ in run.steps(steps):
            training.step()
        training.write()


def delete(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", type=int, required=True)
    parser.add_argument("--sharded", action="store_true")
    parser.add_argument("--products", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, help="in a session")
    parser.add_argument("--way", choices=WAYS, help="without slurmtrain, as torchrun starts it")
    parser.add_argument("--saves", type=int)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    task = Task(arguments.size, arguments.sharded, arguments.products, arguments.out)
    if arguments.way is None:
        train_in_session(task, arguments.steps)
    else:
        dist.init_process_group("gloo")
        train(task, WAYS[arguments.way](), arguments.saves)
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
