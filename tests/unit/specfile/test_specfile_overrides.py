"""Overrides of the command line, and where the values of a plan come from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers.specfiles import BASE, SWEPT, Load, Mistakes, only_run

from slurmtrain.model.experiment.plan import Plan


def test_an_override_reads_its_value_as_yaml_but_leaves_a_time_as_text(load: Load) -> None:
    run = only_run(load(BASE, "resources.time=12:00:00", "checkpoint.every={steps: 5}", "setup=[a, b]", "env.A='1'"))
    assert run.plan.spec.resources.time == 43200
    assert run.plan.spec.checkpoint.every.to_dict() == {"steps": 5}
    assert run.plan.spec.setup == ("a", "b")
    assert run.plan.spec.env == {"A": "1"}


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


def test_a_sweep_may_vary_keep_and_quota(load: Load) -> None:
    swept = load(BASE + "sweep:\n  checkpoint.keep: [1, {last: 2, every_steps: 10}]\n  checkpoint.quota: [1GB]\n")
    kept = [run.plan.spec.checkpoint.keep for run in swept.runs]
    assert [(keep.last, keep.every_steps) for keep in kept] == [(1, None), (2, 10)]
    assert [run.plan.spec.checkpoint.quota for run in swept.runs] == [1 << 30] * 2


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
    [
        "resources.nodes=0", "resources.nodes.x=1", "checkpoint.every.steps=0", "resources=3", "slurm.partitoin=x",
        "checkpoint.keep=0", "checkpoint.keep.last=0", "checkpoint.keep.every_steps=0", "checkpoint.quota=7",
        "name=a/b", "setup.0=x", "command=''", "resources.mem=4", "params.lr={password: x}",
    ],
)  # fmt: skip
def test_a_wrong_value_of_an_override_is_reported_at_the_command_line(mistakes: Mistakes, override: str) -> None:
    [(where, _, _)] = mistakes(SWEPT, override)
    assert where == f"command line ({override})"


SPEC = """extends: base.yaml
command: python train.py --lr ${params.lr}
params: {lr: 0.1}
slurm: {cores-per-socket: 2}
checkpoint:
  every: {minutes: 3}
sweep:
  params.width: [4,
    8]
"""


def sources_of(load: Load, text: str, *overrides: str, sweep: tuple[str, ...] = (), index: int = 0) -> dict[str, str]:
    spec = load(text, *overrides, sweep=sweep)
    return {
        each.key: str(each).replace(f"{spec.path.parent if spec.path else ''}/", "")
        for each in spec.sources(spec.runs[index])
    }


@pytest.fixture(autouse=True)
def base(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text("name: a\nparams: {width: 1,\n  depth: 2}\nresources: {nodes: 2}\n")


def test_a_value_comes_from_the_line_of_the_file_that_sets_it(load: Load) -> None:
    sources = sources_of(load, SPEC)
    assert sources["params.depth"] == "base.yaml:3"
    assert sources["resources.nodes"] == "base.yaml:4"
    assert sources["params.lr"] == "exp.yaml:3"
    assert sources["slurm.cores-per-socket"] == "exp.yaml:4"
    assert sources["checkpoint.every.minutes"] == "exp.yaml:6"


def test_the_command_line_comes_before_the_file_and_the_last_override_before_others(load: Load) -> None:
    sources = sources_of(load, SPEC, "params.lr=1", "params.lr=2", "checkpoint.every.steps=5")
    assert sources["params.lr"] == "command line (params.lr=2)"
    assert sources["checkpoint.every.steps"] == "command line (checkpoint.every.steps=5)"


def test_a_swept_value_comes_from_its_item_in_the_sweep(load: Load) -> None:
    assert sources_of(load, SPEC, "params.width=3")["params.width"] == "sweep, exp.yaml:8"
    assert sources_of(load, SPEC, index=1)["params.width"] == "sweep, exp.yaml:9"
    swept = sources_of(load, SPEC, sweep=("params.lr=1,2",))
    assert swept["params.lr"] == "sweep, command line (params.lr=1,2)"


def test_a_section_in_short_sets_one_of_its_keys(load: Load) -> None:
    sources = sources_of(load, "command: python a.py\ncheckpoint: {keep: 7}\npreflight:\n  clock: warn\n")
    assert sources["checkpoint.keep.last"] == "exp.yaml:2"
    assert sources["checkpoint.keep.best"] == "default"
    assert sources["preflight.clock.level"] == "exp.yaml:4"
    assert sources["preflight.clock.warn_ms"] == "default"


def test_a_secret_of_the_command_line_is_in_no_source(load: Load) -> None:
    spec = load("command: python a.py\n", "env.API_TOKEN=hunter2")
    assert "hunter2" not in repr(spec.sources(spec.runs[0]))
