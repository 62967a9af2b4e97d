"""What can come next in an override that is being typed."""

from __future__ import annotations

from typing import Any

import pytest

from slurmtrain.model.spec.kinds import walk_keys
from slurmtrain.model.spec.spec import Spec, complete_override

SPEC = {"params": {"lr": 0.1, "model": {"depth": 3}}, "env": {"HOME": "/x"}, "params.odd": 1}


@pytest.mark.parametrize(
    ("begun", "expected"),
    [
        ("na", ["name="]),
        ("par", ["params."]),
        ("params.", ["params.lr=", "params.model.", "params.odd="]),
        ("params.model.d", ["params.model.depth="]),
        ("env.", ["env.HOME="]),
        ("params.lr=", []),
        ("tracking.mlflow.enabled=t", ["tracking.mlflow.enabled=true"]),
        ("nothing.", []),
        ("slurm.nodelis", ["slurm.nodelist="]),
    ],
)
def test_a_key_is_completed_section_by_section(begun: str, expected: list[str]) -> None:
    assert complete_override(begun, SPEC) == expected


@pytest.mark.parametrize("spec", [{}, {"params": None}, {"params": [1]}, {1: {2: 3}}, {"params": {}}])
def test_any_spec_completes_the_keys_of_the_schema(spec: dict[Any, Any]) -> None:
    offered = {step.rstrip("=.") for step in complete_override("", spec)}
    assert offered >= {path[0] for path, _ in walk_keys(Spec)}
