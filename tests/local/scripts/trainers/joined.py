"""Joins the other ranks by a trainer's own detection, and prints its rank, the number of ranks, and the sum of all.

Usage: ``joined.py lightning DEVICES NODES``, where DEVICES may be ``auto``; or ``joined.py accelerate``.
"""

from __future__ import annotations

import os
import sys

import torch


def with_lightning(devices: str, nodes: str) -> tuple[int, int, int]:
    from lightning.pytorch import Trainer
    from lightning.pytorch.demos.boring_classes import BoringModel
    from lightning.pytorch.plugins.environments import SLURMEnvironment

    trainer = Trainer(
        max_steps=2, accelerator="cpu", devices=devices if devices == "auto" else int(devices), num_nodes=int(nodes),
        strategy="ddp", plugins=[SLURMEnvironment(auto_requeue=False)], logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, limit_val_batches=0,
    )  # fmt: skip
    trainer.fit(BoringModel())
    total = trainer.strategy.reduce(torch.tensor(float(trainer.global_rank)), reduce_op="sum")
    return trainer.global_rank, trainer.world_size, int(total)


def with_accelerate() -> tuple[int, int, int]:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    total = accelerator.reduce(torch.tensor(float(accelerator.process_index)), "sum")
    return accelerator.process_index, accelerator.num_processes, int(total)


if __name__ == "__main__":
    rank, count, total = with_lightning(*sys.argv[2:]) if sys.argv[1] == "lightning" else with_accelerate()
    of_mpi = sorted(name for name in os.environ if name.startswith(("PMI", "OMPI_COMM")))
    print(f"joined {rank} {count} {total} {of_mpi}")
