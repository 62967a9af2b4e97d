"""Addresses of MLflow's pages."""

from __future__ import annotations

from urllib.parse import unquote

import pytest

from slurmtrain.tracking.pages import address, run_page, runs_page


def test_an_experiment_is_shown_by_the_curves_of_its_runs() -> None:
    assert runs_page("7").startswith("#/experiments/7/runs?")
    assert "compareRunsMode=CHART" in runs_page("7")
    assert run_page("7", "abc").startswith("#/experiments/7/runs/abc/model-metrics?")


def test_some_runs_of_an_experiment_are_a_filter_and_too_many_for_an_address_are_all() -> None:
    assert unquote(runs_page("7", ["a", "b"])).endswith("searchFilter=attributes.run_id IN ('a', 'b')")
    assert runs_page("7", [str(number) for number in range(1000)]) == runs_page("7")


@pytest.mark.parametrize(
    ("uri", "expected"),
    [
        ("http://127.0.0.1:5000", "http://127.0.0.1:5000/#/experiments/1"),
        ("https://me:secret@mlflow.example/prefix/", "https://mlflow.example/prefix/#/experiments/1"),
        ("http://[::1]:5001/?a=b", "http://[::1]:5001/#/experiments/1"),
    ],
)
def test_an_address_has_no_password_of_the_server(uri: str, expected: str) -> None:
    assert address(uri, "#/experiments/1") == expected
