"""The values of swept keys in short, and searches among them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from slurmtrain.model.experiment.sweep import Sweep, read_sweep
from slurmtrain.model.experiment.sweep_values import ListedValues, Method, RandomValues, SearchSpec, read_expression


def listed(text: str) -> list[Any]:
    values = read_expression(text)
    assert isinstance(values, ListedValues)
    return [values.at(index) for index in range(values.count)]


def drawn(text: str) -> RandomValues:
    values = read_expression(text)
    assert isinstance(values, RandomValues)
    return values


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("range(5)", [0, 1, 2, 3, 4]),
        (" range( 1 ,10, 2 ) ", [1, 3, 5, 7, 9]),
        ("range(5, 0, -2)", [5, 3, 1]),
        ("linspace(0, 1, 5)", [0.0, 0.25, 0.5, 0.75, 1.0]),
        # In binary arithmetic the fourth would be 0.30000000000000004.
        ("linspace(0, 1, 11)", [0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0]),
        ("linspace(2, 3, 1)", [2.0]),
        ("logspace(1e-4, 1e-1, 4)", [1e-4, 1e-3, 1e-2, 1e-1]),
    ],
)  # fmt: skip
def test_a_function_lists_its_values(text: str, values: list[Any]) -> None:
    assert listed(text) == values
    assert [type(value) for value in listed(text)] == [type(value) for value in values]


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("uniform(0, 0.5)", [0.0, 0.15, 0.4999995]),
        ("loguniform(1e-5, 1e-1)", [1e-05, 0.000158489, 0.0999991]),
        ("choice(relu, 'a, b', 1)", ["relu", "relu", 1]),
        ('choice(true, null, "true", 1e-3)', [True, None, 0.001]),
    ],
)
def test_a_random_value_follows_from_a_number_between_0_and_1(text: str, values: list[Any]) -> None:
    assert [drawn(text).draw(part) for part in (0.0, 0.3, 0.999999)] == values


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("range(0, 5, 0)", "step 0"),
        ("range(5, 1)", "no values"),
        ("range()", "expected range"),
        ("linspace(0, nan, 3)", "expected linspace"),
        ("linspace(0, 1e999, 3)", "too large"),
        ("linspace(0, 1, 0)", "at least 1"),
        ("linspace(1, 1, 3)", "3 identical values"),
        ("logspace(0, 1, 3)", "positive"),
        ("uniform(1, 1)", "larger than the first"),
        ("choice()", "expected choice"),
        ("choice(a,,b)", "expected choice"),
        ("choice(a, b, a)", "occurs twice"),
        ("choice(__import__('os'))", "expected choice"),
        ("rang(3)", "did you mean 'range'"),
        ("1, 2", "expected a list"),
    ],
)  # fmt: skip
def test_what_cannot_be_meant_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        read_expression(text)


SEARCH = {"metric": "loss", "mode": "min", "trials": 20}
LR = {"params.lr": "loguniform(1e-5, 1e-1)"}


def read(section: dict[str, Any]) -> tuple[Sweep, list[tuple[str, str]]]:
    mistakes: list[tuple[str, str]] = []
    return read_sweep(section, lambda at, message: mistakes.append((".".join(at), message))), mistakes


def test_the_words_of_sweeps_are_the_space() -> None:
    section = {**LR, "params.drop": "uniform(0, 0.5)", "params.n": "range(2, 9, 2)", "params.act": "choice(a, b)"}
    sweep, mistakes = read({**section, "params.w": [[1, 2], None], "search": SEARCH})
    assert not mistakes
    assert sweep.search is not None
    space = sweep.search.space
    assert (space["params.lr"].low, space["params.lr"].high, space["params.lr"].log) == (1e-5, 0.1, True)
    assert (space["params.n"].low, space["params.n"].high, space["params.n"].step) == (2, 8, 2)
    assert list(space["params.act"].values) == ["a", "b"]
    assert list(space["params.w"].values) == [[1, 2], None]
    [example] = sweep.expand()
    assert {key: each.value for key, each in example.items()} == {
        "params.lr": 1e-5, "params.drop": 0.0, "params.n": 2, "params.act": "a", "params.w": [1, 2],
    }  # fmt: skip


def test_a_search_is_the_same_after_it_was_written_as_json() -> None:
    methods = {"sampler": {"tpe": {"n_startup_trials": 3}}, "pruner": "median", "seed": 4, "parallel": 3}
    sweep, _ = read({**LR, "search": {**SEARCH, **methods}})
    assert sweep.search is not None
    assert sweep.search.sampler == Method("tpe", {"n_startup_trials": 3})
    assert SearchSpec.from_dict(json.loads(json.dumps(sweep.search.to_dict()))) == sweep.search


@pytest.mark.parametrize(
    ("section", "key", "message"),
    [
        ({**LR, "search": {**SEARCH, "trials": 0}}, "search.trials", "of at least 1, found 0"),
        ({**LR, "search": {**SEARCH, "trials": 10_001}}, "search.trials", "from 1 to 10000, found 10001: sweep_max"),
        ({**LR, "search": {**SEARCH, "parallel": 21}}, "search.parallel", "21 at once are more than all 20 trials"),
        ({**LR, "search": {"mode": "min", "trials": 2}}, "search.metric", "this key is required"),
        ({**LR, "search": {**SEARCH, "pruner": {"median": 5}}}, "search.pruner", "a mapping from one to its settings"),
        ({**LR, "search": {**SEARCH, "sampler": {"tpe": {}, "random": {}}}}, "search.sampler", "expected one of"),
        ({**LR, "search": "tpe"}, "search", "expected a mapping"),
        ({"search": SEARCH}, "search", "the search varies nothing"),
        ({**LR, "samples": 3, "search": SEARCH}, "samples", "cannot be combined with 'search'"),
        ({**LR, "seed": 3, "search": SEARCH}, "seed", "write it in 'search'"),
        ({**LR, "zip": {"a": [1]}, "search": SEARCH}, "zip", "cannot be combined with 'search'"),
        ({"params.lr": "loguniform(0, 1)", "search": SEARCH}, "params.lr", "the ends of a logarithmic scale must be "
                                                                           "positive"),
    ],
)  # fmt: skip
def test_a_mistake_is_reported_at_its_key(section: dict[str, Any], key: str, message: str) -> None:
    _, mistakes = read(section)
    assert any(at == key and message in text for at, text in mistakes), mistakes
