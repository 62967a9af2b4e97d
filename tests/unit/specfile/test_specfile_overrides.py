"""Overrides of the command line."""

from __future__ import annotations

from typing import Any

import pytest
from helpers.specfiles import BASE, SWEPT, Load, Mistakes, only_run, params_of

from slurmtrain.model.experiment.plan import Plan


def test_an_override_wins_over_the_file(load: Load) -> None:
    run = only_run(load(SWEPT, "params.lr=1e-3", "resources.nodes=4", "name=other", "slurm.partition=gpu"))
    assert run.plan.content["params"]["lr"] == 0.001
    assert run.plan.spec.resources.nodes.to_dict() == 4
    assert run.plan.spec.name == "other"
    assert run.plan.spec.slurm == {"partition": "gpu"}
    assert run.overrides == ("params.lr=1e-3", "resources.nodes=4", "name=other", "slurm.partition=gpu")


def test_an_override_reads_its_value_as_yaml_but_leaves_a_time_as_text(load: Load) -> None:
    run = only_run(load(BASE, "resources.time=12:00:00", "checkpoint.every={steps: 5}", "setup=[a, b]", "env.A='1'"))
    assert run.plan.spec.resources.time == 43200
    assert run.plan.spec.checkpoint.every.to_dict() == {"steps": 5}
    assert run.plan.spec.setup == ("a", "b")
    assert run.plan.spec.env == {"A": "1"}


def test_an_override_inside_a_value_replaces_the_value(load: Load) -> None:
    run = only_run(load(BASE + "checkpoint: {every: {minutes: 5}}\n", "checkpoint.every.steps=7"))
    assert run.plan.spec.checkpoint.every.to_dict() == {"steps": 7}


def test_a_new_parameter_is_added_with_a_plus(load: Load) -> None:
    assert params_of(load(BASE, "+params.opt.beta=0.9")) == [{"opt": {"beta": 0.9}}]


NEWEST = {"last": 3, "every_steps": None, "best": None}
BEST = {"metric": "val_loss", "mode": "min", "n": 1}


@pytest.mark.parametrize(
    ("written", "override", "keep"),
    [
        (None, "checkpoint.keep=5", {**NEWEST, "last": 5}),
        (None, "checkpoint.keep.last=5", {**NEWEST, "last": 5}),
        (None, "checkpoint.keep.best.metric=val_loss", {**NEWEST, "best": BEST}),
        ("4", "checkpoint.keep.last=5", {**NEWEST, "last": 5}),
        ("4", "checkpoint.keep.best.metric=val_loss", {**NEWEST, "last": 4, "best": BEST}),
        ("{best: {metric: a, n: 2}}", "checkpoint.keep.best.n=1", {**NEWEST, "best": {**BEST, "metric": "a"}}),
        ("{best: {metric: a}}", "checkpoint.keep.best=null", NEWEST),
        ("{every_steps: 7}", "checkpoint.keep.last=2", {**NEWEST, "last": 2, "every_steps": 7}),
        ("{every_steps: 7}", "checkpoint.keep={last: 2}", {**NEWEST, "last": 2}),
    ],
)  # fmt: skip
def test_an_override_may_set_all_or_part_of_keep(
    load: Load, written: str | None, override: str, keep: dict[str, Any]
) -> None:
    text = BASE if written is None else f"{BASE}checkpoint: {{keep: {written}}}\n"
    plan = only_run(load(text, override)).plan
    assert plan.to_json()["spec"]["checkpoint"]["keep"] == keep
    assert Plan.from_json(plan.to_json()) == plan


def test_a_level_given_alone_survives_an_override_of_another_key(load: Load) -> None:
    plan = only_run(load(BASE + "preflight: {clock: warn}\n", "preflight.clock.fail_ms=5000")).plan
    assert (plan.spec.preflight.clock.level, plan.spec.preflight.clock.fail_ms) == ("warn", 5000)


