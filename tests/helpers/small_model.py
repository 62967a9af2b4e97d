"""A small model whose parameters all equal the step, so that a mixture of two checkpoints is detectable."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

from helpers.ranks import Attempt, alone
from slurmtrain.runtime.job.process_group import RankGroup


class Value:
    """An object with a state of any kind; one that is an exception is raised instead."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> Any:
        if isinstance(self.value, Exception):
            raise self.value
        return {"value": self.value}

    def load_state_dict(self, state: Any) -> None:
        self.value = state["value"]


class Evil:
    """Creates a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.marker}",)


def model(step: float = 0, width: int = 40) -> nn.Module:
    """A model as it is at a step: 7 KB, and 160 KB at a width of 200."""
    module = nn.Sequential(nn.Linear(width, width), nn.Linear(width, 2))
    fill(module, step)
    return module


def fill(module: nn.Module, step: float) -> None:
    """Give every parameter the value of the step."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(step)


def values(module: nn.Module) -> set[float]:
    """The distinct values of all parameters: more than one means a mixture."""
    return {float(value) for parameter in module.parameters() for value in parameter.detach().reshape(-1)}


def save_steps(attempt: Attempt, module: nn.Module, *steps: int) -> list[str]:
    """Save the model as it is at each step; return why each save failed, empty if it did not."""
    problems = []
    for step in steps:
        fill(module, step)
        problems.append(attempt.save(step))
    return problems


def restored_step(root: Path, restart: int = 9, **more: Any) -> int:
    """The step that a new attempt restores, with all state as it was then; 0 for none."""
    module = model(-1)
    with Attempt(root, alone(), {"model": module}, restart=restart, **more) as attempt:
        restored = attempt.restore()
    if restored is None:
        return 0
    assert values(module) == {float(restored.step)}
    return restored.step


def save_two(ranks: RankGroup, root: Path) -> None:
    """Save steps 1 and 2, with a value that differs by rank."""
    module = model()
    with Attempt(root, ranks, {"model": module, "own": Value(ranks.rank)}) as attempt:
        assert save_steps(attempt, module, 1, 2) == ["", ""]


def restore_alone(root: Path, **more: Any) -> tuple[int, list[dict[str, Any]], list[dict[str, Any]]]:
    """Restore what :func:`save_two` saved on one rank: the step, and the events for rejected and restored."""
    module, own = model(-1), Value("mine")
    with Attempt(root, alone(), {"model": module, "own": own}, restart=1, **more) as attempt:
        restored = attempt.restore()
        assert restored is not None
        assert values(module) == {float(restored.step)}
        return restored.step, attempt.events("rejected"), attempt.events("restored")
