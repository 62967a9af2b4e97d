"""The lines of a run's metrics."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from slurmtrain.runtime.job.metrics import MetricsFile


def written(path: Path, *metrics: dict[str, Any]) -> list[dict[str, Any]]:
    """What a file holds after lines with these metrics, as any reader of JSON has it."""
    file = MetricsFile(path / "metrics.jsonl")
    for step, line in enumerate(metrics, start=1):
        file.write(step, line)
    file.close()
    return [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]


def test_a_number_is_read_back_as_it_was(tmp_path: Path) -> None:
    numbers = [0.1, 1e-300, 1e22, -0.0, 2**53 + 1, 0, -7, 1 / 3]
    lines = written(tmp_path, *({"loss": number} for number in numbers))
    assert [line["metrics"]["loss"] for line in lines] == numbers
    assert [line["step"] for line in lines] == list(range(1, 9))


@pytest.mark.parametrize(
    ("value", "number"),
    [
        (np.float64(0.5), 0.5),
        (np.float32(0.5), 0.5),
        (np.int64(3), 3.0),
        (torch.tensor(2.5), 2.5),
        (torch.tensor([4]), 4.0),
        (True, 1.0),
        (math.inf, math.inf),
        (10**400, 10**400),
    ],
)
def test_whatever_is_a_number_is_written_as_one(tmp_path: Path, value: object, number: float) -> None:
    [line] = written(tmp_path, {"value": value, "loss": 1.5})
    assert line["metrics"] == {"value": number, "loss": 1.5}


def test_names_of_any_characters_and_losses_that_are_no_numbers_any_more_are_kept(tmp_path: Path) -> None:
    names = ['"quoted"', "100 %", "%d", "val/ä\n", "\\"]
    first, second, third = written(tmp_path, dict.fromkeys(names, 1), {"loss": math.nan, "lr": 0.1}, {})
    assert list(first["metrics"]) == names
    assert math.isnan(second["metrics"]["loss"])
    assert set(third) == {"t", "step"}
    with pytest.raises(TypeError, match="'loss' must be one number, not str"):
        written(tmp_path, {"loss": "low"})
