"""Trains without a session on a DataLoader with workers; saves and exits with 75 when it gets SIGTERM."""

from __future__ import annotations

import json
import signal
import sys
import threading
from pathlib import Path
from types import FrameType

import torch
from torch.utils.data import DataLoader, Dataset

STEP_S = 0.01


class Numbers(Dataset[torch.Tensor]):
    """A few numbers, one for each step of an epoch."""

    def __len__(self) -> int:
        return 50

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(float(index))


def main() -> None:
    folder, method, persistent = Path(sys.argv[1]), sys.argv[2], sys.argv[3] == "persistent"
    kept = folder / "step.pt"
    step = int(torch.load(kept, weights_only=True)) if kept.exists() else 0
    stopping = threading.Event()

    def stop(_number: int, _frame: FrameType | None) -> None:
        stopping.set()

    signal.signal(signal.SIGTERM, stop)
    loader = DataLoader(
        Numbers(), num_workers=2, persistent_workers=persistent, multiprocessing_context=method, batch_size=1
    )
    print(f"from {step}", flush=True)
    while True:
        for _ in loader:
            threading.Event().wait(STEP_S)
            step += 1
            # One write a line: what it says is what has happened, whenever it is killed.
            with (folder / "steps.jsonl").open("a") as file:
                file.write(json.dumps(step) + "\n")
            if stopping.is_set():
                # Long enough for an end of a worker to be noticed.
                threading.Event().wait(0.5)
                torch.save(step, kept.with_suffix(".tmp"))
                kept.with_suffix(".tmp").replace(kept)
                print(f"saved {step}", flush=True)
                sys.exit(75)


if __name__ == "__main__":
    main()
