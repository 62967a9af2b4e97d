"""Sweeps of the file and of the command line."""

from __future__ import annotations

import pytest
from helpers.specfiles import SWEPT, Load, Mistakes, only_run, params_of


def test_a_sweep_in_the_file_becomes_one_run_for_each_combination(load: Load) -> None:
    loaded = load(SWEPT + "sweep: {params.lr: [1, 2], resources.nodes: [1, 3]}\n")
    assert [(run.plan.content["params"]["lr"], run.plan.spec.resources.nodes.to_dict()) for run in loaded.runs] == [
        (1, 1),
        (1, 3),
        (2, 1),
        (2, 3),
    ]
    assert loaded.runs[1].overrides == ("params.lr=1", "resources.nodes=3")
    assert len({run.plan.hash for run in loaded.runs}) == 4
    assert [run.plan.spec.command for run in loaded.runs][::2] == ["python train.py --lr 1", "python train.py --lr 2"]


@pytest.mark.parametrize("sweep", ["params.lr=1,2", "params.lr=[1, 2]", "params.lr=1, 2"])
def test_a_sweep_on_the_command_line_becomes_one_run_for_each_value(load: Load, sweep: str) -> None:
    assert [params["lr"] for params in params_of(load(SWEPT, sweep=[sweep]))] == [1, 2]


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


def test_a_sweep_may_vary_texts_and_lists(load: Load) -> None:
    loaded = load(SWEPT + "sweep:\n  params.name: ['a,b', 'c d']\n  params.lr: [[1, 2], [3]]\n")
    assert [(params["name"], params["lr"]) for params in params_of(loaded)] == [
        ("a,b", [1, 2]),
        ("a,b", [3]),
        ("c d", [1, 2]),
        ("c d", [3]),
    ]


def test_a_plan_does_not_contain_the_sweep(load: Load) -> None:
    run = load(SWEPT + "sweep: {params.lr: [1, 2]}\n").runs[0]
    assert "sweep" not in run.plan.template
    assert run.plan.hash == only_run(load(SWEPT, "params.lr=1")).plan.hash


@pytest.mark.parametrize(
    ("sweep", "line", "key"),
    [
        ("sweep: [1]\n", "3", "sweep"),
        ("sweep:\n  params.lr: 3\n", "4", "sweep.params.lr"),
        ("sweep:\n  params.lr: []\n", "4", "sweep.params.lr"),
        ("sweep:\n  params.lr: [1, 1]\n", "4", "sweep.params.lr"),
        ("sweep:\n  params.lrr: [1, 2]\n", "4", "sweep.params.lrr"),
        ("sweep:\n  resources.node: [1, 2]\n", "4", "sweep.resources.node"),
    ],
)
def test_a_wrong_sweep_is_reported_at_its_line(mistakes: Mistakes, sweep: str, line: str, key: str) -> None:
    reported = mistakes(SWEPT + sweep)
    assert [(where, at) for where, at, _ in reported] == [(line, key)]


def test_a_wrong_value_in_a_sweep_is_reported_at_the_line_of_the_sweep(mistakes: Mistakes) -> None:
    reported = mistakes(SWEPT + "resources:\n  nodes: 1\nsweep:\n  params.lr: [1, 2]\n  resources.nodes: [1, 0]\n")
    assert [line for line, _, _ in reported] == ["7"]
    assert "found 0" in reported[0][2]


@pytest.mark.parametrize("sweep", ["params.lr=", "params.lr=[]", "params.lr=1,1", "params.lr=[1", "params.lr"])
def test_a_sweep_on_the_command_line_is_checked_like_one_in_the_file(mistakes: Mistakes, sweep: str) -> None:
    [(where, _, _)] = mistakes(SWEPT, sweep=[sweep])
    assert where == f"command line ({sweep})"


def test_a_sweep_of_too_many_runs_on_the_command_line_is_refused(mistakes: Mistakes) -> None:
    hundred = ",".join(map(str, range(101)))
    assert "10201 runs" in mistakes(SWEPT, sweep=[f"params.lr={hundred}", f"params.steps={hundred}"])[0][2]


def test_everything_of_a_sweep_can_be_given_on_the_command_line(load: Load) -> None:
    sweep = ["zip={params.lr: [1, 2], params.steps: [3, 4]}", "params.name=choice(x, y)", "samples=2", "seed=1"]
    runs = [(params["lr"], params["steps"]) for params in params_of(load(SWEPT, sweep=sweep))]
    assert runs == [(1, 3), (1, 3), (2, 4), (2, 4)]
    loaded = load(SWEPT + "sweep: {params.lr: [1, 2], exclude: [{params.lr: 1}]}\n", sweep=["exclude=[{params.lr: 2}]"])
    assert [params["lr"] for params in params_of(loaded)] == [1]


@pytest.mark.parametrize("sweep", ["params.lr=linspace(0, 1, 3)", "params.lr='linspace(0,1,3)'"])
def test_values_in_short_can_be_given_on_the_command_line(load: Load, sweep: str) -> None:
    assert [params["lr"] for params in params_of(load(SWEPT, sweep=[sweep]))] == [0.0, 0.5, 1.0]


@pytest.mark.parametrize(
    ("sweep", "line", "key", "message"),
    [
        (
            "  zip:\n    params.lr: [1, 2]\n    params.steps: [1]\n",
            "4",
            "sweep.zip",
            "params.lr has 2, params.steps has 1",
        ),
        ("  zip:\n    params.steps: [1]\n    params.lrr: [2]\n", "6", "sweep.zip.params.lrr", "did you mean 'lr'?"),
        (
            "  points:\n  - params.lr: 1\n  - params.stpes: 1\n",
            "6",
            "sweep.points.1.params.stpes",
            "did you mean 'steps'?",
        ),
        ("  params.lr: [1]\n  exlude: []\n", "5", "sweep.exlude", "did you mean 'exclude'?"),
        ("  params.lr: [1, 2]\n  exclude:\n  - params.lr: 1\n  - params.lr: 2\n", "5", "sweep.exclude", "all of the 2"),
        ("  params.lr:\n  - 1\n  - .nan\n", "6", "params.lr", "no such number"),
        ("  params.lr: [1]\n  include:\n  - resources.nodes: 0\n", "6", "resources.nodes", "found 0"),
        ("  params.lr: range(1000)\n  params.steps: range(1000)\n", "3", "sweep", "1000000 runs"),
        ("  {}\n", "3", "sweep", "varies nothing"),
    ],
)
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


@pytest.mark.parametrize(
    ("sweep", "message"),
    [
        ("{params.lr: [1, 2], parallel: 0}", "expected a whole number"),
        ("{params.lr: [1, 2], paralel: 2}", "did you mean 'parallel'?"),
        ("{parallel: 2}", "the sweep varies nothing"),
    ],
)
def test_a_wrong_number_of_runs_at_once_is_refused(mistakes: Mistakes, sweep: str, message: str) -> None:
    assert message in str(mistakes(SWEPT + f"sweep: {sweep}\n"))
