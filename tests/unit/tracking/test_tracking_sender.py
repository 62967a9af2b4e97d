"""Sending to a store that refuses some of it."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from slurmtrain.tracking.to_mlflow.names import flat_name
from slurmtrain.tracking.to_mlflow.sender import Sender


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
        self.entities: list[tuple[str, int]] = []
        self.calls = 0

    def log(self, entities: list[tuple[str, int]]) -> None:
        self.calls += 1
        for name, _ in entities:
            if name in self.codes:
                raise Refused(self.codes[name])
        self.entities += entities

    def sender(self, refused: dict[str, str] | None = None) -> Sender[Item]:
        return Sender(
            lambda item, name: (name, item.value), self.log, (Refused,), lambda: self.present, dict(refused or {})
        )


ITEMS = [Item(name, step) for step in range(50) for name in ("a", "b", "c", "d", "e")]


def test_all_is_one_call_as_long_as_nothing_is_refused() -> None:
    store = Store()
    store.sender().send(ITEMS)
    assert (store.calls, store.entities) == (1, [tuple(item) for item in ITEMS])


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
    assert sorted(store.entities) == sorted(tuple(item) for item in ITEMS if item.name != "c")
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
