"""A tiny network on the ranks that a launcher has started, without slurmtrain: data-parallel, saving every few steps.

Usage: ranks.py OUT [--resume CHECKPOINT] [--local_rank N]. SLURMTRAIN_PARAMS say how long and how often.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

PARAMS: dict[str, Any] = {"steps": 30, "step_ms": 50, "save_every": 6, "save_ms": 0}
PARAMS |= json.loads(os.environ.get("SLURMTRAIN_PARAMS", "{}"))


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--resume", type=Path)
    # deepspeed passes it to every script.
    parser.add_argument("--local_rank", type=int)
    return parser.parse_args()


def pause(milliseconds: float) -> None:
    threading.Event().wait(milliseconds / 1000)


def train(rank: int, out: Path, resume: Path | None) -> None:
    """Train on this rank; the process group is initialized."""
    torch.manual_seed(0)
    net = torch.nn.Linear(4, 1)
    first = 0
    if resume is not None:
        saved = torch.load(resume, weights_only=True)
        net.load_state_dict(saved["model"])
        first = saved["step"]
    for step in range(first + 1, PARAMS["steps"] + 1):
        torch.manual_seed(1000 * step + rank)
        net(torch.randn(8, 4)).square().mean().backward()
        with torch.no_grad():
            for weights in net.parameters():
                dist.all_reduce(weights.grad)
                weights -= 0.01 * weights.grad / dist.get_world_size()
                weights.grad = None
        pause(PARAMS["step_ms"])
        if rank == 0:
            with (out.parent / "trained.jsonl").open("a") as file:
                file.write(json.dumps({"t": time.time(), "pid": os.getpid(), "step": step}) + "\n")
            if step % PARAMS["save_every"] == 0:
                save(net, step, out)
    if rank == 0:
        digest = net.weight.detach().numpy().tobytes().hex()
        print(f"weights {digest}\n", end="", flush=True)
    dist.destroy_process_group()


def say(word: str, values: dict[str, Any]) -> None:
    """Print a line in one write, where unbuffered print makes several: the ranks of a node share a log."""
    sys.stdout.write(f"{word} {json.dumps(values)}\n")


def save(net: torch.nn.Module, step: int, out: Path) -> None:
    """Save as most scripts do: in place, so that a kill leaves half a file."""
    with (out / f"ckpt-{step}.pt").open("wb") as file:
        file.write(b"PK")
        file.flush()
        pause(PARAMS["save_ms"])
        file.seek(0)
        torch.save({"model": net.state_dict(), "step": step}, file)


if __name__ == "__main__":
    args = parse_args()
    dist.init_process_group("gloo")
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GLOO_SOCKET_IFNAME")
    say("ranks", {name: os.environ.get(name) for name in names})
    train(dist.get_rank(), args.out, args.resume)
