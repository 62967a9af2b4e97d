"""Numbers that become text are what the user wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers.specfiles import BASE, Load, Mistakes, only_run

from slurmtrain.model.spec.plan import Plan
from slurmtrain.specfile import replan

# How numbers are written, and what they are.
NUMBERS = [
    ("0123", 83), ("1_000", 1000), ("0x1F", 31), ("0b11", 3), ("+1", 1), ("-0", 0), ("0777", 511),
    ("1.10", 1.1), ("1e3", 1000.0), ("1e-3", 0.001), ("1E5", 1e5), (".5", 0.5), ("5.", 5.0), ("1_0.5", 10.5),
    ("12345678901234567890.0", 12345678901234567890.0), ("7", 7), ("0.1", 0.1),
]  # fmt: skip
TEXTS = [written for written, _ in NUMBERS]


def stored(plan: Plan) -> Plan:
    """The plan after a way through its file."""
    return Plan.from_json(json.loads(json.dumps(plan.to_json(), allow_nan=False)))


@pytest.mark.parametrize(("written", "value"), NUMBERS)
def test_a_number_is_text_as_it_was_written_and_a_parameter_stays_a_number(
    load: Load, written: str, value: float
) -> None:
    text = (
        "command: python t.py {resume_from} --x ${params.x} --l ${params.l} --y ${params.y}\n"
        "checkpoint: {glob: '*.pt'}\nparams: {x: NUMBER, l: [NUMBER, 2], y: '${params.x}', d: {z: NUMBER}}\n"
        "env: {A: NUMBER, B: 'v${env.A}', C: '${params.x}'}\n"
        "slurm: {account: NUMBER, comment: '${env.A}', reservation: '${params.x}'}\n"
    ).replace("NUMBER", written)
    run = only_run(load(text))
    for plan in (run.plan, stored(run.plan), replan(stored(run.plan), ["resources.procs_per_node=2"]).plan):
        spec = plan.spec
        assert spec.command == f"python t.py {{resume_from}} --x {written} --l [{written}, 2] --y {written}"
        assert (spec.env["A"], spec.env["B"], spec.env["C"]) == (written, f"v{written}", written)
        assert {str(option) for option in spec.slurm.values()} == {written}
        params: dict[str, Any] = json.loads(json.dumps(dict(spec.params)))
        assert params == {"x": value, "l": [value, 2], "y": value, "d": {"z": value}}
        assert type(params["x"]) is type(value)
    assert only_run(load(BASE + f"env: {{P_TOKEN: {written}}}\n")).secrets == {"P_TOKEN": written}


@pytest.mark.parametrize("written", TEXTS)
def test_overrides_sweeps_and_bases_keep_what_was_written(load: Load, tmp_path: Path, written: str) -> None:
    overridden = only_run(load(BASE, f"env.A={written}", f"slurm.account={written}", f"+params.x={written}"))
    assert overridden.plan.spec.env == {"A": written}
    assert str(overridden.plan.spec.slurm["account"]) == written
    assert overridden.overrides == (f"env.A={written}", f"slurm.account={written}", f"+params.x={written}")
    swept = [*load(BASE, sweep=[f"env.A={written},z"]).runs, *load(BASE + f"sweep: {{env.A: [{written}, z]}}\n").runs]
    assert [run.plan.spec.env["A"] for run in swept] == [written, "z"] * 2
    assert [run.overrides for run in swept] == [(f"env.A={written}",), ("env.A=z",)] * 2
    (tmp_path / "base.yaml").write_text(f"env: {{A: {written}}}\nparams: {{x: {written}}}\n")
    extended = load("extends: base.yaml\nname: n\ncommand: python t.py ${params.x}\n")
    again = load(extended.text)
    for run in (only_run(extended), only_run(again)):
        assert (run.plan.spec.env["A"], run.plan.spec.command) == (written, f"python t.py {written}")


def test_infinity_is_text_in_a_variable_and_refused_as_a_parameter(load: Load, mistakes: Mistakes) -> None:
    plan = stored(only_run(load(BASE + "env: {A: .inf, B: 1e400, C: .NaN}\n")).plan)
    assert plan.spec.env == {"A": ".inf", "B": "1e400", "C": ".NaN"}
    assert replan(plan, ["resources.procs_per_node=2"]).plan.spec.env == plan.spec.env
    [(line, key, message)] = mistakes(BASE + "params: {x: .inf}\n")
    assert (line, key) == ("2", "params.x")
    assert "write it in quotes" in message


@pytest.mark.parametrize("written", ["yes", "null", "~", "true", "2024-01-01", "1:30", "12:30:00"])
def test_what_yaml_makes_something_else_of_is_refused_as_a_variable(mistakes: Mistakes, written: str) -> None:
    [(line, key, message)] = mistakes(BASE + f"env: {{A: {written}}}\n")
    assert (line, key) == ("2", "env.A")
    assert "in quotes" in message


@pytest.mark.parametrize(
    "key", ["name", "workdir", "tracking.mlflow.experiment", "setup.0", "after.0", "start_from.run"]
)
def test_text_that_no_number_can_be_is_refused_with_what_was_written(mistakes: Mistakes, key: str) -> None:
    section: Any = "NUMBER"
    for part in reversed(key.split(".")):
        section = [section] if part.isdigit() else {part: section}
    [(_, where, message)] = mistakes(BASE + yaml.safe_dump(section).replace("NUMBER", "0123"))
    assert where == key
    assert "(0123)" in message
    assert "in quotes" in message


@pytest.mark.parametrize(("key", "value"), [("resources.nodes", 3), ("resources.procs_per_node", 3), ("seed", 3)])
def test_settings_that_are_numbers_are_plain(load: Load, key: str, value: int) -> None:
    content = only_run(load(BASE, f"{key}=0b11")).plan.content
    for part in key.split("."):
        content = content[part]
    assert (type(content), content) == (int, value)


def test_a_plan_without_such_numbers_is_stored_as_before(load: Load) -> None:
    plan = only_run(load(BASE + "params: {x: 1, y: 0.5}\nenv: {A: 3, B: text}\n")).plan
    assert "written" not in plan.to_json()
