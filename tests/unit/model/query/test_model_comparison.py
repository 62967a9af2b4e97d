"""Runs side by side, and those that differ only in seeds together."""

from __future__ import annotations

from typing import Any

import pytest

from slurmtrain.errors import QueryError
from slurmtrain.model.query.comparison import Compared, Score, SideBySide, compare_runs, is_seed
from slurmtrain.model.query.measures import Criterion, choose_criterion


def run(name: str, acc: float | None, **params: object) -> Compared:
    settings = {f"params.{key}": value for key, value in params.items()}
    return Compared(name, "cnn", "completed", settings, {"acc": Score(acc, acc, 7)})


def ids(comparison: SideBySide) -> list[list[str]]:
    return [[run.id for run in group.runs] for group in comparison.groups]


SWEEP = [run("a", 0.4, lr=0.1, seed=0), run("b", 0.6, lr=0.1, seed=1), run("c", 0.7, lr=0.3, seed=0)]


def test_runs_that_differ_only_in_seeds_are_one_group_and_the_best_comes_first() -> None:
    comparison = compare_runs(SWEEP, "acc", larger=True)
    assert comparison.differs == ["params.lr", "params.seed"]
    assert ids(comparison) == [["c"], ["b", "a"]]
    assert ids(compare_runs(SWEEP, "acc", larger=False)) == [["a", "b"], ["c"]]
    # Equal runs and runs without seeds stay apart. Runs without a value come last.
    equal = compare_runs([run("a", 0.1, lr=1), run("b", 0.2, lr=1)], "acc", larger=True)
    assert (ids(equal), equal.differs) == ([["b"], ["a"]], [])
    assert ids(compare_runs([run("a", None, lr=1), run("b", 0.2, lr=2)], "acc", larger=False)) == [["b"], ["a"]]


def test_the_spread_of_a_group_is_its_mean_and_sample_deviation() -> None:
    alone, several = compare_runs(SWEEP, "acc", larger=True).groups
    spread = several.spread("acc", best=True)
    assert spread is not None
    assert (spread.mean, spread.deviation) == pytest.approx((0.5, 0.02**0.5))
    single = alone.spread("acc")
    assert single is not None
    assert single.deviation is None
    assert several.spread("loss") is None


@pytest.mark.parametrize("name", ["params.seed", "params.run.seed", "params.data_seed", "params.random_state"])
def test_seeds_are_known_by_their_names(name: str) -> None:
    assert is_seed(name)
    assert not is_seed(name.replace("params.", "resources."))
    assert not is_seed("params.lr")
    assert is_seed("seed")


RECORDS = [{"metrics": {"acc": 0.5, "loss": 1.0, "lr": 0.1}, "goodput": 0.5}]


def test_a_metric_is_named_with_or_without_its_section() -> None:
    assert choose_criterion("acc", None, RECORDS) == Criterion("metrics.acc", larger=True, guessed=True)
    assert choose_criterion("metrics.loss", True, RECORDS) == Criterion("metrics.loss", larger=True)
    assert choose_criterion("goodput", None, RECORDS) == Criterion("goodput", larger=True, guessed=True)
    assert choose_criterion(None, None, [{"metrics": {"acc": 1.0}}]).name == "metrics.acc"


@pytest.mark.parametrize(
    ("name", "records", "message"),
    [
        ("lr", RECORDS,
         "the name of metrics.lr does not show whether larger or smaller values are better: --max or --min"),
        ("acd", RECORDS, "none of these runs has a metric 'acd'; did you mean 'acc'"),
        (None, RECORDS, "choose a metric with --by: metrics.acc, metrics.loss, metrics.lr"),
        (None, [{"metrics": {}}], "none of the runs has a metric"),
    ],
)  # fmt: skip
def test_what_does_not_say_which_run_is_better_is_refused(
    name: str | None, records: list[dict[str, Any]], message: str
) -> None:
    with pytest.raises(QueryError, match=message):
        choose_criterion(name, None, records)


def test_runs_of_another_name_or_with_other_settings_are_no_group() -> None:
    other = Compared("d", "gpt", "completed", SWEEP[0].settings, {})
    assert ids(compare_runs([*SWEEP, other], None, larger=False)) == [["a", "b"], ["c"], ["d"]]
    lacking = run("e", 0.5, seed=3)
    assert ["e"] in ids(compare_runs([*SWEEP, lacking], None, larger=False))
