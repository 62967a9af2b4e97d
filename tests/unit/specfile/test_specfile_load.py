"""The plans of a spec, and planning the next attempt of a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers.specfiles import BASE, PYTHON, SWEPT, Load, only_run

from slurmtrain.errors import SpecError
from slurmtrain.model.spec.plan import REDACTED, Plan
from slurmtrain.model.spec.spec import write_spec
from slurmtrain.specfile import PlannedRun, load_spec, replan

# --- plans -----------------------------------------------------------------------------------------------------------


def test_the_hash_of_a_spec_does_not_depend_on_workdir_and_python(tmp_path: Path) -> None:
    path = tmp_path / "exp.yaml"
    path.write_text(SWEPT)
    first = only_run(load_spec(path, cwd=tmp_path, python="/usr/bin/python3")).plan
    second = only_run(load_spec(path, cwd=Path("/srv/elsewhere"), python="/opt/py")).plan
    assert first.hash == second.hash
    assert (first.workdir, first.python) == (str(tmp_path.resolve()), "/usr/bin/python3")
    assert (second.workdir, second.python) == ("/srv/elsewhere", "/opt/py")


@pytest.mark.parametrize(("workdir", "resolved"), [("sub", "/srv/here/sub"), ("/abs/x", "/abs/x"), ("../x", "/srv/x")])
def test_a_workdir_counts_from_where_submit_was_called(load: Load, workdir: str, resolved: str) -> None:
    assert only_run(load(BASE + f"workdir: {workdir}\n", cwd=Path("/srv/here"))).plan.workdir == resolved


def test_a_run_is_named_for_its_file_unless_the_spec_names_it(load: Load) -> None:
    assert only_run(load(BASE)).plan.spec.name == "exp"
    assert only_run(load(BASE + "name: mine\n")).plan.spec.name == "mine"
    assert only_run(load(BASE, "name=yours")).plan.spec.name == "yours"


def test_no_spec_changes_the_defaults_that_it_shares_with_others(load: Load) -> None:
    untouched = json.dumps(write_spec(only_run(load(BASE)).plan.spec))
    changes = ("slurm.comment=a", "env.A=1", "+params.new=[1,2]", "checkpoint.keep.last=9", "tracking.csv.enabled=true")
    for planned in load(SWEPT, *changes, sweep=["params.lr=1,2"]).runs:
        replan(planned.plan, ("requeue.max_failures=7", "env.B=2"))
    assert json.dumps(write_spec(only_run(load(BASE)).plan.spec)) == untouched


# --- planning again --------------------------------------------------------------------------------------------------


def test_planning_again_without_overrides_is_the_same_plan(load: Load) -> None:
    plan = only_run(load(SWEPT)).plan
    assert replan(plan, ()) == PlannedRun(plan, (), {})


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


def test_planning_again_keeps_the_values_of_a_sweep(load: Load) -> None:
    plan = load(SWEPT, sweep=["params.lr=1,2"]).runs[1].plan
    assert replan(plan, ["params.steps=99"]).plan.spec.params == {"lr": 2, "steps": 99, "name": "a"}


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
    with pytest.raises(SpecError, match="a run keeps its name"):
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
    assert "each layer is divided over 4 processes (tp), and a node has 2" in warning.message
    assert load(text, "strategy.mesh={tp: 2}", "strategy.name=fsdp").warnings == ()
    assert load(text, "resources.nodes=1", "resources.procs_per_node=4").warnings == ()
