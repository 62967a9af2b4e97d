"""The names under which MLflow and W&B store metrics, params and projects."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlflow.utils.validation import (
    MAX_ENTITY_KEY_LENGTH,
    _validate_metric_name,
    _validate_param_name,
    _validate_tag_name,
)

from slurmtrain.tracking.to_mlflow.names import flat_name, legal_name
from slurmtrain.tracking.to_wandb.names import param_name, project_name, refusal

NAMES = st.text() | st.text("a./-_: \n", max_size=6) | st.text("a/é", min_size=248, max_size=260)


@given(NAMES)
def test_mlflow_takes_every_name(name: str) -> None:
    for stored in (legal_name(name), flat_name(name)):
        assert len(stored) <= MAX_ENTITY_KEY_LENGTH
        for check in (_validate_metric_name, _validate_param_name, _validate_tag_name):
            check(stored)


@pytest.mark.parametrize("name", ["loss", "train/loss", "a.b", "top-5 accuracy", "lr:0", "précision", "a" * 250])
def test_a_name_that_mlflow_takes_stays_as_it_is(name: str) -> None:
    assert legal_name(name) == name


@pytest.mark.parametrize(
    ("name", "start"),
    [("train//loss", "train/loss"), ("a/../b", "a/b"), ("/a", "a"), ("a\x00b", "a_b"), ("a/", "a"), ("", ""),
     ("..", ""), ("x" * 251, "x" * 237)],
)  # fmt: skip
def test_another_is_the_nearest_that_it_takes_marked_with_a_hash(name: str, start: str) -> None:
    stored = legal_name(name)
    assert stored.removeprefix(start).startswith("-")
    assert len(stored) == len(start) + 13
    assert legal_name(name) == stored


@given(st.lists(NAMES, unique=True, min_size=2, max_size=2))
def test_two_names_are_never_stored_as_one(names: list[str]) -> None:
    stored = {legal_name(name) for name in names} | {flat_name(name) for name in names}
    assert len(stored) >= len({legal_name(name) for name in names}) == 2
    # Not even if one of them is what the other is stored as.
    assert legal_name(legal_name(names[0])) == legal_name(names[0]) or legal_name(names[0]) != names[0]
    assert legal_name(flat_name(names[0])) != flat_name(names[0])


@given(st.lists(st.text("a-/_\n#é") | st.text("a/", min_size=120, max_size=130), unique=True, max_size=20))
def test_wandb_takes_every_project_and_param_and_no_two_are_one(names: list[str]) -> None:
    projects, params = [*map(project_name, names)], [*map(param_name, names)]
    assert all(len(name) <= 128 and not set("/\\#?%:") & set(name) for name in projects)
    assert all(name == name.strip("-") for name in params)
    # Also together with the names that they are stored under.
    for stored, store in ((projects, project_name), (params, param_name)):
        every = {*names, *stored}
        assert len({store(name) for name in every}) == len(every)


def test_a_name_that_wandb_takes_stays_as_it_is() -> None:
    for name in ("digits", "my project", "é_1-a"):
        assert (project_name(name), param_name(name), refusal(name)) == (name, name, "")
