"""Questions about fields that no run has, or whose values cannot be compared."""

from __future__ import annotations

from typing import Any

import pytest

from slurmtrain.errors import QueryError
from slurmtrain.model.query.mistakes import check_condition, check_field
from slurmtrain.model.query.where import parse

RUNS: list[dict[str, Any]] = [
    {"id": "1", "state": "failed", "params": {"lr": 0.1, "seed": 1}, "metrics": {}, "checkpoint": None},
    {"id": "2", "state": "failed", "params": {"lr": 0.2, "optim": {"name": "sgd"}}, "metrics": {}, "checkpoint": None},
]


@pytest.mark.parametrize(
    "name", ["id", "params.lr", "params.seed", "params.optim.name", "metrics.acc", "checkpoint.step"]
)
def test_fields_that_a_run_has_or_may_get_are_known(name: str) -> None:
    check_field(name, RUNS)


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("lr", "did you mean 'params.lr'?"),
        ("name", "did you mean 'params.optim.name'?"),
        ("params.lrr", "did you mean 'params.lr'?"),
        ("stat", "did you mean 'state'?"),
        ("params.lr.x", "did you mean 'params.lr'?"),
        ("zzzzzz", "'slurmtrain status --json' prints all fields"),
    ],
)
def test_a_field_that_no_run_has_is_refused_with_the_nearest(name: str, advice: str) -> None:
    with pytest.raises(QueryError) as error:
        check_field(name, RUNS)
    assert str(error.value) == f"none of these runs has a field {name!r}; {advice}"


def test_without_runs_every_field_may_exist() -> None:
    check_field("params.lrr", [])


def test_a_condition_shows_where_its_mistake_is() -> None:
    text = "state = failed and params.lrr < 1"
    with pytest.raises(QueryError) as error:
        check_condition(parse(text, 0.0), text, RUNS)
    assert str(error.value).splitlines()[1:] == [f"  {text}", " " * 21 + "^"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("params = 3", "'params' has several values, such as params.lr, params.seed, params.optim.name"),
        ("params.lr > 10%", "'params.lr' is a number, and '10%' is none"),
    ],
)
def test_what_cannot_be_compared_is_refused(text: str, message: str) -> None:
    with pytest.raises(QueryError) as error:
        check_condition(parse(text, 0.0), text, RUNS)
    assert str(error.value).splitlines()[0].startswith(message.removesuffix(".name"))


@pytest.mark.parametrize("text", ["params != null", "checkpoint = null", "params.lr = abc", "id > a"])
def test_what_can_be_compared_is_not(text: str) -> None:
    check_condition(parse(text, 0.0), text, RUNS)
