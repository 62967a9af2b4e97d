"""The step of a checkpoint by a pattern of the spec."""

from __future__ import annotations

import pytest

from slurmtrain.model.spec.checkpoint import check_step, step_by_pattern, step_key
from slurmtrain.model.spec.plan import Plan
from slurmtrain.model.spec.spec import read_spec, write_spec


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("step=(", r"'step=\(' is no regular expression: missing \)"),
        (r"step-\d+", r"has 0 groups; it must have one for the digits of the step.* a key .* as 'iter_num'"),
        (r"(\d+)-(\d+)", "has 2 groups"),
    ],
)
def test_a_pattern_that_cannot_name_a_step_is_refused_with_what_is_wrong(pattern: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_step(pattern)


def test_the_group_of_a_pattern_is_the_step() -> None:
    assert step_by_pattern(r"part-(\d+)", "/out/part-007-of-9") == 7
    assert step_by_pattern(r"part-(\w+)", "/out/part-x") is None
    assert step_by_pattern(r"part-(\d+)", "/out/last.pt") is None
    assert step_by_pattern(r"epoch=(\d+)-step=(?P<step>\d+)", "/out/epoch=3-step=70.pt") == 70


@pytest.mark.parametrize("text", ["iter_num", "trainer.global_step", r"(\d+)", r"(\d+)-(?P<step>\d+)"])
def test_keys_and_patterns_that_name_the_step_are_accepted(text: str) -> None:
    check_step(text)
    assert (step_key(text) is not None) == ("(" not in text)


def test_a_plan_from_before_there_were_formats_means_what_it_meant() -> None:
    spec = read_spec({"command": "x", "name": "n", "checkpoint": {"glob": "*.pt"}}, lambda at, message: None)
    plain = write_spec(spec)
    del plain["checkpoint"]["format"], plain["checkpoint"]["step"]
    data = {"schema": 1, "spec": plain, "workdir": "/w", "python": "p", "template": {}}
    assert Plan.from_json(data).spec == spec