def test_a_sweep_may_vary_keep_and_quota(load: Load) -> None:
    swept = load(BASE + "sweep:\n  checkpoint.keep: [1, {last: 2, every_steps: 10}]\n  checkpoint.quota: [1GB]\n")
    kept = [run.plan.spec.checkpoint.keep for run in swept.runs]
    assert [(keep.last, keep.every_steps) for keep in kept] == [(1, None), (2, 10)]
    assert [run.plan.spec.checkpoint.quota for run in swept.runs] == [1 << 30] * 2


@pytest.mark.parametrize(
    ("text", "line", "key", "message"),
    [
        ("checkpoint:\n  every: auto\n  keep: 0\n", "4", "checkpoint.keep", "which must be kept"),
        ("checkpoint:\n  keep:\n    last: 0\n", "4", "checkpoint.keep.last", "which must be kept"),
        ("checkpoint:\n  keep:\n    best:\n      mode: max\n", "4", "checkpoint.keep.best.metric", "required"),
        ("checkpoint:\n  quota: 5\n", "3", "checkpoint.quota", "has no unit"),
    ],
)
def test_a_mistake_in_keep_is_reported_at_its_line(
    mistakes: Mistakes, text: str, line: str, key: str, message: str
) -> None:
    [(where, at, explanation)] = mistakes(BASE + text)
    assert (where, at) == (line, key)
    assert message in explanation


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("resources.nods=2", "there is no key 'resources.nods'; did you mean 'nodes'?"),
        ("resourcs.nodes=2", "there is no key 'resourcs'; did you mean 'resources'?"),
        ("checkpoint.keep.lst=2", "there is no key 'checkpoint.keep.lst'; did you mean 'last'?"),
        ("checkpoint.keep.best.metrics=x", "there is no key 'checkpoint.keep.best.metrics'; did you mean 'metric'?"),
        (
            "params.lrr=2",
            "there is no 'params.lrr' in the spec; did you mean 'lr'?; +params.lrr=... adds a new parameter",
        ),
        ("tracking.mlflow.host=2", "there is no key 'tracking.mlflow.host'"),
        ("resources.nodes", "expected key=value without blanks, for example resources.nodes=2"),
        ("=2", "expected key=value without blanks, for example resources.nodes=2"),
        ("sweep.params.lr=2", "a sweep is varied with --sweep key=value,value"),
        ("params.lr=[1", "the value is not YAML"),
    ],
)
def test_an_override_of_a_key_that_does_not_exist_is_refused(mistakes: Mistakes, override: str, message: str) -> None:
    [(where, _, explanation)] = mistakes(SWEPT, override)
    assert where == f"command line ({override})"
    assert explanation.startswith(message)


@pytest.mark.parametrize(
    "override",
    ["resources.nodes=0", "resources.nodes.x=1", "checkpoint.every.steps=0", "resources=3", "slurm.partitoin=x",
     "checkpoint.keep=0", "checkpoint.keep.last=0", "checkpoint.keep.every_steps=0", "checkpoint.quota=7",
     "name=a/b", "setup.0=x", "command=''", "resources.mem=4", "params.lr={password: x}"],
)  # fmt: skip
def test_a_wrong_value_of_an_override_is_reported_at_the_command_line(mistakes: Mistakes, override: str) -> None:
    [(where, _, _)] = mistakes(SWEPT, override)
    assert where == f"command line ({override})"


@pytest.mark.parametrize(
    "value", ["!!bool maybe", "!!int ''", "&a [*a]", "\x07", "[" * 3000, "2024-01-01", "{[a]: b}", "${"]
)
def test_an_override_that_the_yaml_reader_cannot_process_is_a_mistake(mistakes: Mistakes, value: str) -> None:
    assert mistakes(SWEPT, f"params.lr={value}")


def test_an_override_of_one_option_of_sbatch_keeps_the_others(load: Load) -> None:
    run = only_run(load("name: x\ncommand: y\nslurm: {partition: spot, sbatch: [--exclusive]}\n", "slurm.qos=high"))
    assert run.plan.spec.slurm == {"partition": "spot", "sbatch": ("--exclusive",), "qos": "high"}
