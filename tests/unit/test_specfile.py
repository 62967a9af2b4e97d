"""From a YAML file and overrides to plans, and every mistake at its line."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slurmtrain.errors import PlaceError, SlurmtrainError, SpecError
from slurmtrain.model.spec.plan import Plan
from slurmtrain.specfile import PlannedRun, SpecFile, load_spec, replan

PYTHON = "/usr/bin/python3"
Load = Callable[..., SpecFile]
Mistakes = Callable[..., list[tuple[str, str, str]]]


@pytest.fixture
def load(tmp_path: Path) -> Load:
    """Write a spec to ``exp.yaml`` and load it."""

    def load(text: str, *overrides: str, sweep: Sequence[str] = (), cwd: Path = tmp_path) -> SpecFile:
        path = tmp_path / "exp.yaml"
        path.write_text(text)
        return load_spec(path, overrides, sweep, cwd=cwd, python=PYTHON)

    return load


@pytest.fixture
def mistakes(load: Load, tmp_path: Path) -> Mistakes:
    """The mistakes of a spec as (where, key, message); a line of the file is written as a bare number."""

    def mistakes(text: str, *overrides: str, sweep: Sequence[str] = ()) -> list[tuple[str, str, str]]:
        with pytest.raises(SpecError) as raised:
            load(text, *overrides, sweep=sweep)
        assert raised.value.exit_code == 2
        file = f"{tmp_path / 'exp.yaml'}:"
        return [(one.where.removeprefix(file), one.key, one.message) for one in raised.value.mistakes]

    return mistakes


def only(planned: SpecFile) -> PlannedRun:
    [run] = planned.runs
    return run


def params_of(planned: SpecFile) -> list[dict[str, Any]]:
    return [run.plan.content["params"] for run in planned.runs]


BASE = "command: python train.py\n"
SWEPT = "command: python train.py --lr ${params.lr}\nparams: {lr: 0.1, steps: 10, name: a}\n"


# --- files that are no spec -------------------------------------------------------------------------------------


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(PlaceError, match=r"nowhere\.yaml: there is no such file") as raised:
        load_spec(tmp_path / "nowhere.yaml", cwd=tmp_path, python=PYTHON)
    assert raised.value.exit_code == 2


def test_a_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(PlaceError, match="this is a directory"):
        load_spec(tmp_path, cwd=tmp_path, python=PYTHON)


@pytest.mark.parametrize("text", ["", "\n\n", "# only a comment\n"])
def test_an_empty_file_is_told_so(mistakes: Mistakes, text: str) -> None:
    [(line, key, message)] = mistakes(text)
    assert (line, key) == ("1", "")
    assert "the file is empty" in message


@pytest.mark.parametrize("text", ["null\n", "~\n"])
def test_a_file_that_holds_null_is_no_mapping(mistakes: Mistakes, text: str) -> None:
    [(line, _, message)] = mistakes(text)
    assert line == "1"
    assert "expected a mapping" in message


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("command: x\nname: [a\n", "3"),
        ("command: x\nname: 'a\n", "3"),
        ("command: x\n\tname: a\n", "2"),
        ("command: x\n name: a\n", "2"),
        ("command: x\nname: a: b\n", "2"),
        ("command: x\nparams: {a: *nowhere}\n", "2"),
    ],
)
def test_a_syntax_error_is_reported_at_its_line(mistakes: Mistakes, text: str, line: str) -> None:
    [(where, _, message)] = mistakes(text)
    assert where == line
    assert message.startswith("this is not YAML: ")
    assert "\n" not in message


@pytest.mark.parametrize("text", ["- command: x\n", "just text\n", "42\n"])
def test_a_file_that_is_no_mapping_is_refused(mistakes: Mistakes, text: str) -> None:
    assert mistakes(text) == [("1", "", "expected a mapping (key: value) at the top")]


def test_a_key_that_stands_twice_is_refused_with_both_lines(mistakes: Mistakes) -> None:
    [(line, key, message)] = mistakes("command: a\nname: x\ncommand: b\n")
    assert (line, key) == ("3", "command")
    assert "first on line 1" in message


# --- one mistake each -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "line", "key", "message"),
    [
        ("\nresourses: {}\n", "3", "resourses", "unknown key; did you mean 'resources'?"),
        ("resources:\n  nodes: 1\n  nods: 2\n", "4", "resources.nods", "unknown key; did you mean 'nodes'?"),
        ("preflight:\n  clock:\n    warn: 1\n", "4", "preflight.clock.warn", "unknown key; did you mean 'warn_ms'?"),
        ("nodes: 2\n", "2", "nodes", "unknown key; it belongs under 'resources'"),
        ("resources: {nodes: two}\n", "2", "resources.nodes", "expected a whole number, found text ('two')"),
        ("resources:\n  nodes: -1\n", "3", "resources.nodes", "expected a whole number of at least 1, found -1"),
        ("resources:\n  nodes: 0\n", "3", "resources.nodes", "expected a whole number of at least 1, found 0"),
        ("resources:\n  mem: 4\n", "3", "resources.mem", "4 has no unit; write for example 4GB or 4MB"),
        ("resources: 3\n", "2", "resources", "expected a section (key: value), found a whole number (3)"),
        (
            "slurm:\n  partitoin: x\n",
            "3",
            "slurm.partitoin",
            "sbatch has no option --partitoin; did you mean 'partition'?",
        ),
        (
            "name: a/b\n",
            "2",
            "name",
            "'a/b' cannot name a run: '/' cannot be used; use letters, digits, '.', '_' and '-'",
        ),
        ("name: 5\n", "2", "name", "expected name, found a whole number (5); put it in quotes"),
        ("name: '   '\n", "2", "name", "expected name, found a blank text"),
        (f"name: {'x' * 300}\n", "2", "name", "a name has at most 64 characters, this one has 300"),
        ("setup: module load cuda\n", "2", "setup", "expected a list, found text ('module load cuda')"),
    ],
)
def test_a_mistake_is_reported_at_its_line(mistakes: Mistakes, text: str, line: str, key: str, message: str) -> None:
    assert mistakes(BASE + text) == [(line, key, message)]


@pytest.mark.parametrize(("name", "bad"), [('"a\\nb"', "'\\n'"), ('"a\'b"', '"\'"'), ("'a\"b'", "'\"'")])
def test_a_name_with_a_newline_or_a_quote_is_refused(mistakes: Mistakes, name: str, bad: str) -> None:
    [(line, key, message)] = mistakes(BASE + f"name: {name}\n")
    assert (line, key) == ("2", "name")
    assert f"{bad} cannot be used" in message


def test_an_unquoted_time_is_explained(mistakes: Mistakes) -> None:
    [(line, key, message)] = mistakes(BASE + "resources:\n  nodes: 1\n  time: 12:00:00\n")
    assert (line, key) == ("4", "resources.time")
    assert message == 'YAML reads an unquoted 12:00:00 as the number 43200; put it in quotes: "12:00:00"'


def test_a_time_that_is_said_to_be_text_is_one(load: Load) -> None:
    assert only(load(BASE + "resources: {time: !!str 12:00:00}\n")).plan.spec.resources.time == 43200


@pytest.mark.parametrize("command", ['"echo \'a"', "'echo \"a'"])
def test_unbalanced_quotes_in_the_command_are_refused(mistakes: Mistakes, command: str) -> None:
    [(line, key, message)] = mistakes(f"name: x\ncommand: {command}\n")
    assert (line, key) == ("2", "command")
    assert message.startswith("the quotes of the command do not match (No closing quotation)")


def test_a_list_of_dicts_in_params_is_refused_at_each_item(mistakes: Mistakes) -> None:
    found = mistakes(BASE + "params:\n  lr: 1\n  layers:\n    - {size: 1}\n    - {size: 2}\n")
    assert [(line, key) for line, key, _ in found] == [("5", "params.layers.0"), ("6", "params.layers.1")]
    assert all("a list of parameters holds scalars, found a mapping" in message for _, _, message in found)


@pytest.mark.parametrize(
    ("text", "line", "key", "message"),
    [
        ("checkpoint:\n  keep: 3\n  glob: '*.pt'\n  every: {steps: 5}\n", "4", "checkpoint.glob", "exclude each other"),
        ("checkpoint:\n  glob: '*.pt'\n  keep: 5\n", "3", "checkpoint.glob", "'glob' and 'keep' exclude each other"),
        ("checkpoint:\n  every: {steps: 5, minutes: 1}\n", "3", "checkpoint.every", "exclude each other"),
        ("resources: {mem: 4GB}\nslurm:\n  mem-per-cpu: 1G\n", "3", "slurm", "exclude each other"),
    ],
)
def test_keys_that_exclude_each_other_are_refused(
    mistakes: Mistakes, text: str, line: str, key: str, message: str
) -> None:
    [(where, at, said)] = mistakes(BASE + text)
    assert (where, at) == (line, key)
    assert message in said


def test_a_missing_command_is_told(mistakes: Mistakes) -> None:
    assert mistakes("name: x\n") == [("1", "command", "this key is required")]


def test_a_date_is_refused_at_its_own_key(mistakes: Mistakes) -> None:
    [(line, key, message)] = mistakes(BASE + "params:\n  lr: 1\n  day: 2024-01-01\n")
    assert (line, key) == ("4", "params.day")
    assert "put it in quotes" in message


@pytest.mark.parametrize("value", [".nan", "[1, .inf]", "{a: -.inf}"])
def test_a_number_that_json_does_not_have_is_refused(mistakes: Mistakes, value: str) -> None:
    [(line, key, _)] = mistakes(BASE + f"params:\n  x: {value}\n")
    assert line == "3"
    assert key.startswith("params.x")


@pytest.mark.parametrize(
    "value",
    ["!!bool maybe", "!!int ''", "!!timestamp never", "!!float ''", "!!binary '*'", "=", "9" * 5000, "2024-13-45"],
)
def test_a_value_that_yaml_cannot_build_is_refused_at_its_line(mistakes: Mistakes, value: str) -> None:
    found = mistakes(BASE + f"params:\n  lr: 1\n  x: {value}\n")
    assert [(line, key) for line, key, _ in found] == [("4", "params.x")]


@pytest.mark.parametrize("key", ["'['", "']'", "a[0]", "'.'", "''", "a.b", "resources.nodes", "${x}", "'${'"])
def test_a_strange_key_is_unknown_and_nothing_else(mistakes: Mistakes, key: str) -> None:
    found = mistakes(BASE + f"\n{key}: 2\n")
    assert [(line, at) for line, at, _ in found] == [("3", key.strip("'"))]
    assert found[0][2].startswith("unknown key")


@pytest.mark.parametrize(
    "text", ["\x00", "name: a\x07b\n", "[" * 5000, "<<: 1\n", "? [a]\n: b\n", "? {a: b}\n: c\n", "a: &x [*x]\n"]
)
def test_text_that_upsets_the_yaml_reader_is_a_mistake_like_any_other(mistakes: Mistakes, text: str) -> None:
    assert mistakes(text)


def test_a_file_name_that_cannot_name_a_run_asks_for_a_name(tmp_path: Path) -> None:
    path = tmp_path / "my exp.yaml"
    path.write_text(BASE)
    with pytest.raises(SpecError, match=r"the file's name is not fit to name the run .* set 'name'"):
        load_spec(path, cwd=tmp_path, python=PYTHON)


# --- all of them at once ----------------------------------------------------------------------------------------


def test_all_mistakes_of_a_file_are_reported_at_once_in_the_order_of_the_file(mistakes: Mistakes) -> None:
    text = """\
