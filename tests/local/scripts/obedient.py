"""A script without a session that saves and exits with 0 when it gets a signal, as Lightning and Hugging Face do."""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import NoReturn

STEP_S = 0.01


def show(line: str) -> None:
    """Print a line in one write, where unbuffered print makes two: workers of a torchrun share a log."""
    print(f"{line}\n", end="", flush=True)


def main() -> None:
    kept, steps = Path(sys.argv[1]), int(sys.argv[2])
    number = signal.Signals[sys.argv[3]] if len(sys.argv) > 3 else signal.SIGTERM
    step = int(kept.read_text()) if kept.exists() else 0

    def save_and_exit(_number: int, _frame: FrameType | None) -> NoReturn:
        # Slurm's second signal must not interrupt the save.
        signal.signal(number, signal.SIG_IGN)
        # First what fails if nobody reads the output any more.
        show(f"saving {step}")
        threading.Event().wait(float(os.environ.get("SAVE_S", "0")))
        kept.write_text(str(step))
        sys.exit(0)

    signal.signal(number, save_and_exit)
    show(f"pid {os.getpid()}")
    show(f"from {step}")
    while step < steps:
        threading.Event().wait(STEP_S)
        step += 1
    show(f"done at {step}")


if __name__ == "__main__":
    main()
