"""Which runs a name refers to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from slurmtrain.errors import RunNotFound
from slurmtrain.ops.shared.find import choose_all, choose_run, namesakes


@dataclass(frozen=True)
class Row:
    """What is known of a run."""

    name: str
    ended: bool = True
    sweep: str | None = None


RUNS = {
    "0100000000": Row("cnn", ended=False),
    "0200000000": Row("cnn", ended=False),
    "0300000000": Row("cnn"),
    "1400000000": Row("cnn-wide"),
    "1500000000": Row("1"),
}
SWEPT = {
    "1600000000": Row("mlp", ended=False, sweep="1599999999"),
    "1600000001": Row("mlp", sweep="1599999999"),
    "1700000000": Row("mlp"),
}


@pytest.mark.parametrize(
    ("name", "run_id"),
    [
        ("0300000000", "0300000000"),
        ("cnn", "0200000000"),
        ("cnn-wide", "1400000000"),
        ("14", "1400000000"),
        ("1", "1500000000"),
        ("@last", "1500000000"),
    ],
)
def test_a_name_means_the_newest_live_run_of_that_name_and_goes_before_the_beginning_of_an_id(
    name: str, run_id: str
) -> None:
    assert choose_run(RUNS, name) == run_id


@pytest.mark.parametrize(
    ("runs", "name", "message"),
    [
        (RUNS, "0", "prefix of 3 run ids: 0100000000 .cnn., 0200000000"),
        (RUNS, "cn", "did you mean 'cnn'"),
        (RUNS, "", "slurmtrain status lists them"),
        (RUNS, "cnn*", "slurmtrain status lists them|did you mean"),
        ({}, "x", "there are no runs here"),
        (SWEPT, "1599999999", r"sweep of 2 runs: 1600000000 \(mlp\), 1600000001 \(mlp\); name the run"),
    ],
)
def test_a_name_that_means_no_run_is_refused_with_what_may_be_meant(
    runs: dict[str, Row], name: str, message: str
) -> None:
    with pytest.raises(RunNotFound, match=message):
        choose_run(runs, name)


def test_the_live_runs_of_a_name_are_told() -> None:
    assert namesakes(RUNS, "0300000000") == ["0100000000", "0200000000"]
    assert namesakes(RUNS, "1400000000") == []


@pytest.mark.parametrize(
    ("names", "ids"),
    [
        (["cnn*"], ["0100000000", "0200000000", "0300000000", "1400000000"]),
        (["1?00000000"], ["1400000000", "1500000000"]),
        (["cnn", "cnn[-]*", "cnn"], ["0200000000", "1400000000"]),
    ],
)
def test_a_pattern_means_all_runs_whose_name_or_id_it_matches(names: Sequence[str], ids: Sequence[str]) -> None:
    assert choose_all(RUNS, names) == ids


def test_a_sweep_or_a_pattern_means_its_runs_and_those_that_go_on_where_only_these_count() -> None:
    assert choose_all(SWEPT, ["1599999999", "mlp"]) == ["1600000000", "1600000001"]
    assert choose_all(SWEPT, ["1599999999"], live=True) == ["1600000000"]
    assert choose_all(RUNS, ["*"], live=True) == ["0100000000", "0200000000"]
    over = {run_id: Row("mlp", sweep=row.sweep) for run_id, row in SWEPT.items()}
    with pytest.raises(RunNotFound, match="all 2 runs of sweep 1599999999 have ended"):
        choose_all(over, ["1599999999"], live=True)
    with pytest.raises(RunNotFound, match="no run that has not ended matches 'cnn-"):
        choose_all(RUNS, ["cnn-*"], live=True)
