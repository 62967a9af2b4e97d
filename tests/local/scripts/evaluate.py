"""Trains for a few steps; in one of them, rank 0 does something that takes long while rank 1 waits for it."""

from __future__ import annotations

import threading
import time

import torch
import torch.distributed as dist

import slurmtrain

# What rank 0 does: "compute", "pause" (computes nothing, but says so), "wait" (for nothing that will ever come).
PARAMS = {"steps": 8, "at": 4, "does": "compute", "seconds": 8.0}


def evaluate(run: slurmtrain.Session) -> None:
    """What takes long."""
    seconds = run.params["seconds"]
    if run.params["does"] == "pause":
        with run.pause("evaluation"):
            threading.Event().wait(seconds)
    elif run.params["does"] == "wait":
        threading.Event().wait()
    else:
        until = time.monotonic() + seconds
        matrix = torch.randn(64, 64)
        while time.monotonic() < until:
            matrix = torch.tanh(matrix @ matrix)


def main() -> None:
    with slurmtrain.session(params=PARAMS) as run:
        weights = torch.zeros(4)
        for step in run.steps(run.params["steps"]):
            if run.rank == 0 and step == run.params["at"]:
                evaluate(run)
            dist.all_reduce(weights)
            threading.Event().wait(0.3)
            run.log(loss=step)


if __name__ == "__main__":
    main()
