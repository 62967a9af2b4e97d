"""Names that stores take, and sending to a store that refuses some."""

from __future__ import annotations

from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlflow.utils.validation import (
    MAX_ENTITY_KEY_LENGTH,
    _validate_metric_name,
    _validate_param_name,
    _validate_tag_name,
)

from slurmtrain.plugins.wandb import param_name, project_name, refusal
from slurmtrain.tracking.to_mlflow.sending import Sender, flat_name, legal_name

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


class Refused(Exception):
    """What a store answers."""

    def __init__(self, error_code: str) -> None:
        self.error_code = error_code
        super().__init__(f"{error_code}: not this")


class Item(NamedTuple):
    name: str
    value: int


class Store:
    """Takes all names but some: those it answers with an error code."""

    def __init__(self, **codes: str) -> None:
        self.codes = codes
        self.present: list[str] = []
        self.entities: list[Item] = []
        self.calls = 0

    def log(self, entities: list[Item]) -> None:
        self.calls += 1
        for name, _ in entities:
            if name in self.codes:
                raise Refused(self.codes[name])
        self.entities += entities

    def sender(self, refused: dict[str, str] | None = None) -> Sender[Item]:
        return Sender(self.log, (Refused,), lambda: self.present, dict(refused or {}))


ITEMS = [Item(name, step) for step in range(50) for name in ("a", "b", "c", "d", "e")]


def test_all_is_one_call_as_long_as_nothing_is_refused() -> None:
    store = Store()
    store.sender().send(ITEMS)
    assert (store.calls, store.entities) == (1, ITEMS)


def test_one_name_that_is_refused_costs_no_other_and_is_sent_under_another() -> None:
    store = Store(c="INVALID_PARAMETER_VALUE")
    store.sender().send(ITEMS)
    assert sorted(store.entities) == sorted(
        (item.name if item.name != "c" else flat_name("c"), item.value) for item in ITEMS
    )
    assert store.calls < 12


def test_a_name_that_is_refused_in_any_form_is_noted_once_and_not_sent_again() -> None:
    store = Store(c="INVALID_PARAMETER_VALUE", **{flat_name("c"): "INVALID_PARAMETER_VALUE"})
    sender = store.sender()
    sender.send(ITEMS)
    assert sender.refused == {"c": "INVALID_PARAMETER_VALUE: not this"}
    assert sorted(store.entities) == sorted(item for item in ITEMS if item.name != "c")
    calls = store.calls
    store.sender(sender.refused).send(ITEMS)
    assert store.calls == calls + 1


@pytest.mark.parametrize("code", ["TEMPORARILY_UNAVAILABLE", "INTERNAL_ERROR", "PERMISSION_DENIED", ""])
def test_an_answer_that_is_not_about_the_content_ends_the_sending(code: str) -> None:
    store = Store(c=code)
    with pytest.raises(Refused):
        store.sender().send(ITEMS)
    assert (store.calls, store.entities) == (1, [])


def test_a_name_in_the_way_of_another_is_sent_under_another() -> None:
    store = Store(**{"a/b": "INTERNAL_ERROR"})
    store.sender().send([Item("a", 1), Item("a/b", 2), Item("c", 3)])
    assert sorted(store.entities) == sorted([("a", 1), (flat_name("a/b"), 2), ("c", 3)])


def test_a_name_in_the_way_of_one_that_was_sent_long_ago_is_sent_under_another() -> None:
    store = Store(**{"a/b": "INTERNAL_ERROR"})
    store.present = ["a"]
    store.sender().send([Item("a/b", 2), Item("c", 3)])
    assert sorted(store.entities) == sorted([(flat_name("a/b"), 2), ("c", 3)])
