"""The byte-level GPT of experiments/gpt: the losses that it must have, and those that a run has logged."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import torch

from helpers.site import PROJECT

GPT = PROJECT / "experiments" / "gpt"
# A few units in the last place of float32: sums over processes have another order.
TOLERANCE = 2e-6


def losses_of_one_process(steps: int, **changed: Any) -> list[float]:
    """The losses of a plain loop on one process. ``changed``: parameters of the script."""
    location = importlib.util.spec_from_file_location("gpt_experiment", GPT / "train.py")
    assert location is not None
    assert location.loader is not None
    script: Any = importlib.util.module_from_spec(location)
    location.loader.exec_module(script)
    params, text = {**script.PARAMS, **changed}, script.standard_library()
    # Threads that wait for each other by spinning take many times as long beside other tests on the same cores.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(params["seed"])
    model = script.Gpt(params["width"], params["heads"], params["layers"], params["context"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=params["lr"])
    losses = []
    for step in range(steps):
        whole = script.batch_of(text, step, params["batch_size"], params["context"], params["seed"])
        loss = script.loss_of(model(whole[0]), whole[1])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    torch.set_num_threads(threads)
    return losses


def losses_with(python: str, steps: int, **changed: Any) -> list[float]:
    """The same with another Python, whose standard library is the text."""
    call = f"f({steps}, **{changed!r})"
    program = f"import json; from helpers.gpt import losses_of_one_process as f; print(json.dumps({call}))"
    environment = {**os.environ, "PYTHONPATH": f"{PROJECT / 'tests'}{os.pathsep}{PROJECT}"}
    printed = subprocess.run([python, "-c", program], env=environment, capture_output=True, text=True, check=True)
    losses: list[float] = json.loads(printed.stdout)
    return losses


def logged_losses(run: Path) -> list[tuple[int, float]]:
    """The steps that all attempts of a run have logged, in their order, with their losses."""
    lines = [line for path in run.glob("attempts/*/metrics.jsonl") for line in path.read_text().split("\n")[:-1]]
    return sorted((record["step"], record["metrics"]["loss"]) for record in map(json.loads, lines))
