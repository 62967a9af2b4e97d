"""A script that knows nothing of slurmtrain and saves with torch.save, with the bad habits that its options name."""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import FrameType

import torch

told_to_stop = threading.Event()


def main() -> None:
    options = parse()
    if options.ignores:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    elif options.stops_with is not None:
        signal.signal(signal.SIGTERM, on_signal)
    if options.leaves_daemon:
        subprocess.Popen(["sh", "-c", "trap '' TERM; exec sleep 1000"], start_new_session=True)
    if not options.random:
        torch.manual_seed(1)
    weights, first = torch.ones(64), 0
    if options.resume:
        saved = torch.load(options.resume, weights_only=True)
        weights, first = saved["weights"], saved["step"]
    for step in range(first + 1, options.steps + 1):
        weights = weights * 0.99 + (0.01 * torch.randn(64) if options.random else 0.01 * step)
        threading.Event().wait(options.step_s)
        if options.prints:
            print(f"step {step}", flush=True)
        if told_to_stop.is_set():
            if options.saves_on_signal:
                save(options, step, weights)
            sys.exit(options.stops_with)
        if step % options.every == 0:
            save(options, step, weights)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--resume")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--step-s", type=float, default=0.1)
    parser.add_argument("--every", type=int, default=5)
    parser.add_argument("--name", default="ckpt-{step}.pt")
    parser.add_argument("--stops-with", type=int)
    parser.add_argument("--saves-on-signal", action="store_true")
    parser.add_argument("--ignores", action="store_true")
    parser.add_argument("--random", action="store_true")
    parser.add_argument("--leaves-daemon", action="store_true", help="start a process that ignores the signal")
    parser.add_argument("--prints", action="store_true")
    parser.add_argument("--torn-s", type=float, help="write in place, with a pause of this length in the middle")
    return parser.parse_args()


def on_signal(_number: int, _frame: FrameType | None) -> None:
    told_to_stop.set()


def save(options: argparse.Namespace, step: int, weights: torch.Tensor) -> None:
    path = options.out / options.name.format(step=step)
    temporary = path.with_name(f"{path.name}.tmp")
    torch.save({"step": step, "weights": weights, "path": str(path)}, temporary)
    if options.torn_s is not None:
        content = temporary.read_bytes()
        temporary.unlink()
        with path.open("wb") as file:
            file.write(content[: len(content) // 2])
            file.flush()
            threading.Event().wait(options.torn_s)
            file.write(content[len(content) // 2 :])
        return
    temporary.replace(path)


if __name__ == "__main__":
    main()