# a comment
setup: 3
resources:
  nodse: 2
  time: 1:00:00
  mem: 16
slurm:
  partitoin: spot
params:
  layers: [{a: 1}]
  path: ${nowhere.at.all}
command: "echo 'x"
name: a/b
"""
    found = mistakes(text)
    assert [(line, key) for line, key, _ in found] == [
        ("2", "setup"),
        ("4", "resources.nodse"),
        ("5", "resources.time"),
        ("6", "resources.mem"),
        ("8", "slurm.partitoin"),
        ("10", "params.layers.0"),
        ("11", "params.path"),
        ("12", "command"),
        ("13", "name"),
    ]


def test_mistakes_of_file_and_command_line_are_reported_together(mistakes: Mistakes) -> None:
    found = mistakes(
        BASE + "resources: {nodes: 0}\n", "resources.gpus_per_node=-1", "nonsense", "foo=1", sweep=["resources.gpu=1"]
    )
    assert {where for where, _, _ in found} == {
        "2",
        "command line (resources.gpus_per_node=-1)",
        "command line (nonsense)",
        "command line (foo=1)",
        "command line (resources.gpu=1)",
    }


def test_each_mistake_is_reported_once_however_many_runs_share_it(mistakes: Mistakes) -> None:
    found = mistakes(SWEPT + "resources: {nodes: 0}\nsweep: {params.lr: [1, 2, 3]}\n")
    assert [(line, key) for line, key, _ in found] == [("3", "resources.nodes")]


def test_the_message_of_the_error_has_a_line_for_each_mistake(load: Load, tmp_path: Path) -> None:
    with pytest.raises(SpecError) as raised:
        load("nodes: 1\nname: a b\n")
    file = tmp_path / "exp.yaml"
    assert str(raised.value).splitlines() == [
        f"{file}:1: nodes: unknown key; it belongs under 'resources'",
        f"{file}:1: command: this key is required",
        f"{file}:2: name: 'a b' cannot name a run: ' ' cannot be used; use letters, digits, '.', '_' and '-'",
    ]


# --- overrides --------------------------------------------------------------------------------------------------


def test_an_override_wins_over_the_file(load: Load) -> None:
    run = only(load(SWEPT, "params.lr=1e-3", "resources.nodes=4", "name=other", "slurm.partition=gpu"))
    assert run.plan.content["params"]["lr"] == 0.001
    assert run.plan.spec.resources.nodes.to_dict() == 4
    assert run.plan.spec.name == "other"
    assert run.plan.spec.slurm == {"partition": "gpu"}
    assert run.overrides == ("params.lr=1e-3", "resources.nodes=4", "name=other", "slurm.partition=gpu")


def test_an_override_reads_its_value_as_yaml_but_leaves_a_time_as_text(load: Load) -> None:
    run = only(load(BASE, "resources.time=12:00:00", "checkpoint.every={steps: 5}", "setup=[a, b]", "env.A='1'"))
    assert run.plan.spec.resources.time == 43200
    assert run.plan.spec.checkpoint.every.to_dict() == {"steps": 5}
    assert run.plan.spec.setup == ("a", "b")
    assert run.plan.spec.env == {"A": "1"}


def test_an_override_inside_a_value_replaces_the_value(load: Load) -> None:
    run = only(load(BASE + "checkpoint: {every: {minutes: 5}}\n", "checkpoint.every.steps=7"))
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
def test_an_override_may_set_what_is_kept_whole_or_in_part(
    load: Load, written: str | None, override: str, keep: dict[str, Any]
) -> None:
    text = BASE if written is None else f"{BASE}checkpoint: {{keep: {written}}}\n"
    plan = only(load(text, override)).plan
    assert plan.to_json()["spec"]["checkpoint"]["keep"] == keep
    assert Plan.from_json(plan.to_json()) == plan


def test_a_level_that_stands_for_its_section_survives_an_override_of_another_key(load: Load) -> None:
    plan = only(load(BASE + "preflight: {clock: warn}\n", "preflight.clock.fail_ms=5000")).plan
    assert (plan.spec.preflight.clock.level, plan.spec.preflight.clock.fail_ms) == ("warn", 5000)


def test_what_is_kept_may_be_varied_by_a_sweep(load: Load) -> None:
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
def test_a_mistake_in_what_is_kept_is_found_at_its_line(
    mistakes: Mistakes, text: str, line: str, key: str, message: str
) -> None:
    [(where, at, said)] = mistakes(BASE + text)
    assert (where, at) == (line, key)
    assert message in said


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
        ("resources.nodes", "expected key=value, for example resources.nodes=2"),
        ("=2", "expected key=value, for example resources.nodes=2"),
        ("sweep.params.lr=2", "a sweep is varied with --sweep key=value,value"),
        ("params.lr=[1", "the value is not YAML"),
    ],
)
def test_an_override_of_a_key_that_does_not_exist_is_refused(mistakes: Mistakes, override: str, message: str) -> None:
    [(where, _, said)] = mistakes(SWEPT, override)
    assert where == f"command line ({override})"
    assert said.startswith(message)


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
def test_an_override_that_upsets_the_yaml_reader_is_a_mistake_like_any_other(mistakes: Mistakes, value: str) -> None:
    assert mistakes(SWEPT, f"params.lr={value}")


# --- interpolation ----------------------------------------------------------------------------------------------


def test_interpolations_follow_overrides_and_the_environment(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WHO", "me")
    run = only(load(SWEPT + "env: {USER_NAME: '${oc.env:WHO}'}\n", "params.lr=5"))
    assert run.plan.spec.command == "python train.py --lr 5"
    assert run.plan.spec.env == {"USER_NAME": "me"}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("${params.nope}", "the interpolation ${params.nope} refers to a key that does not exist"),
        ("${HOME}", "for an environment variable write ${oc.env:HOME}"),
        ("${params.x}", "ecursive"),
        ("'${'", ""),
        ("${oc.env:SURELY_NOT_SET_ANYWHERE}", "SURELY_NOT_SET_ANYWHERE"),
        ("${no.such.resolver:x}", "no.such.resolver"),
        ("???", "'???' marks a value that must be given"),
    ],
)
def test_an_interpolation_that_leads_nowhere_is_refused_at_its_line(
    mistakes: Mistakes, value: str, message: str
) -> None:
    [(line, key, said)] = mistakes(BASE + f"params:\n  y: 1\n  x: {value}\n")
    assert (line, key) == ("4", "params.x")
    assert message in said


def test_setup_lines_belong_to_the_shell(load: Load) -> None:
    text = BASE + "setup:\n  - export A=${B:-c} ${D}\n  - 'x=\"$(date)\"'\n  - '???'\n"
    assert only(load(text)).plan.spec.setup == ("export A=${B:-c} ${D}", 'x="$(date)"', "???")


# --- sweeps -----------------------------------------------------------------------------------------------------


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


def test_a_sweep_leaves_no_trace_of_itself_in_a_plan(load: Load) -> None:
    run = load(SWEPT + "sweep: {params.lr: [1, 2]}\n").runs[0]
    assert "sweep" not in run.plan.template
    assert run.plan.hash == only(load(SWEPT, "params.lr=1")).plan.hash


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
    found = mistakes(SWEPT + sweep)
    assert [(where, at) for where, at, _ in found] == [(line, key)]


def test_a_wrong_value_in_a_sweep_is_reported_at_the_line_of_the_sweep(mistakes: Mistakes) -> None:
    found = mistakes(SWEPT + "resources:\n  nodes: 1\nsweep:\n  params.lr: [1, 2]\n  resources.nodes: [1, 0]\n")
    assert [line for line, _, _ in found] == ["7"]
    assert "found 0" in found[0][2]


@pytest.mark.parametrize("sweep", ["params.lr=", "params.lr=[]", "params.lr=1,1", "params.lr=[1", "params.lr"])
def test_a_sweep_on_the_command_line_is_checked_like_one_in_the_file(mistakes: Mistakes, sweep: str) -> None:
    [(where, _, _)] = mistakes(SWEPT, sweep=[sweep])
    assert where == f"command line ({sweep})"


def test_a_sweep_of_too_many_runs_on_the_command_line_is_refused(mistakes: Mistakes) -> None:
    hundred = ",".join(map(str, range(101)))
    assert "10201 runs" in mistakes(SWEPT, sweep=[f"params.lr={hundred}", f"params.steps={hundred}"])[0][2]


# --- secrets ----------------------------------------------------------------------------------------------------


def everything_written(loaded: SpecFile) -> str:
    """All that submit would write of a spec."""
    runs = [[json.dumps(run.plan.to_json(), ensure_ascii=False), *run.overrides] for run in loaded.runs]
    return json.dumps([loaded.text, runs])


@pytest.mark.parametrize(
    "env",
    [
        "env: {API_TOKEN: hunter2, A: 1}",
        "env:\n  API_TOKEN: hunter2\n  A: 1",
        "env:\n  API_TOKEN: 'hunter2'  # mine\n  A: 1",
        'env:\n  API_TOKEN: "hunt\\x65r2"\n  A: 1',
        "env:\n  API_TOKEN: >-\n    hunter2\n  A: 1",
        "env:\n  API_TOKEN: |-\n    hunter2\n\n  A: 1",
        "env: {API_TOKEN: &x hunter2, OTHER_TOKEN: *x, A: 1}",
        "env: {A: 1, <<: {API_TOKEN: hunter2}}",
        "env:\n  ? API_TOKEN\n  : hunter2\n  A: 1",
    ],
)
def test_a_secret_stands_nowhere_in_plan_template_or_spec_text(load: Load, env: str) -> None:
    loaded = load(f"name: x\n{env}\ncommand: python train.py\n")
    run = only(loaded)
    assert set(run.secrets.values()) == {"hunter2"}
    assert run.plan.spec.env["A"] == "1"
    written = everything_written(loaded)
    assert "hunter2" not in written
    assert "hunt\\\\x65r2" not in written
    again = yaml.safe_load(loaded.text)
    assert (again["name"], again["command"]) == ("x", "python train.py")
    assert again["env"]["A"] == 1
    assert again["env"]["API_TOKEN"] == "<redacted>"


@pytest.mark.parametrize("override", ["env.API_TOKEN=hunter2", "env={API_TOKEN: hunter2}", "+env.API_TOKEN=hunter2"])
def test_a_secret_of_an_override_is_not_recorded(load: Load, override: str) -> None:
    loaded = load(BASE, override)
    assert only(loaded).secrets == {"API_TOKEN": "hunter2"}
    assert "hunter2" not in everything_written(loaded)


def test_secrets_of_a_sweep_are_not_recorded(load: Load) -> None:
    for loaded in (
        load(BASE + "env: {API_TOKEN: x}\nsweep:\n  env.API_TOKEN: [hunter2, hunter3]\n"),
        load(BASE + "env: {API_TOKEN: x}\n", sweep=["env.API_TOKEN=hunter2,hunter3"]),
    ):
        assert [run.secrets["API_TOKEN"] for run in loaded.runs] == ["hunter2", "hunter3"]
        assert "hunter" not in everything_written(loaded)


@pytest.mark.parametrize(
    "reader", ["params: {x: '${env.API_TOKEN}'}", "name: '${env.API_TOKEN}'", "env: {B: '${env.API_TOKEN}'}"]
)
def test_a_secret_that_another_key_repeats_is_refused_or_left_out(load: Load, reader: str) -> None:
    key, _, value = reader.partition(": ")
    text = BASE + (
        f"env: {{API_TOKEN: hunter2, {value[1:]}\n" if key == "env" else f"{reader}\nenv: {{API_TOKEN: hunter2}}\n"
    )
    try:
        written = everything_written(load(text))
    except SpecError as error:
        written = str(error)
    assert "hunter2" not in written


def test_a_mistake_beside_a_secret_does_not_print_it(mistakes: Mistakes) -> None:
    [(where, _, message)] = mistakes(BASE, "env.A-TOKEN=hunter2")
    assert "hunter2" not in where + message


def test_a_secret_from_the_environment_is_read_where_it_is_needed(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", "hunter2")
    loaded = load(BASE + "env: {API_TOKEN: '${oc.env:MY_TOKEN}'}\n")
    assert only(loaded).secrets == {"API_TOKEN": "hunter2"}
    assert "hunter2" not in everything_written(loaded)
    assert "${oc.env:MY_TOKEN}" in loaded.text


def test_a_text_without_secrets_is_kept_as_it_was_written(load: Load) -> None:
    text = "# why\ncommand:   python train.py   # how\nparams: {a: 'ü', b: \"x\"}\nenv: {A: '1'}\n"
    assert load(text).text == text


# --- plans ------------------------------------------------------------------------------------------------------


def test_the_same_spec_gives_the_same_hash_whatever_workdir_and_python(tmp_path: Path) -> None:
    path = tmp_path / "exp.yaml"
    path.write_text(SWEPT)
    here = only(load_spec(path, cwd=tmp_path, python="/usr/bin/python3")).plan
    there = only(load_spec(path, cwd=Path("/srv/elsewhere"), python="/opt/py")).plan
    assert here.hash == there.hash
    assert (here.workdir, here.python) == (str(tmp_path.resolve()), "/usr/bin/python3")
    assert (there.workdir, there.python) == ("/srv/elsewhere", "/opt/py")


@pytest.mark.parametrize(("workdir", "resolved"), [("sub", "/srv/here/sub"), ("/abs/x", "/abs/x"), ("../x", "/srv/x")])
def test_a_workdir_counts_from_where_submit_was_called(load: Load, workdir: str, resolved: str) -> None:
    assert only(load(BASE + f"workdir: {workdir}\n", cwd=Path("/srv/here"))).plan.workdir == resolved


def test_a_run_is_named_for_its_file_unless_the_spec_names_it(load: Load) -> None:
    assert only(load(BASE)).plan.spec.name == "exp"
    assert only(load(BASE + "name: mine\n")).plan.spec.name == "mine"
    assert only(load(BASE, "name=yours")).plan.spec.name == "yours"


# --- planning again ---------------------------------------------------------------------------------------------


def test_planning_again_without_overrides_is_the_same_plan(load: Load) -> None:
    plan = only(load(SWEPT)).plan
    assert replan(plan, ()) == PlannedRun(plan, (), {})


def test_planning_again_follows_interpolations(load: Load) -> None:
    text = "command: python train.py --steps ${params.steps}\nparams: {steps: 100, warmup: '${params.steps}'}\n"
    plan = Plan.from_json(json.loads(json.dumps(only(load(text)).plan.to_json())))
    again = replan(plan, ["params.steps=400"])
    assert again.plan.spec.command == "python train.py --steps 400"
    assert again.plan.spec.params == {"steps": 400, "warmup": 400}
    assert again.overrides == ("params.steps=400",)
    once_more = replan(again.plan, ["resources.time=1:00:00"])
    assert once_more.plan.spec.params["warmup"] == 400
    assert once_more.plan.spec.resources.time == 3600


def test_planning_again_keeps_what_a_sweep_chose(load: Load) -> None:
    plan = load(SWEPT, sweep=["params.lr=1,2"]).runs[1].plan
    assert replan(plan, ["params.steps=99"]).plan.spec.params == {"lr": 2, "steps": 99, "name": "a"}


def test_planning_again_keeps_workdir_and_python_unless_told_otherwise(load: Load) -> None:
    plan = only(load(SWEPT + "workdir: sub\n", cwd=Path("/srv/here"))).plan
    again = replan(plan, ["params.lr=2"]).plan
    assert (again.workdir, again.python) == ("/srv/here/sub", PYTHON)
    assert replan(plan, ["workdir=/other"]).plan.workdir == "/other"


def test_planning_again_with_a_mistake_names_the_override(load: Load) -> None:
    plan = only(load(SWEPT)).plan
    with pytest.raises(SpecError) as raised:
        replan(plan, ["resources.nodes=0", "params.nope=1"])
    assert {one.where for one in raised.value.mistakes} == {
        "command line (resources.nodes=0)",
        "command line (params.nope=1)",
    }


def test_a_run_keeps_its_name(load: Load) -> None:
    with pytest.raises(SpecError, match="a run keeps its name"):
        replan(only(load(SWEPT)).plan, ["name=other"])


def test_planning_again_with_a_secret_hands_it_over_and_writes_it_nowhere(load: Load) -> None:
    plan = only(load(SWEPT + "env: {API_TOKEN: hunter2}\n")).plan
    again = replan(plan, ["env.API_TOKEN=hunter3"])
    assert again.secrets == {"API_TOKEN": "hunter3"}
    assert "hunter" not in json.dumps(again.plan.to_json())
    assert replan(plan, ["params.lr=2"]).secrets == {}


# --- whatever is written ----------------------------------------------------------------------------------------

words = st.sampled_from(
    ["name", "command", "workdir", "params", "resources", "slurm", "network", "preflight", "checkpoint", "requeue",
     "tracking", "env", "setup", "sweep", "nodes", "mem", "time", "clock", "mlflow", "uri", "every", "steps", "glob",
     "partition", "API_TOKEN", "params.lr", "lr", "<<", "a.b", "a[0]", "[", ""]
)  # fmt: skip
keys = words | st.text(max_size=5)
values = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=10), st.binary(max_size=4), st.dates(),
    st.datetimes(),
    st.sampled_from(["${", "${lr}", "${params.lr}", "${oc.env:HOME}", "${${x}}", "???", "12:00:00", "4GB", "echo 'a",
                     "{resume_from}", "python x.py", "auto", "1e3", "$", "\\${x}", "${oc.env:}", "${.}", "${..name}"]),
)  # fmt: skip
trees = st.recursive(
    values, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=4), max_leaves=10
)
sections = st.dictionaries(keys, trees, max_size=5)
quietly = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def check_whatever(tmp_path: Path, text: str, overrides: Sequence[str] = (), sweep: Sequence[str] = ()) -> None:
    """Loading raises nothing but our own errors, and what it gives can be written and read back."""
    path = tmp_path / "any.yaml"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    try:
        loaded = load_spec(path, overrides, sweep, cwd=tmp_path, python=PYTHON)
    except SlurmtrainError as error:
        if not str(error):
            raise
        return
    assert loaded.runs
    for run in loaded.runs:
        written = json.dumps(run.plan.to_json(), allow_nan=False)
        assert Plan.from_json(json.loads(written)).hash == run.plan.hash


@quietly
@given(sections, st.booleans())
def test_any_yaml_document_is_loaded_or_refused_with_our_own_error(
    tmp_path: Path, data: dict[str, Any], runs: bool
) -> None:
    check_whatever(tmp_path, yaml.safe_dump({**data, "command": "python x.py"} if runs else data, allow_unicode=True))


@quietly
@given(st.dictionaries(st.sampled_from(["params", "env", "setup", "slurm", "sweep", "checkpoint"]), trees, max_size=3))
def test_any_content_of_a_known_section_is_loaded_or_refused_with_our_own_error(
    tmp_path: Path, data: dict[str, Any]
) -> None:
    check_whatever(tmp_path, yaml.safe_dump({"command": "python x.py", **data}))


@quietly
@given(st.text(max_size=40))
def test_any_text_as_a_parameter_is_loaded_or_refused_with_our_own_error(tmp_path: Path, text: str) -> None:
    check_whatever(tmp_path, BASE + "params:\n  x: " + text)


@quietly
@given(
    st.lists(
        st.builds(
            "{}={}".format, keys | st.sampled_from(["params.lr", "+params.x", "setup.0", "env.A"]), st.text(max_size=12)
        )
    ),
    st.lists(
        st.builds("{}={}".format, st.sampled_from(["params.lr", "resources.nodes", "name"]), st.text(max_size=8)),
        max_size=2,
    ),
)
def test_any_override_is_taken_or_refused_with_our_own_error(
    tmp_path: Path, overrides: list[str], sweep: list[str]
) -> None:
    check_whatever(tmp_path, SWEPT, overrides, sweep)
