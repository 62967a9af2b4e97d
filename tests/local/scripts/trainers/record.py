"""What scripts of trainers record for tests: who trained which step, and the weights at the end."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import torch

PARAMS: dict[str, Any] = json.loads(os.environ.get("SLURMTRAIN_PARAMS", "{}"))
STEPS = int(PARAMS.get("steps", 20))
SAVE_EVERY = int(PARAMS.get("save_every", 6))
DIRECTORY = Path(os.environ.get("SLURMTRAIN_CHECKPOINT_DIR", "out"))
RESUME_FROM = os.environ.get("SLURMTRAIN_RESUME_FROM") or None
RANK = int(os.environ.get("RANK", "0"))


def trained(step: int) -> None:
    """Record, on rank 0, that this process has finished a step, after the time that one takes in the first attempt."""
    if os.environ.get("SLURMTRAIN_ATTEMPT") == "1":
        time.sleep(PARAMS.get("step_ms", 0) / 1000)
    if RANK == 0:
        with (DIRECTORY.parent / "trained.jsonl").open("a") as file:
            file.write(json.dumps({"t": time.time(), "pid": os.getpid(), "step": step}) + "\n")


def evaluated(index: int) -> None:
    """Make an evaluation take the time that the test asks for; ``index`` is that of the batch or example."""
    if index == 0:
        time.sleep(PARAMS.get("eval_ms", 0) / 1000)


def ended(model: torch.nn.Module) -> None:
    """Record the weights that training ends with."""
    if RANK == 0:
        digest = hashlib.sha256()
        for name, tensor in sorted(model.state_dict().items()):
            digest.update(name.encode() + tensor.detach().cpu().contiguous().numpy().tobytes())
        print(f"weights {digest.hexdigest()}\n", end="", flush=True)


def slow_saves() -> None:
    """Make saves take the time that the test asks for before the last byte is there, so that a kill can hit them."""
    plain_save = torch.save

    def save(*arguments: Any, **options: Any) -> None:
        time.sleep(PARAMS.get("save_ms", 0) / 1000)
        plain_save(*arguments, **options)

    def move(source: str, target: str) -> None:
        """Copy, as shutil.move does from one file system to another, where Lightning's checkpoints usually go."""
        content = Path(source).read_bytes()
        with Path(target).open("wb") as file:
            file.write(content[: len(content) // 2])
            file.flush()
            time.sleep(PARAMS.get("save_ms", 0) / 1000)
            file.write(content[len(content) // 2 :])
        Path(source).unlink()

    torch.save = save
    shutil.move = move
