"""Specs that extend others, and those that a program has built."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from helpers.specfiles import PYTHON, Load, Mistakes, only_run, params_of
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from slurmtrain.errors import SpecError
from slurmtrain.specfile import load_spec, write_assignments
from slurmtrain.specfile.compose import merge_documents, spec_as_yaml
from slurmtrain.specfile.overrides import parse_overrides, parse_sweeps
from slurmtrain.system.yaml_file import YamlDocument, parse_yaml, write_yaml

BASE = """command: python train.py --lr ${params.lr}
params: {lr: 0.1, steps: 10, layers: [1, 2]}
resources:
  nodes: 2
checkpoint: {every: {minutes: 3}}
"""
# A key is of one kind in all files: otherwise omegaconf refuses to merge, or depends on the order.
LEAVES = {"a": st.integers(0, 9), "b": st.text("xyz", max_size=2), "c": st.lists(st.integers(0, 9), max_size=2)}
INNER = st.fixed_dictionaries({}, optional=LEAVES)
SPECS = st.fixed_dictionaries({"params": st.fixed_dictionaries({}, optional={**LEAVES, "d": INNER, "e": INNER})})


@pytest.fixture
def base(tmp_path: Path) -> Path:
    path = tmp_path / "base.yaml"
    path.write_text(BASE)
    return path


def document(data: dict[str, Any], name: str) -> YamlDocument:
    return parse_yaml(write_yaml(data), name)


@pytest.mark.usefixtures("base")
def test_mappings_merge_lists_replace_and_null_takes_away(load: Load) -> None:
    text = "extends: base.yaml\nparams: {lr: 0.5, layers: [7], steps: null, new: null}\nresources: {gpus_per_node: 1}\n"
    run = only_run(load(text, "params.lr=0.7"))
    assert run.plan.content["params"] == {"lr": 0.7, "layers": [7], "new": None}
    assert (run.plan.spec.resources.nodes.max, run.plan.spec.resources.gpus_per_node) == (2, 1)
    assert run.plan.spec.command == "python train.py --lr 0.7"
    assert run.plan.spec.name == "exp"


def test_bases_are_merged_in_order_each_relative_to_the_file_that_names_it(load: Load, base: Path) -> None:
    (base.parent / "more").mkdir()
    (base.parent / "more" / "a.yaml").write_text("extends: ../base.yaml\nparams: {lr: 2, steps: 2}\n")
    (base.parent / "b.yaml").write_text("params: {steps: 3}\nsweep: {params.lr: [1, 2], params.steps: [4]}\n")
    loaded = load("extends: [more/a.yaml, b.yaml]\nsweep: {params.lr: [8, 9]}\n")
    assert [(params["lr"], params["steps"]) for params in params_of(loaded)] == [(8, 4), (9, 4)]


def test_what_is_recorded_needs_no_other_file_and_names_its_sources(load: Load, base: Path, tmp_path: Path) -> None:
    more = "tracking: {mlflow: {experiment: e}}\nenv: {API_TOKEN: hunter2, HOME_OF: '${oc.env:HOME}'}\n"
    base.write_text(BASE + more)
    loaded = load("extends: base.yaml\nsweep: {params.lr: [1, 2]}\n")
    assert loaded.text.startswith(f"# composed of {base}\n# composed of {tmp_path / 'exp.yaml'}\n")
    assert "hunter2" not in loaded.text
    assert loaded.runs[0].secrets == {"API_TOKEN": "hunter2"}
    alone = tmp_path / "alone" / "exp.yaml"
    alone.parent.mkdir()
    alone.write_text(loaded.text)
    again = load_spec(alone, cwd=tmp_path, python=PYTHON)
    assert [run.plan.hash for run in again.runs] == [run.plan.hash for run in loaded.runs]


def test_a_mistake_names_the_file_and_line_that_hold_the_value(mistakes: Mistakes, base: Path) -> None:
    base.write_text(BASE + "requeue:\n  max_failures: -1\n  max_failurs: 1\nsweep:\n  params.lr:\n  - .nan\n")
    reported = mistakes("extends: base.yaml\nresources: {nodes: 0}\n", "params.steps=.nan")
    assert [(where, key) for where, key, _ in reported] == [
        ("2", "resources.nodes"),
        (f"{base}:7", "requeue.max_failures"),
        (f"{base}:8", "requeue.max_failurs"),
        (f"{base}:11", "params.lr"),
        ("command line (params.steps=.nan)", "params.steps"),
    ]


@pytest.mark.parametrize(
    ("extends", "message"),
    [
        ("bas.yaml", "there is no bas.yaml"),
        ("bas.yaml", "did you mean 'base.yaml'"),
        ("exp.yaml", "exp.yaml extends itself: exp.yaml -> exp.yaml"),
        ("[base.yaml, cycle.yaml]", "exp.yaml extends itself: exp.yaml -> cycle.yaml -> exp.yaml"),
        ("deep0.yaml", "more than 10 levels deep"),
        ("folder", "regular file"),
        ("3", "expected the path of a YAML file"),
        ("[base.yaml, {a: 1}]", "expected the path of a YAML file"),
        ('"a\\0b"', "expected the path of a YAML file"),
    ],
)
def test_what_cannot_be_extended_is_refused(mistakes: Mistakes, base: Path, extends: str, message: str) -> None:
    (base.parent / "folder").mkdir()
    (base.parent / "cycle.yaml").write_text("extends: exp.yaml\n")
    for number in range(12):
        (base.parent / f"deep{number}.yaml").write_text(f"extends: deep{number + 1}.yaml\n")
    assert any(message in why for _, _, why in mistakes(f"extends: {extends}\ncommand: x\n"))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_a_base_of_another_account_is_refused(mistakes: Mistakes, base: Path) -> None:
    os.chown(base, 12345, 12345)
    [(line, key, why)] = mistakes("command: x\nextends: base.yaml\n")
    assert (line, key) == ("2", "extends")
    assert "belongs to" in why


@given(SPECS, SPECS, SPECS)
def test_merging_is_that_of_omegaconf_and_associative(first: Any, second: Any, third: Any) -> None:
    low, middle, high = document(first, "1"), document(second, "2"), document(third, "3")
    merged = merge_documents([low, middle, high]).data
    assert merged == OmegaConf.to_container(OmegaConf.merge(first, second, third))
    assert merge_documents([merge_documents([low, middle]), high]).data == merged
    assert merge_documents([low, merge_documents([middle, high])]).data == merged


@given(SPECS, SPECS)
def test_the_place_of_each_key_is_a_line_that_holds_it(first: Any, second: Any) -> None:
    texts = {"1": write_yaml(first), "2": write_yaml(second)}
    merged = merge_documents([parse_yaml(text, name) for name, text in texts.items()])
    for path in merged.lines:
        file, _, line = merged.place_of(path).rpartition(":")
        held: Any = yaml.safe_load(texts[file])
        value: Any = merged.data
        for key in path:
            held, value = (each[int(key)] if isinstance(each, list) else each[key] for each in (held, value))
        written = texts[file].splitlines()[int(line) - 1]
        assert path[-1].isdigit() or f"{path[-1]}:" in written
        assert isinstance(held, dict) or held == value


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
    document = parse_yaml(spec_as_yaml({"params": {"x": value}}), "spec")
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
    data = parse_yaml(spec_as_yaml({"params": values}), "spec").data
    assert data == {"params": {"n": 3, "f": 0.5, "t": [1, 2], "p": "/data", "same": [[1], [1]]}}


def test_all_values_that_no_spec_can_hold_are_named() -> None:
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(SpecError) as caught:
        spec_as_yaml({"env": {"A": b"x"}, "params": {"a": [object()], "deep": endless}})
    assert [(mistake.where, mistake.key) for mistake in caught.value.mistakes] == [
        ("spec", "env.A"),
        ("spec", "params.a.0"),
        ("spec", "params.deep"),
    ]
