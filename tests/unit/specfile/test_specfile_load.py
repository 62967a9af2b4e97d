"""Plans of specs, also of sweeps and of scripts whose metrics are read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers.specfiles import BASE, PYTHON, SWEPT, Load, Mistakes, only_run, params_of

from slurmtrain.errors import SpecError
from slurmtrain.model.experiment.plan import REDACTED, Plan
from slurmtrain.model.experiment.spec import write_spec
from slurmtrain.specfile import load_spec, replan

# --- plans -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("workdir", "resolved"), [("sub", "/srv/here/sub"), ("/abs/x", "/abs/x"), ("../x", "/srv/x")])
def test_a_workdir_counts_from_where_submit_was_called(load: Load, workdir: str, resolved: str) -> None:
    assert only_run(load(BASE + f"workdir: {workdir}\n", cwd=Path("/srv/here"))).plan.workdir == resolved


def test_no_spec_changes_the_defaults_that_it_shares_with_others(load: Load) -> None:
    untouched = json.dumps(write_spec(only_run(load(BASE)).plan.spec))
    changes = ("slurm.comment=a", "env.A=1", "+params.new=[1,2]", "checkpoint.keep.last=9", "tracking.csv.enabled=true")
    for planned in load(SWEPT, *changes, sweep=["params.lr=1,2"]).runs:
        replan(planned.plan, ("requeue.max_failures=7", "env.B=2"))
    assert json.dumps(write_spec(only_run(load(BASE)).plan.spec)) == untouched


# --- planning again --------------------------------------------------------------------------------------------------


def test_planning_again_follows_interpolations(load: Load) -> None:
    text = "command: python train.py --steps ${params.steps}\nparams: {steps: 100, warmup: '${params.steps}'}\n"
    plan = Plan.from_json(json.loads(json.dumps(only_run(load(text)).plan.to_json())))
    again = replan(plan, ["params.steps=400"])
    assert again.plan.spec.command == "python train.py --steps 400"
    assert again.plan.spec.params == {"steps": 400, "warmup": 400}
    assert again.overrides == ("params.steps=400",)
    once_more = replan(again.plan, ["resources.time=1:00:00"])
    assert once_more.plan.spec.params["warmup"] == 400
    assert once_more.plan.spec.resources.time == 3600


def test_planning_again_keeps_workdir_and_python_unless_overridden(load: Load) -> None:
    plan = only_run(load(SWEPT + "workdir: sub\n", cwd=Path("/srv/here"))).plan
    again = replan(plan, ["params.lr=2"]).plan
    assert (again.workdir, again.python) == ("/srv/here/sub", PYTHON)
    assert replan(plan, ["workdir=/other"]).plan.workdir == "/other"


def test_planning_again_with_a_mistake_names_the_override(load: Load) -> None:
    plan = only_run(load(SWEPT)).plan
    with pytest.raises(SpecError) as raised:
        replan(plan, ["resources.nodes=0", "params.nope=1"])
    assert {one.where for one in raised.value.mistakes} == {
        "command line (resources.nodes=0)",
        "command line (params.nope=1)",
    }


def test_a_run_keeps_its_name(load: Load) -> None:
    with pytest.raises(SpecError, match="the name of a run cannot be changed"):
        replan(only_run(load(SWEPT)).plan, ["name=other"])


def test_planning_again_with_a_secret_passes_it_on_without_recording_it(load: Load) -> None:
    plan = only_run(load(SWEPT + "env: {API_TOKEN: hunter2}\n")).plan
    again = replan(plan, ["env.API_TOKEN=hunter3"])
    assert again.secrets == {"API_TOKEN": "hunter3"}
    assert "hunter" not in json.dumps(again.plan.to_json())
    assert replan(plan, ["params.lr=2"]).secrets == {}


@pytest.mark.parametrize(
    ("file", "experiment"),
    [
        ("digits.yaml", "digits"),
        ("digits/train.yaml", "digits"),
        ("vision/Config.yml", "vision"),
        ("a b.yaml", "lr-0.1"),
    ],
)
def test_runs_of_a_spec_file_are_one_experiment_however_they_are_named(
    tmp_path: Path, file: str, experiment: str
) -> None:
    path = tmp_path / file
    path.parent.mkdir(exist_ok=True)
    path.write_text("command: 'true'\nname: lr-0.1\nparams: {a: 0}\n")
    plan = only_run(load_spec(path, cwd=tmp_path, python=PYTHON)).plan
    assert plan.spec.tracking.mlflow.experiment == experiment
    again = replan(plan, ["params.a=1"]).plan
    assert again.spec.tracking.mlflow.experiment == experiment


def test_a_run_of_a_sweep_knows_what_varies_but_no_secret(load: Load) -> None:
    sweep = {"params.lr": [0.1, 0.2], "params.size": [4], "env.API_TOKEN": ["first-one", "second-one"]}
    runs = load(json.dumps({"command": "true", "params": {"lr": 1, "size": 2}, "sweep": sweep})).runs
    assert [run.varies for run in runs] == [{"params.lr": lr, "env.API_TOKEN": REDACTED} for lr in (0.1, 0.1, 0.2, 0.2)]


# --- warnings ---------------------------------------------------------------------------------------------------------


def test_layers_that_are_divided_over_nodes_are_warned_of(load: Load) -> None:
    text = BASE + "strategy: {name: tensor}\nresources: {nodes: 2, procs_per_node: 2}\n"
    [warning] = load(text).warnings
    assert warning.key == "strategy"
    assert "each layer is divided over 4 processes (tp), but a node has 2" in warning.message
    assert load(text, "strategy.mesh={tp: 2}", "strategy.name=fsdp").warnings == ()
    assert load(text, "resources.nodes=1", "resources.procs_per_node=4").warnings == ()


def test_a_sweep_on_the_command_line_wins_over_the_files_key_by_key(load: Load) -> None:
    loaded = load(SWEPT + "sweep: {params.lr: [1, 2], params.steps: [5, 6]}\n", sweep=["params.lr=9"])
    assert [(params["lr"], params["steps"]) for params in params_of(loaded)] == [(9, 5), (9, 6)]


def test_overrides_hold_for_every_run_of_a_sweep(load: Load) -> None:
    loaded = load(SWEPT, "params.steps=77", sweep=["params.lr=1,2"])
    assert [(params["lr"], params["steps"]) for params in params_of(loaded)] == [(1, 77), (2, 77)]
    assert [run.overrides for run in loaded.runs] == [
        ("params.steps=77", "params.lr=1"),
        ("params.steps=77", "params.lr=2"),
    ]


def test_a_wrong_value_in_a_sweep_is_reported_at_the_line_of_the_sweep(mistakes: Mistakes) -> None:
    reported = mistakes(SWEPT + "resources:\n  nodes: 1\nsweep:\n  params.lr: [1, 2]\n  resources.nodes: [1, 0]\n")
    assert [line for line, _, _ in reported] == ["7"]
    assert "found 0" in reported[0][2]


@pytest.mark.parametrize("sweep", ["params.lr=", "params.lr=[]", "params.lr=1,1", "params.lr=[1", "params.lr"])
def test_a_sweep_on_the_command_line_is_checked_like_one_in_the_file(mistakes: Mistakes, sweep: str) -> None:
    [(where, _, _)] = mistakes(SWEPT, sweep=[sweep])
    assert where == f"command line ({sweep})"


@pytest.mark.parametrize(
    ("sweep", "line", "key", "message"),
    [
        ("  zip:\n    params.steps: [1]\n    params.lrr: [2]\n", "6", "sweep.zip.params.lrr", "did you mean 'lr'?"),
        ("  params.lr: [1, 2]\n  exclude:\n  - params.lr: 1\n  - params.lr: 2\n", "5", "sweep.exclude", "all of the 2"),
        ("  params.lr:\n  - 1\n  - .nan\n", "6", "params.lr", "no such number"),
        ("  params.lr: [1]\n  include:\n  - resources.nodes: 0\n", "6", "resources.nodes", "found 0"),
    ],
)  # fmt: skip
def test_a_mistake_names_the_line_that_holds_it(
    mistakes: Mistakes, sweep: str, line: str, key: str, message: str
) -> None:
    [(where, at, why)] = mistakes(f"{SWEPT}sweep:\n{sweep}")
    assert (where, at) == (line, key)
    assert message in why


def test_what_a_sweep_hardly_means_is_warned_of(load: Load) -> None:
    sweep = "sweep:\n  points: [{params.lr: 1}, {params.lr: 1, params.steps: 10}]\n  exclude:\n  - params.lr: 7\n"
    warnings = [(warning.where.rpartition(":")[2], warning.message) for warning in load(SWEPT + sweep).warnings]
    assert warnings == [
        ("3", "runs 1 and 2 of the sweep are identical"),
        ("6", "this rule excludes no run"),
    ]


def test_a_secret_in_any_part_of_a_sweep_is_not_recorded(load: Load) -> None:
    sweep = "sweep:\n  zip: {env.API_TOKEN: [hunter2, hunter3]}\n  include:\n  - {env.API_TOKEN: hunter4}\n"
    loaded = load(SWEPT + "env: {API_TOKEN: x1234}\n" + sweep)
    assert [run.secrets["API_TOKEN"] for run in loaded.runs] == ["hunter2", "hunter3", "hunter4"]
    assert "hunter" not in loaded.text
    assert "hunter" not in repr([(run.plan, run.overrides, run.varies) for run in loaded.runs])


def test_a_sweep_may_say_how_many_of_its_runs_run_at_once_which_is_in_no_plan(load: Load) -> None:
    swept = SWEPT + "sweep: {params.lr: [1, 2]}\n"
    loaded = load(SWEPT + "sweep: {params.lr: [1, 2], parallel: 2}\n")
    assert loaded.parallel == 2
    assert [run.plan.hash for run in loaded.runs] == [run.plan.hash for run in load(swept).runs]
    assert load(SWEPT + "sweep: {params.lr: [1, 2], parallel: 2}\n", sweep=["parallel=5"]).parallel == 5
    assert load(swept).parallel is None


BEGIN = "command: python x.py\ntracking:\n  metrics:\n"


@pytest.mark.parametrize("written", ["off", "'off'", "false", "{pattern: null, file: null}"])
def test_metrics_of_scripts_are_guessed_unless_that_is_off(load: Load, written: str) -> None:
    off = load(f"command: python x.py\ntracking: {{metrics: {written}}}\n").runs[0].plan
    assert off.spec.tracking.metrics is not None
    assert off.spec.tracking.metrics.is_off
    again = Plan.from_json(off.to_json())
    assert (again.spec, again.hash) == (off.spec, off.hash)
    for default in ("auto", "true", "null"):
        plan = load(f"command: python x.py\ntracking: {{metrics: {default}}}\n").runs[0].plan
        assert (plan.spec.tracking.metrics, plan.hash) == (None, load("command: python x.py\n").runs[0].plan.hash)


@pytest.mark.parametrize(
    ("lines", "line", "expected"),
    [
        ("    pattern: 'loss=(?P<loss'", 4, "is not a regular expression: missing >"),
        (r"    pattern: 'loss=(\S+)'", 4, "it names neither a metric nor a step: give each a named group"),
        ("    pattern: '(?P<a>.)'\n    step: '('", 5, "is not a regular expression: missing )"),
        ("    pattern: '(?P<a>.)(?P<step>.)'\n    step: '(.)'", 5, "'pattern' has a group 'step' already"),
        ("    pattern: '(?P<a>.)'\n    file: m.csv", 5, "'file' and 'pattern' exclude each other"),
        ("    step: iter", 3, "set 'pattern', such as"),
    ],
)  # fmt: skip
def test_a_mistake_is_told_with_its_line(mistakes: Mistakes, lines: str, line: int, expected: str) -> None:
    [(where, _, message)] = mistakes(BEGIN + lines + "\n")
    assert where == str(line)
    assert expected in message
