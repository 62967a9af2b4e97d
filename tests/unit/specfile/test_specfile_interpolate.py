"""Interpolations."""

from __future__ import annotations

from typing import Any

import pytest
from helpers.specfiles import BASE, SWEPT, Load, Mistakes, only_run
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from slurmtrain.model.spec.plan import Plan
from slurmtrain.specfile import replan
from slurmtrain.specfile.interpolate import Interpolator


def test_interpolations_follow_overrides_and_the_environment(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WHO", "me")
    run = only_run(load(SWEPT + "env: {USER_NAME: '${oc.env:WHO}'}\n", "params.lr=5"))
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
        ("params: {a: '${run.x.nope}'}", "params.a", "${run.x.nope} is no fact of a run"),
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
