"""As ranks.py, but the script starts its ranks itself, like the tutorial on DistributedDataParallel does."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch.distributed as dist
import torch.multiprocessing as mp
from ranks import say, train


def rank_main(rank: int, world_size: int, out: Path, resume: Path | None) -> None:
    os.environ["MASTER_ADDR"] = "localhost"
    # The tutorial has 12355 here, which two runs on one machine cannot share.
    os.environ["MASTER_PORT"] = os.environ.get("SLURMTRAIN_MASTER_PORT", "12355")
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    say("ranks", {"RANK": str(rank), "MASTER_PORT": os.environ["MASTER_PORT"]})
    train(rank, out, resume)


if __name__ == "__main__":
    out, *resumed = sys.argv[1:]
    mp.spawn(rank_main, args=(2, Path(out), Path(resumed[1]) if resumed else None), nprocs=2)
