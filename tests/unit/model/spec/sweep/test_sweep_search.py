"""The section ``search`` of a sweep: what it may say, and what is wrong with it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from slurmtrain.model.spec.sweep import Sweep, read_sweep
from slurmtrain.model.spec.sweep_values import Method, SearchSpec

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


def test_parallel_of_the_sweep_is_that_of_its_search() -> None:
    sweep, _ = read({**LR, "parallel": 3, "search": SEARCH})
    assert sweep.search is not None
    assert sweep.search.parallel == 3


@pytest.mark.parametrize(
    ("section", "key", "message"),
    [
        ({**LR, "search": {**SEARCH, "trials": 0}}, "search.trials", "of at least 1, found 0"),
        ({**LR, "search": {**SEARCH, "trials": 10_001}}, "search.trials", "from 1 to 10000, found 10001: sweep_max"),
        ({**LR, "search": {**SEARCH, "parallel": 21}}, "search.parallel", "21 at once are more than the 20 trials"),
        ({**LR, "search": {"mode": "min", "trials": 2}}, "search.metric", "this key is required"),
        ({**LR, "search": {**SEARCH, "mode": "mim"}}, "search.mode", "did you mean 'min'"),
        ({**LR, "search": {**SEARCH, "sampler": "tpx"}}, "search.sampler", "did you mean 'tpe'"),
        ({**LR, "search": {**SEARCH, "pruner": {"medain": {}}}}, "search.pruner", "did you mean 'median'"),
        ({**LR, "search": {**SEARCH, "pruner": {"median": 5}}}, "search.pruner", "a mapping from one to its settings"),
        ({**LR, "search": {**SEARCH, "sampler": {"tpe": {}, "random": {}}}}, "search.sampler", "expected one of"),
        ({**LR, "search": {**SEARCH, "trails": 2}}, "search.trails", "did you mean 'trials'"),
        ({**LR, "search": "tpe"}, "search", "expected a mapping"),
        ({"search": SEARCH}, "search", "there is nothing to search"),
        ({**LR, "samples": 3, "search": SEARCH}, "samples", "cannot be combined with 'search'"),
        ({**LR, "seed": 3, "search": SEARCH}, "seed", "write it in 'search'"),
        ({**LR, "zip": {"a": [1]}, "search": SEARCH}, "zip", "cannot be combined with 'search'"),
        ({"params.lr": "loguniform(0, 1)", "search": SEARCH}, "params.lr", "a logarithmic scale has positive ends"),
    ],
)
def test_a_mistake_is_reported_at_its_key(section: dict[str, Any], key: str, message: str) -> None:
    _, mistakes = read(section)
    assert any(at == key and message in text for at, text in mistakes), mistakes
