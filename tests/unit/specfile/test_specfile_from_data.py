"""Specs that a program has built: what is read is what was given, whatever it looks like as text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurmtrain.errors import SpecError
from slurmtrain.specfile import write_assignments
from slurmtrain.specfile.compose import write_spec
from slurmtrain.specfile.overrides import parse_overrides, parse_sweeps
from slurmtrain.system.yaml_file import parse_yaml

TEXT = st.one_of(
    st.text(st.characters(codec="utf-8")),
    st.sampled_from(["1e-3", "12:00:00", "yes", "null", "~", "0x1", "2026-11-22", "<<", "- a", "a: b", "=", "1_0"]),
)
VALUE = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), TEXT),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.from_regex("[a-z]{1,3}"), inner, max_size=3)
    ),
    max_leaves=6,
)


@given(VALUE)
def test_a_spec_reads_as_what_was_given(value: Any) -> None:
    document = parse_yaml(write_spec({"params": {"x": value}}), "spec")
    assert document.mistakes == []
    assert document.data == {"params": {"x": value}}


@given(VALUE.filter(lambda value: "inf" not in repr(value)))
def test_overrides_read_as_what_was_given(value: Any) -> None:
    data = {"params": {"x": 0}}
    [override], mistakes = parse_overrides(write_assignments({"params.x": value}), data)
    assert (override.value, mistakes) == (value, [])
    [varied], mistakes = parse_sweeps(write_assignments({"params.x": [value, 1]}), data)
    assert (varied.value, mistakes) == ([value, 1], [])


def test_values_of_other_libraries_become_plain_ones() -> None:
    values = {"n": np.int64(3), "f": np.float32(0.5), "t": (1, 2), "p": Path("/data"), "same": [shared := [1], shared]}
    data = parse_yaml(write_spec({"params": values}), "spec").data
    assert data == {"params": {"n": 3, "f": 0.5, "t": [1, 2], "p": "/data", "same": [[1], [1]]}}


def test_all_values_that_no_spec_can_hold_are_named() -> None:
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(SpecError) as caught:
        write_spec({"env": {"A": b"x"}, "params": {"a": [object()], "deep": endless}})
    assert [(mistake.where, mistake.key) for mistake in caught.value.mistakes] == [
        ("spec", "env.A"),
        ("spec", "params.a.0"),
        ("spec", "params.deep"),
    ]
