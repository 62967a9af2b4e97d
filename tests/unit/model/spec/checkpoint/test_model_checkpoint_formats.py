"""The step of a checkpoint by a pattern of the spec."""

from __future__ import annotations

import pytest

from slurmtrain.model.spec.checkpoint.formats import check_step_pattern, step_by_pattern
from slurmtrain.model.spec.plan import Plan
from slurmtrain.model.spec.spec import read_spec, write_spec


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("step=(", r"'step=\(' is no regular expression: missing \)"),
        ("step", r"has 0 groups; it must have one, for the digits of the step"),
        (r"(\d+)-(\d+)", "has 2 groups"),
    ],
)
def test_a_pattern_that_cannot_name_a_step_is_refused_with_what_is_wrong(pattern: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_step_pattern(pattern)


def test_the_group_of_a_pattern_is_the_step() -> None:
    assert step_by_pattern(r"part-(\d+)", "/out/part-007-of-9") == 7
    assert step_by_pattern(r"part-(\w+)", "/out/part-x") is None
    assert step_by_pattern(r"part-(\d+)", "/out/last.pt") is None


def test_a_plan_from_before_there_were_formats_means_what_it_meant() -> None:
    spec = read_spec({"command": "x", "name": "n", "checkpoint": {"glob": "*.pt"}}, lambda at, message: None)
    plain = write_spec(spec)
    del plain["checkpoint"]["format"], plain["checkpoint"]["step"]
    data = {"schema": 1, "spec": plain, "workdir": "/w", "python": "p", "template": {}}
    assert Plan.from_json(data).spec == spec
