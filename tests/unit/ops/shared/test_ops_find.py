"""Which runs a name refers to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from slurmtrain.errors import RunNotFound
from slurmtrain.ops.shared.find import choose, namesakes


@dataclass(frozen=True)
class Row:
    """What is known of a run."""

    name: str
    ended: bool = True
    sweep: str | None = None

    @property
    def state(self) -> str:
        """Its state."""
        return "completed" if self.ended else "running"


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
    ("name", "ids"),
    [
        ("0300000000", ["0300000000"]),
        ("cnn", ["0300000000"]),
        ("cnn-wide", ["1400000000"]),
        ("14", ["1400000000"]),
        ("1", ["1500000000"]),
        ("@last", ["1500000000"]),
        ("cnn*", ["0100000000", "0200000000", "0300000000", "1400000000"]),
        ("1?00000000", ["1400000000", "1500000000"]),
    ],
)
def test_a_name_means_the_newest_run_of_that_name_and_goes_before_the_beginning_of_an_id(
    name: str, ids: Sequence[str]
) -> None:
    assert choose(RUNS, name) == ids


def test_the_name_of_a_sweep_means_all_its_runs_of_that_name_until_something_newer_is_called_so() -> None:
    swept = {
        "1600000000": Row("mlp", sweep="1599999999"),
        "1600000001": Row("mlp", ended=False, sweep="1599999999"),
        "1600000002": Row("other", sweep="1599999999"),
    }
    before = {"1500000000": Row("mlp", ended=False), "1500000001": Row("mlp", sweep="1499999999")}
    assert choose(before | swept, "mlp") == ["1600000000", "1600000001"]
    assert choose(before | swept, "1599999999") == list(swept)
    assert choose(before | swept, "mlp", live=True) == ["1600000001"]
    assert choose(before | swept | {"1700000000": Row("mlp")}, "mlp") == ["1700000000"]


@pytest.mark.parametrize(
    ("runs", "name", "message"),
    [
        (RUNS, "0", "prefix of 3 run ids: 0100000000 .cnn., 0200000000"),
        (RUNS, "cn", "did you mean 'cnn'"),
        (RUNS, "", "slurmtrain status lists them"),
        (RUNS, "x*", "no run matches 'x\\*'; slurmtrain status --all lists them"),
        ({}, "x", "there are no runs here"),
    ],
)
def test_a_name_that_means_no_run_is_refused_with_what_may_be_meant(
    runs: dict[str, Row], name: str, message: str
) -> None:
    with pytest.raises(RunNotFound, match=message):
        choose(runs, name)


def test_where_only_what_goes_on_counts_it_is_said_that_nothing_does() -> None:
    assert choose(SWEPT, "1599999999", live=True) == ["1600000000"]
    assert choose(RUNS, "*", live=True) == ["0100000000", "0200000000"]
    assert choose(RUNS, "cnn", live=True) == ["0300000000"], "what was named is told that it has ended"
    over = {run_id: Row("mlp", sweep="1599999999") for run_id in SWEPT}
    with pytest.raises(RunNotFound, match=r"all 3 runs of sweep 1599999999 have ended$"):
        choose(over, "1599999999", live=True)
    with pytest.raises(RunNotFound, match=r"have ended; also called so, and not ended: 1000000000$"):
        choose({"1000000000": Row("mlp", ended=False), **over}, "mlp", live=True)
    with pytest.raises(RunNotFound, match="no run that has not ended matches 'cnn-"):
        choose(RUNS, "cnn-*", live=True)


def test_the_live_runs_of_a_name_are_told() -> None:
    assert namesakes(RUNS, "0300000000") == ["0100000000", "0200000000"]
    assert namesakes(RUNS, "1400000000") == []
