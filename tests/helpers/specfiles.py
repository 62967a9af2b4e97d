"""Specs for tests, and accessors for loaded specs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from slurmtrain.specfile import PlannedRun, SpecFile

PYTHON = "/usr/bin/python3"
BASE = "command: python train.py\n"
SWEPT = "command: python train.py --lr ${params.lr}\nparams: {lr: 0.1, steps: 10, name: a}\n"

# The fixtures ``load`` and ``mistakes``.
Load = Callable[..., SpecFile]
Mistakes = Callable[..., list[tuple[str, str, str]]]


def only_run(loaded: SpecFile) -> PlannedRun:
    """The run of a spec without a sweep."""
    [run] = loaded.runs
    return run


def params_of(loaded: SpecFile) -> list[dict[str, Any]]:
    """The parameters of each run."""
    return [run.plan.content["params"] for run in loaded.runs]
