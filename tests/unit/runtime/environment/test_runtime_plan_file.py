"""Reading a plan from its file."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.simulated_run import make_test_plan

from slurmtrain.errors import PathError
from slurmtrain.runtime.environment.node import read_plan
from slurmtrain.system.files import write_json


def test_a_plan_that_was_written_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    written = make_test_plan()
    write_json(path, written.to_json())
    assert read_plan(path) == written


def test_there_is_no_plan_where_there_is_no_file(tmp_path: Path) -> None:
    assert read_plan(tmp_path / "plan.json") is None


@pytest.mark.parametrize("data", [{}, {"schema": 999}])
def test_a_plan_of_another_shape_is_refused_with_its_path(tmp_path: Path, data: dict[str, int]) -> None:
    path = tmp_path / "plan.json"
    write_json(path, data)
    with pytest.raises(PathError, match=rf"the plan at {path} cannot be read"):
        read_plan(path)
