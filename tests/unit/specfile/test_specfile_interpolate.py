"""Interpolations, and numbers as they were written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers.specfiles import BASE, Load, Mistakes, only_run
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from slurmtrain.model.experiment.plan import Plan
from slurmtrain.specfile import replan
from slurmtrain.specfile.interpolate import Interpolator


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("${params.nope}", "the interpolation ${params.nope} refers to a key that does not exist"),
        ("${HOME}", "for an environment variable write ${oc.env:HOME}"),
        ("${params.x}", "ecursive"),
        ("'${'", ""),
        ("${oc.env:SURELY_NOT_SET_ANYWHERE}", "SURELY_NOT_SET_ANYWHERE"),
        ("${no.such.resolver:x}", "no.such.resolver"),
        ("???", "'???' stands for a value that you must set"),
    ],
)
def test_an_invalid_interpolation_is_refused_at_its_line(mistakes: Mistakes, value: str, message: str) -> None:
    [(line, key, explanation)] = mistakes(BASE + f"params:\n  y: 1\n  x: {value}\n")
    assert (line, key) == ("4", "params.x")
    assert message in explanation


def test_setup_lines_belong_to_the_shell(load: Load) -> None:
    text = BASE + "setup:\n  - export A=${B:-c} ${D}\n  - 'x=\"$(date)\"'\n  - '???'\n"
    assert only_run(load(text)).plan.spec.setup == ("export A=${B:-c} ${D}", 'x="$(date)"', "???")


_LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-5, 5),
    st.floats(allow_nan=False),
    st.sampled_from(["plain", "${a}", "${b.x}", "x-${a}-${c}", "\\${a}", "${nope}", "???", "${", "${d}"]),
)
_VALUES = st.recursive(
    _LEAVES, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from("xy"), inner, max_size=2)
)


@given(st.lists(st.dictionaries(st.sampled_from(["a", "b", "c", "d", "setup"]), _VALUES), min_size=1, max_size=4))
def test_what_a_spec_becomes_does_not_depend_on_the_specs_before_it(templates: list[dict[str, Any]]) -> None:
    shared = Interpolator()
    before: dict[str, Any] = {}
    for changes in templates:
        # As in a sweep: what does not change is the same object.
        before = {**before, **changes} if len(changes) < 4 else changes
        alone, together = [], []
        expected = Interpolator().interpolate(before, lambda at, message, to=alone: to.append((at, message)))
        result = shared.interpolate(before, lambda at, message, to=together: to.append((at, message)))
        assert repr(result) == repr(expected)
        assert together == alone
        if not alone and "setup" not in before:
            assert repr(result) == repr(OmegaConf.to_container(OmegaConf.create(before), resolve=True))


CHAINED = "command: python ft.py --init ${params.init}\nparams: {init: '${run.pre-train.checkpoint}'}\n"


def test_references_to_other_runs_stay_as_they_are_through_other_interpolations(load: Load) -> None:
    plan = only_run(load(CHAINED + "env: {A: 'x:${params.init}'}\n")).plan
    reference = "${run.pre-train.checkpoint}"
    assert plan.spec.command == f"python ft.py --init {reference}"
    assert (plan.spec.params, plan.spec.env) == ({"init": reference}, {"A": f"x:{reference}"})
    # Also in a later attempt with overrides, and when the plan is read again.
    assert replan(plan, ["resources.nodes=2"]).plan.spec.command == plan.spec.command
    assert Plan.from_json(plan.to_json()).spec == plan.spec


@pytest.mark.parametrize(
    ("text", "key", "message"),
    [
        ("params: {a: '${run.x.nope}'}", "params.a", "${run.x.nope} does not exist; a run has"),
        ("workdir: ${run.x.dir}", "workdir", "known only when this run starts: write it in command or params or env"),
        ("slurm: {comment: '${run.x.id}'}", "slurm", "known only when this run starts"),
    ],
)
def test_a_reference_that_cannot_be_filled_in_is_refused_at_its_line(
    mistakes: Mistakes, text: str, key: str, message: str
) -> None:
    [(line, found_at, explanation)] = mistakes(BASE + text + "\n")
    assert (line, found_at) == ("2", key)
    assert message in explanation


# How numbers are written, and what they are.
NUMBERS = [
    ("0123", 83), ("1_000", 1000), ("0x1F", 31), ("0b11", 3), ("+1", 1), ("1.10", 1.1), ("1e-3", 0.001), (".5", 0.5),
    ("12345678901234567890.0", 12345678901234567890.0), ("7", 7),
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


@pytest.mark.parametrize(
    "key",
    [
        "name", "workdir", "tracking.mlflow.experiment", "setup.0", "after.0", "start_from.run",
    ],
)  # fmt: skip
def test_text_that_no_number_can_be_is_refused_with_what_was_written(mistakes: Mistakes, key: str) -> None:
    section: Any = "NUMBER"
    for part in reversed(key.split(".")):
        section = [section] if part.isdigit() else {part: section}
    [(_, where, message)] = mistakes(BASE + yaml.safe_dump(section).replace("NUMBER", "0123"))
    assert where == key
    assert "(0123)" in message
    assert "in quotes" in message
