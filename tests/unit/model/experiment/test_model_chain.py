"""The key ``after``, references to other runs, and the order of the specs of one submission."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from helpers.simulated_run import make_test_plan
from hypothesis import given
from hypothesis import strategies as st

from slurmtrain.model.experiment.chain import (
    Dependency,
    creation_order,
    dependencies_of,
    escape_references,
    fill,
    find_cycle,
    parse_dependency,
    references_of,
)
from slurmtrain.model.experiment.spec import read_spec

CHECKPOINT = "${run.pretrain.checkpoint}"


def mistakes(after: object) -> list[str]:
    reported: list[str] = []
    read_spec({"name": "x", "command": "x", "after": after}, lambda at, message: reported.append(message))
    return reported


@pytest.mark.parametrize(
    ("text", "dependency"),
    [
        ("pretrain", Dependency("pretrain")),
        ("afterok:pretrain", Dependency("pretrain")),
        ("afterany:data-prep.2", Dependency("data-prep.2", any=True)),
    ],
)
def test_an_entry_names_a_run_and_how_it_must_end(text: str, dependency: Dependency) -> None:
    assert parse_dependency(text) == dependency
    assert parse_dependency(str(dependency)) == dependency


@pytest.mark.parametrize(
    ("after", "message"),
    [
        (["afterokk:a"], "'afterokk' is not a condition: write 'afterok:a' or 'afterany:a'; did you mean 'afterok'?"),
        (["a b"], "'a b' cannot be the name of a run"),
        (["afterok:"], "cannot be the name of a run"),
        ([5], "expected the name or id of a run, found a whole number (5)"),
        (["a", "afterok:a"], "'a' is given twice"),
        ({"a": 1}, "expected a list, found a mapping"),
    ],
)
def test_a_wrong_entry_is_refused(after: object, message: str) -> None:
    [reported] = mistakes(after)
    assert message in reported


def test_a_reference_implies_a_dependency_unless_there_is_one() -> None:
    spec = make_test_plan(
        after=["afterany:b"],
        command="python x.py --init ${run.a.checkpoint}",
        params={"deep": {"list": ["${run.b.metrics.loss}"]}},
        env={"DIR": "${run.c.d.dir}/x"},
    ).spec
    assert [str(each) for each in dependencies_of(spec)] == ["afterany:b", "a", "c.d"]
    assert [each.field for each in references_of(spec)] == ["checkpoint", "metrics.loss", "dir"]


def test_references_are_filled_in_wherever_they_are_in_a_value() -> None:
    values = {CHECKPOINT: "/runs/a b/step-10", "${run.pretrain.step}": 10}
    value: dict[str, Any] = {"a": f"x={CHECKPOINT}", "b": ["${run.pretrain.step}", 1.5, None], "c": "${run.other.dir}"}
    assert fill(value, values) == {"a": "x=/runs/a b/step-10", "b": [10, 1.5, None], "c": "${run.other.dir}"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("${run.pretrain.chekpoint}", "a run has checkpoint, dir, id, step, metrics.NAME; did you mean 'checkpoint'?"),
        ("${run.pretrain}", "does not exist; a run has"),
        ("${run.pretrain.metrics.}", "does not exist; a run has"),
        ("${run..dir}", "cannot be the name of a run"),
        ("${run.}", "does not exist; a run has"),
    ],
)
def test_a_reference_to_nothing_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match="run") as raised:
        escape_references(text)
    assert message in str(raised.value)


GRAPHS = st.integers(1, 6).flatmap(
    lambda count: st.fixed_dictionaries({n: st.lists(st.integers(0, count - 1), max_size=3) for n in range(count)})
)


@given(GRAPHS)
def test_specs_that_wait_for_each_other_are_found_and_all_others_ordered(after: dict[int, list[int]]) -> None:
    cycle = find_cycle(after)
    if cycle:
        assert cycle[0] == cycle[-1]
        assert all(there in after[here] for here, there in pairwise(cycle))
        return
    order = creation_order(after)
    assert sorted(order) == sorted(after)
    assert all(order.index(earlier) < order.index(later) for later in after for earlier in after[later])
