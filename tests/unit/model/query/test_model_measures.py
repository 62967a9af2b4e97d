"""Measures of curves: how they are written, and their values."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurmtrain.errors import QueryError
from slurmtrain.model.query.measures import Measure, check_field, is_larger_better, read_measure, value_at_step

RUNS = [{"state": "completed", "params": {"lr": 0.1}, "metrics": {"loss": 0.5, "hits@10": 0.2, "train/acc": 0.7}}]
curves = st.dictionaries(st.integers(0, 50), st.floats(-10, 10) | st.just(math.nan), max_size=20).map(
    lambda points: sorted(points.items())
)


@pytest.mark.parametrize(
    ("text", "measure"),
    [
        ("min:loss", Measure("min", "loss")),
        ("max:metrics.train/acc", Measure("max", "train/acc")),
        ("last:a:b", Measure("last", "a:b")),
        ("loss@1000", Measure("at", "loss", 1000)),
        ("hits@10@1000", Measure("at", "hits@10", 1000)),
        ("area:hits@10", Measure("area", "hits@10")),
        ("metrics.hits@10", None),
        ("params.a@1", None),
        ("loss@", None),
        ("loss@1e3", None),
        ("mean:loss", None),
        ("state", None),
    ],
)
def test_what_a_name_measures(text: str, measure: Measure | None) -> None:
    assert read_measure(text) == measure


@given(curves, st.integers(0, 60))
def test_the_value_at_a_step_is_the_newest_up_to_it(points: list[tuple[int, float]], step: int) -> None:
    before = [value for at, value in points if at <= step]
    expected = before[-1] if before and math.isfinite(before[-1]) else None
    assert value_at_step([at for at, _ in points], [value for _, value in points], step) == expected


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("min:los", "none of these runs has a metric 'los'; did you mean 'loss'?"),
        ("losss@5", "none of these runs has a metric 'losss'; did you mean 'loss'?"),
        ("mim:loss", "there is no measure 'mim'; did you mean 'min'?"),
        ("best:loss", "there is no measure 'best'; there are last, min, max, area"),
        ("hits@10", "none of these runs has a field 'hits@10'; did you mean 'metrics.hits@10'?"),
    ],
)
def test_mistakes_in_measures_name_what_is_meant(name: str, message: str) -> None:
    with pytest.raises(QueryError) as error:
        check_field(name, RUNS)
    assert str(error.value) == message


def test_the_name_of_a_metric_shows_whether_larger_values_are_better() -> None:
    smaller = ["loss", "val_loss", "valLoss", "eval/loss", "perplexity", "test.rmse", "step_time", "loss2", "WER"]
    larger = ["acc", "val_accuracy", "acc@5", "acc1", "valAcc", "macro-F1", "f1", "auc", "BLEU", "reward", "r2"]
    unknown = ["lr", "grad_norm", "epoch", "time_to_accuracy", "negative_log_likelihood", "", "損失"]
    assert [is_larger_better(name) for name in smaller] == [False] * len(smaller)
    assert [is_larger_better(name) for name in larger] == [True] * len(larger)
    assert [is_larger_better(name) for name in unknown] == [None] * len(unknown)
