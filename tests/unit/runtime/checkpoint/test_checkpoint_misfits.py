"""Checkpoints of another model: the differences are listed, and nothing is restored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers.ranks import Attempt, alone, listed
from helpers.small_model import Value, model
from torch import nn

from slurmtrain.errors import CheckpointError


def problem_of_restoring(root: Path, **objects: Any) -> str:
    """Why a script with these objects cannot restore."""
    with Attempt(root, alone(), objects, restart=1) as attempt:
        with pytest.raises(CheckpointError) as error:
            attempt.restore()
        assert attempt.events("rejected") == []
    assert "step-2" in listed(root)
    return str(error.value)


def test_parameters_that_another_model_has_are_listed(run: Path) -> None:
    other = nn.Sequential(nn.Linear(40, 40), nn.LayerNorm(40), nn.Linear(40, 2, bias=False))
    problem = problem_of_restoring(run, model=other, own=Value(None))
    assert "does not fit what the script registered" in problem
    assert "it has no 'model.2.weight'" in problem
    assert "'model.1.weight' has shape 2x40, in the script 40" in problem
    assert "'model.1.bias' has shape 2, in the script 40" in problem


def test_of_many_differences_ten_are_listed_and_the_others_counted(run: Path) -> None:
    problem = problem_of_restoring(run, model=nn.Sequential(*(nn.Linear(2, 2) for _ in range(20))), own=Value(None))
    assert problem.count("'model.") == 10
    # 36 parameters are new, and of the four that both have three are of other shapes.
    assert problem.endswith("; and 29 more")


def test_an_object_that_the_checkpoint_has_not_is_named(run: Path) -> None:
    assert "it has no 'average'" in problem_of_restoring(run, model=model(), own=Value(None), average=Value(None))


def test_an_object_that_refuses_its_state_ends_restoring_with_its_reason(run: Path) -> None:
    class Refusing(Value):
        def load_state_dict(self, state: Any) -> None:
            raise RuntimeError("no such vocabulary")

        def reshard_state_dict(self, *_: Any) -> None:
            raise RuntimeError("no such vocabulary")

    assert "RuntimeError: no such vocabulary" in problem_of_restoring(run, model=model(), own=Refusing(None))
