"""A sweep whose runs have curves, repetitions, preemptions and failures, for pages and pictures of it."""

from __future__ import annotations

import json
import math
import time
from typing import Any

from helpers.queried_runs import DAY_S, SWEEP
from helpers.simulated_run import ELSEWHERE, SimulatedRun
from slurmtrain.model.run.layout import AttemptDir
from slurmtrain.ops.shared.workspace import Workspace

RATES, WIDTHS, OPTIMIZERS = (0.001, 0.003, 0.01, 0.03, 0.1), (64, 128, 256, 512), ("adamw", "sgd")
BEST = {"checkpoint": {"keep": {"best": {"metric": "val_acc", "mode": "max"}}}}
STEPS = 40


def write_swept(workspace: Workspace, count: int = 200, first: int = 1, **more: Any) -> list[str]:
    """A sweep over a learning rate, a width, an optimizer and a seed, and some of its runs twice preempted.

    Args:
        workspace: Where.
        count: How many runs.
        first: The number of the first, which its id is made of.
        more: Params of each run.

    Returns:
        Their ids.
    """
    ids = []
    for place in range(count):
        rate, width = RATES[place % 5], WIDTHS[place // 5 % 4]
        params = {"lr": rate, "width": width, "optimizer": OPTIMIZERS[place // 20 % 2], "seed": place // 40, **more}
        ids.append(_write(workspace, first + place, place, params))
    return ids


def _write(workspace: Workspace, number: int, place: int, params: dict[str, Any]) -> str:
    directory = workspace.root.run(f"{number:010d}")
    sim = SimulatedRun(
        directory, spec={"name": "cnn", "params": params, **BEST}, executor="local", job=f"local-{number}",
        now=time.time() - (3 + place * 7 % 60) * DAY_S,
    )  # fmt: skip
    sim.created(name="cnn", params=params, command="python x.py", sweep=SWEEP, resources={})
    if place % 50 == 49:
        return directory.id
    sim.submitted(process=ELSEWHERE).later(120 + place)
    # Of ten runs one is preempted twice, and has repeated what it did behind its newest checkpoint.
    ends = (12, 26, STEPS) if place % 10 == 3 else (STEPS,)
    begin = 0
    for restart, end in enumerate(ends):
        sim.started(restart).later(30).rank("session", 0, restart, step=begin, world_size=1, device="cpu")
        sim.rank("total", 0, restart, total_steps=STEPS)
        lines = []
        for step in range(begin + 1, end + 1):
            sim.later(600)
            lines.append(json.dumps({"t": sim.now, "step": step, "metrics": _metrics(step, place, params)}))
            if step % 10 == 0:
                sim.saved(step, restart)
        path = AttemptDir(directory.attempts / f"{sim.job}.{restart}").metrics
        path.write_text("".join(f"{line}\n" for line in lines))
        begin = end - end % 10
        if end < STEPS:
            sim.stopped(0, restart).later(900)
        elif place % 25 == 7:
            sim.crashed(restart, error=f"ValueError: the loss is not finite at step {place}")
        elif place % 50 != 1:
            sim.ended("completed", 0, restart)
    return directory.id


def _metrics(step: int, place: int, params: dict[str, Any]) -> dict[str, float]:
    """What it has logged: the best rate is 0.01, larger widths are a little better, and seeds are noise."""
    off = abs(math.log10(params["lr"]) + 2)
    noise = math.sin(place * 12.9898 + step) * 0.02
    reached = 1 - math.exp(-step / (8 + 6 * off))
    accuracy = reached * (0.89 - 0.12 * off + 0.02 * math.log2(params["width"] / 64)) + noise
    return {"loss": round(2.3 * (1 - reached) + 0.2 * off + 0.1 + abs(noise), 5), "val_acc": round(accuracy, 5)}
