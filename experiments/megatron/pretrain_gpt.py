"""Pretrain the GPT of experiments/gpt as Megatron-LM's script of this name does: its options, checkpoints and output.

It stands for a script that people already have, and does not use slurmtrain's library.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "gpt"))
from train import Gpt, batch_of, loss_of, standard_library

TRACKER = "latest_checkpointed_iteration.txt"


def options() -> argparse.Namespace:
    """Those of Megatron-LM that are used, and one for tests."""
    parser = argparse.ArgumentParser()
    for name in ("num-layers", "hidden-size", "num-attention-heads", "seq-length", "global-batch-size", "train-iters"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--lr", type=float, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", type=Path, required=True)
    parser.add_argument("--load", type=Path, required=True)
    parser.add_argument("--save-interval", type=int, required=True)
    parser.add_argument("--exit-signal-handler", action="store_true")
    parser.add_argument("--seconds-per-step", type=float, default=0.0)
    return parser.parse_args()


def save(root: Path, iteration: int, state: dict[str, Any]) -> None:
    """Write a checkpoint, then the file that names the newest one; the other ranks wait for that."""
    if dist.get_rank() == 0:
        folder = root / f"iter_{iteration:07}" / "mp_rank_00"
        folder.mkdir(parents=True, exist_ok=True)
        torch.save({**state, "iteration": iteration}, folder / "model_optim_rng.pt")
        unfinished = root / f"{TRACKER}.tmp"
        unfinished.write_text(str(iteration))
        unfinished.replace(root / TRACKER)
    dist.barrier()


def load(root: Path) -> dict[str, Any] | None:
    """The newest checkpoint; None if there is none."""
    tracker = root / TRACKER
    if not tracker.exists():
        return None
    folder = root / f"iter_{int(tracker.read_text()):07}" / "mp_rank_00"
    state: dict[str, Any] = torch.load(folder / "model_optim_rng.pt", weights_only=True)
    return state


def main() -> None:
    """Train until the last iteration, or until a signal comes."""
    args = options()
    signals: list[int] = []
    if args.exit_signal_handler:
        signal.signal(signal.SIGTERM, lambda number, _frame: signals.append(number))
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)
    model = Gpt(args.hidden_size, args.num_attention_heads, args.num_layers, args.seq_length)
    replica = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    text = standard_library()
    first, saved = 0, load(args.load)
    if saved is not None:
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["iteration"]
    for iteration in range(first + 1, args.train_iters + 1):
        whole = batch_of(text, iteration - 1, args.global_batch_size, args.seq_length, args.seed)
        own, following = (part[rank::ranks] for part in whole)
        loss = loss_of(replica(own), following)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        # All ranks stop after the same iteration.
        agreed = torch.stack([loss.detach() / ranks, torch.tensor(float(bool(signals)))])
        dist.all_reduce(agreed)
        mean, stopping = agreed.tolist()
        if rank == 0:
            print(f" iteration {iteration:8}/{args.train_iters:8} | lm loss: {mean:.8E} |", flush=True)
        time.sleep(args.seconds_per_step)
        if stopping or iteration % args.save_interval == 0 or iteration == args.train_iters:
            save(args.save, iteration, {"model": model.state_dict(), "optimizer": optimizer.state_dict()})
        if stopping:
            break
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
