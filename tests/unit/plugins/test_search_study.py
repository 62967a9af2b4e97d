"""Studies: the same trials lead to the same next one, and what Optuna is asked with."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from slurmtrain.errors import NotAvailable, UserError
from slurmtrain.model.experiment.sweep_values import Distribution, Method, SearchSpec
from slurmtrain.ops.query.trials import Trial
from slurmtrain.plugins.search import Study, check_methods

SPACE = {
    "params.lr": Distribution(low=1e-5, high=0.1, log=True),
    "params.n": Distribution(low=2, high=8, step=2),
    "params.act": Distribution(("relu", ["a", 1], None)),
}


def search(**keys: Any) -> SearchSpec:
    return SearchSpec(**{"space": SPACE, "metric": "loss", "mode": "min", "trials": 50, "parallel": 2, **keys})


def complete(number: int, values: dict[str, Any], value: float, curve: dict[int, float] | None = None) -> Trial:
    return Trial(number, values, "complete", value, curve or {})


def history(count: int) -> list[Trial]:
    trials: list[Trial] = []
    for number in range(count):
        trials.append(complete(number, Study(search(), trials).ask(), number % 7))
    return trials


def test_the_same_trials_lead_to_the_same_next_one_with_values_of_the_space_as_a_run_gets_them() -> None:
    trials = history(15)
    assert Study(search(), trials).ask() == Study(search(), trials).ask()
    assert Study(search(), trials).ask() != Study(search(seed=1), trials).ask()
    for trial in trials:
        assert 1e-5 <= trial.values["params.lr"] <= 0.1
        assert trial.values["params.n"] in (2, 4, 6, 8)
        assert trial.values["params.act"] in ("relu", ["a", 1], None)
        assert trial.values["params.lr"] == float(f"{trial.values['params.lr']:.6g}")


def test_trials_asked_for_together_differ_and_are_those_asked_for_one_by_one() -> None:
    together = Study(search(), [])
    first, second = together.ask(), together.ask()
    assert first != second
    assert Study(search(), [Trial(0, first, "running")]).ask() == second


def test_a_good_region_is_searched_more() -> None:
    trials: list[Trial] = []
    for number in range(40):
        values = Study(search(), trials).ask()
        trials.append(complete(number, values, abs(values["params.lr"] - 0.01)))
    late = [trial.values["params.lr"] for trial in trials[20:]]
    assert sum(0.003 < lr < 0.03 for lr in late) > len(late) / 2


def test_trials_that_failed_or_have_values_outside_of_the_space_teach_nothing() -> None:
    odd = [Trial(0, {}, "failed"), Trial(1, {"params.lr": 7}, "running"), complete(2, {"params.act": "x"}, 1.0)]
    assert Study(search(), odd).ask().keys() == SPACE.keys()


def test_a_run_that_is_worse_than_the_median_is_pruned() -> None:
    pruned = search(pruner=Method("median", {"n_startup_trials": 3, "n_warmup_steps": 2}))
    values = Study(search(), []).ask()
    trials = [complete(number, values, 1.0, {1: 1.0, 5: 1.0}) for number in range(3)]
    bad, good = Trial(3, values, "running", None, {5: 2.0}), Trial(4, values, "running", None, {5: 0.5})
    early = Trial(5, values, "running", None, {1: 2.0})
    study = Study(pruned, [*trials, bad, good, early])
    assert study.why_prune(bad) == "pruned by the median pruner at step 5"
    assert study.why_prune(good) == study.why_prune(early) == ""
    assert Study(search(), [*trials, bad]).why_prune(bad) == ""


def test_of_long_curves_of_ended_trials_optuna_gets_what_pruners_compare() -> None:
    pruned = search(pruner=Method("median", {"n_startup_trials": 3}))
    values = Study(search(), []).ask()
    trials = [complete(number, values, 1.0, dict.fromkeys(range(1, 1001), 1.0)) for number in range(3)]
    bad = Trial(3, values, "running", None, dict.fromkeys(range(1, 501), 2.0))
    study = Study(pruned, [*trials, bad])
    assert study.why_prune(bad) == "pruned by the median pruner at step 500"
    assert [len(trial.intermediate_values) for trial in study._study.trials] == [2, 2, 2, 500]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"sampler": Method("tpe", {"n_startup_trial": 1})}, "did you mean 'n_startup_trials'"),
        ({"sampler": Method("random", {"seed": 1})}, "random has no setting 'seed'"),
        ({"pruner": Method("percentile", {})}, "percentile does not accept these settings"),
        ({"pruner": Method("median", {"n_startup_trials": -1})}, "median does not accept these settings"),
    ],
)
def test_a_wrong_setting_is_named(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_methods(search(**keys))


def test_without_optuna_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(NotAvailable, match=r"pip install 'slurmtrain\[optuna\]'"):
        check_methods(search())
