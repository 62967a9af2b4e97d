"""Sweeps: the runs that follow, how they share jobs, and what they may cost."""

from __future__ import annotations

import hashlib
import json
import math
import re
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from slurmtrain.model.experiment.kinds import KeyPath
from slurmtrain.model.experiment.resources import ResourcesSpec
from slurmtrain.model.experiment.sweep import Pack, Sweep, SweepCost, cost_of, packing_problem, read_pack, read_sweep
from slurmtrain.model.experiment.values import Nodes


def mistakes_of(section: object, **options: Any) -> list[tuple[str, str]]:
    mistakes: list[tuple[str, str]] = []
    read_sweep(section, lambda at, message: mistakes.append((".".join(at), message)), **options)
    return mistakes


def read(section: object) -> Sweep:
    assert mistakes_of(section) == []
    return read_sweep(section, lambda *_: None)


def runs(section: object) -> list[dict[str, Any]]:
    return [{key: swept.value for key, swept in point.items()} for point in read(section).expand()]


def test_all_combinations_follow_with_the_last_key_varying_fastest() -> None:
    assert runs({"a": [1, 2], "b": ["x", "y"]}) == [
        {"a": 1, "b": "x"},
        {"a": 1, "b": "y"},
        {"a": 2, "b": "x"},
        {"a": 2, "b": "y"},
    ]


def test_keys_of_a_zip_vary_together_and_multiply_with_the_others() -> None:
    assert runs({"zip": {"a": [1, 2], "b": "range(5, 7)"}, "c": ["x", "y"]}) == [
        {"a": 1, "b": 5, "c": "x"},
        {"a": 1, "b": 5, "c": "y"},
        {"a": 2, "b": 6, "c": "x"},
        {"a": 2, "b": 6, "c": "y"},
    ]


def test_rules_take_runs_away_and_then_add_some() -> None:
    section = {"a": [1, 2], "b": "linspace(0, 1, 3)", "exclude": [{"a": 1, "b": 0.5}, {"b": 1}], "include": [{"b": 1}]}
    assert runs(section) == [{"a": 1, "b": 0.0}, {"a": 2, "b": 0.0}, {"a": 2, "b": 0.5}, {"b": 1}]


def test_each_value_knows_where_it_is_written() -> None:
    section = {"a": [1, 2], "zip": {"b": [3, 4]}, "include": [{"c": 5}]}
    places = [swept.at for point in read(section).expand()[-2:] for swept in point.values()]
    assert places == [("a", "1"), ("zip", "b", "1"), ("include", "0", "c")]


def test_a_seed_gives_the_same_runs_on_every_machine() -> None:
    section = {"lr": "loguniform(1e-5, 1e-1)", "drop": "uniform(0, 0.5)", "act": "choice(relu, gelu)", "samples": 50}
    # Of this text, so that it also holds for other versions of Python, and other processors.
    digest = hashlib.sha256(json.dumps(runs(section)).encode()).hexdigest()
    assert digest == "0f00327f29148690235faaaa618e890be6a83acbee21cddd5924e7a9686b6c6d"
    assert runs({**section, "seed": 0}) == runs(section)
    assert runs({**section, "seed": 1}) != runs(section)


@pytest.mark.parametrize("seeds", [[3, 4], "range(3, 5)"])
def test_several_seeds_vary_the_seed_of_the_runs(seeds: object) -> None:
    assert runs({"seed": seeds}) == [{"seed": 3}, {"seed": 4}]
    drawn = runs({"seed": seeds, "a": "uniform(0, 1)", "samples": 2})
    assert [run["seed"] for run in drawn] == [3, 3, 4, 4]
    assert [run["a"] for run in drawn[:2]] == [run["a"] for run in runs({"a": "uniform(0, 1)", "samples": 2})]


def test_random_runs_differ_as_long_as_they_can() -> None:
    drawn = runs({"a": "choice(1, 2, 3)", "b": "choice(x, y)", "samples": 6})
    assert len({(run["a"], run["b"]) for run in drawn}) == 6
    [(key, message)] = mistakes_of({"a": "choice(1, 2, 3)", "b": "choice(x, y)", "samples": 7})
    assert (key, message) == ("samples", "there are only 6 different runs to draw, not 7")


VALUES = st.lists(st.integers(0, 99), min_size=1, max_size=4, unique=True)


@given(
    grid=st.dictionaries(st.sampled_from("abc"), VALUES, max_size=3),
    zipped=VALUES,
    points=VALUES,
    samples=st.integers(1, 5),
    included=VALUES,
)
def test_the_number_of_runs_is_known_before_they_are_expanded(
    grid: dict[str, list[int]], zipped: list[int], points: list[int], samples: int, included: list[int]
) -> None:
    section = {
        **grid,
        "zip": {"z": zipped, "y": zipped},
        "points": [{"p": point} for point in points],
        "r": "uniform(0, 1)",
        "samples": samples,
        "include": [{"i": value} for value in included],
    }
    sweep = read(section)
    factors = [*map(len, grid.values()), len(zipped), len(points), samples]
    assert sweep.count == len(sweep.expand()) == math.prod(factors) + len(included)
    assert len({json.dumps(run, sort_keys=True) for run in runs(section)}) == sweep.count
    assert sweep.expand()[0] == sweep.first()


@pytest.mark.parametrize(
    "section",
    [
        {},
        {"include": None, "exclude": None},
    ],
)  # fmt: skip
def test_a_sweep_that_varies_nothing_is_refused(section: object) -> None:
    [(key, message)] = mistakes_of(section)
    assert key == ""
    assert message.startswith("the sweep varies nothing")


@pytest.mark.parametrize(
    ("section", "key", "message"),
    [
        ({"b": []}, "b", "expected a list of at least one value"),
        ({"b": "1,2"}, "b", "expected a list of at least one value"),
        ({"b": "range(3, 3)"}, "b", "no values"),
        ({"b": ["range(3)"]}, "b", "write it without brackets"),
        ({"b": [1, 2, 1]}, "b", "occurs twice"),
        ({"params": {"lr": [1, 2]}}, "params", "name the key as a whole: write 'params.lr: [1, 2]'"),
        ({"zip": {"b": [1, 2], "c": [1, 2, 3]}}, "zip", "b has 2, c has 3"),
        ({"zip": [{"b": [1]}, {}]}, "zip.1", "expected a mapping"),
        ({"zip": {"b": "uniform(0, 1)"}, "samples": 2}, "zip.b", "outside of 'zip'"),
        ({"points": [{"b": 1}, {"b": 1}]}, "points.1", "occurs twice"),
        ({"points": {"b": 1}}, "points", "expected a list of mappings"),
        ({"points": [1]}, "points.0", "expected a mapping"),
        ({"zip": {"b": []}}, "zip.b", "at least one value"),
        ({"include": [{"b": 1}, {"b": 1}]}, "include.1", "included twice"),
        ({"include": []}, "include", "expected a list of mappings"),
        ({"exclude": [{"c": 1}]}, "exclude.0.c", "does not vary"),
        ({"exclude": [{"a": 1}]}, "exclude", "exclude all of the 1 runs"),
        ({"zip": {"a": [1]}}, "zip.a", "'a' is varied twice, here and in 'a'"),
        ({"points": [{"a": 1}]}, "points", "varied twice"),
        ({"b": "uniform(0, 1)"}, "b", "need 'samples'"),
        ({"b": "uniform(0, 1)", "samples": 0}, "samples", "at least 1"),
        ({"b": "uniform(0, 1)", "samples": 2, "seed": "x"}, "seed", "whole number"),
        ({"samples": 3}, "samples", "no key has random values"),
    ],
)  # fmt: skip
def test_a_mistake_is_reported_at_its_key(section: dict[str, Any], key: str, message: str) -> None:
    [(at, why)] = mistakes_of({"a": [1], **section})
    assert at == key
    assert message in why


@pytest.mark.parametrize(
    ("section", "runs"),
    [
        ({"params.lr": {"range": [0, 71]}}, 71),
        ({"params.lr": {"linspace": [0, 1, 5]}}, 5),
        ({"params.lr": {"choice": ["relu", "gelu", True]}}, 3),
        ({"params.lr": {"uniform": [0, 1]}}, 20),
        ({"params.lr": {"values": [1, 2]}}, 2),
        ({"params.lr": {"foo": 3}}, 2),
        ({"params.lr": 0.1}, 1),
        ({"params.lr": "0.1,0.3,1"}, 3),
        ({"params.lr": None}, 2),
        ({"params.lr": "uniform(0, 1)"}, 20),
        ({"params": {"lr": [1, 2, 3]}}, 3),
        ({"params": {"model": {"depth": [1, 2, 3]}}}, 3),
    ],
)  # fmt: skip
def test_what_is_written_instead_of_another_form_is_accepted(section: dict[str, Any], runs: int) -> None:
    def check(key: str) -> None:
        if key not in ("params", "params.lr", "params.model", "params.model.depth"):
            raise ValueError(key)

    [(at, why)] = mistakes_of(section, check_key=check)
    proposed = yaml.safe_load("\n".join(re.findall(r"'([\w.]+: [^']*)'", why.partition("; ")[2])))
    replaced = at if {*proposed} - {"samples"} else ""
    fixed = {key: value for key, value in section.items() if key != replaced} | proposed
    assert mistakes_of(fixed, check_key=check) == []
    assert read_sweep(fixed, lambda *_: None, check).count == runs


def test_an_unknown_key_is_refused_wherever_it_stands() -> None:
    def check(key: str) -> None:
        if key != "a":
            raise ValueError(f"no {key}")

    section = {
        "a": [1],
        "b": [1],
        "zip": {"c": [1]},
        "points": [{"d": 1}],
        "include": [{"e": 1}],
        "exclude": [{"f": 1}],
    }
    at = [key for key, _ in mistakes_of(section, check_key=check)]
    assert at == ["b", "zip.c", "points.0.d", "exclude.0.f", "include.0.e"]


def test_a_sweep_of_too_many_runs_is_refused_with_the_figure_before_it_is_expanded() -> None:
    section = {f"k{index}": "range(10000000)" for index in range(6)}
    [(key, message)] = mistakes_of(section)
    assert key == ""
    assert message.startswith(f"the sweep has {10**42} runs, more than the limit of 10000")
    assert mistakes_of({"a": "range(100)", "b": "range(100)"}) == []
    assert mistakes_of({"a": "range(3)"}, max_runs=3) == []
    assert mistakes_of({"a": "range(4)"}, max_runs=3)[0][1].startswith("the sweep has 4 runs, more than the limit of 3")


SMALL = ResourcesSpec(gpus_per_node=1, time=3600)


def pack_of(value: Any) -> tuple[Pack | None, list[tuple[KeyPath, str]]]:
    mistakes: list[tuple[KeyPath, str]] = []
    return read_pack(value, lambda at, message: mistakes.append((at, message))), mistakes


@pytest.mark.parametrize(
    ("value", "pack"),
    [
        (None, None),
        (4, Pack(4)),
        ({"runs": 2}, Pack(2)),
        ({"runs": 3, "share_gpu": True}, Pack(3, share_gpu=True)),
    ],
)
def test_a_pack_is_a_number_of_runs_or_a_mapping(value: Any, pack: Pack | None) -> None:
    assert pack_of(value) == (pack, [])
    assert pack is None or Pack.from_dict(pack.to_dict()) == pack


@pytest.mark.parametrize(
    ("resources", "pack", "slurm", "problem"),
    [
        (SMALL, Pack(2), {}, ""),
        (SMALL, Pack(2, share_gpu=True), {"gres": "gpu:a100:1"}, ""),
        (ResourcesSpec(nodes=Nodes(2, 2)), Pack(2), {}, "resources.nodes"),
        (ResourcesSpec(), Pack(2, share_gpu=True), {}, "resources.gpus_per_node"),
        (SMALL, Pack(2), {"gres": "gpu:a100:1"}, "slurm.gres"),
    ],
)  # fmt: skip
def test_runs_that_cannot_share_a_job_are_refused_by_the_name_of_a_key(
    resources: ResourcesSpec, pack: Pack, slurm: dict[str, str], problem: str
) -> None:
    message = packing_problem(resources, pack, slurm)
    assert problem in message
    assert bool(message) == bool(problem)


@pytest.mark.parametrize(
    ("pack", "node_hours", "gpu_hours"), [(None, 4, 4), (Pack(4), 1, 4), (Pack(4, share_gpu=True), 1, 1)]
)
def test_runs_of_a_pack_cost_their_shares_of_its_job(pack: Pack | None, node_hours: float, gpu_hours: float) -> None:
    cost = cost_of([SMALL] * 4, pack)
    assert (cost.node_hours, cost.gpu_hours) == (node_hours, gpu_hours)


def test_runs_without_a_time_limit_are_in_no_sum() -> None:
    unlimited, limited = ResourcesSpec(gpus_per_node=8), ResourcesSpec(gpus_per_node=1, time=3600)
    assert str(cost_of([unlimited])) == "1 run without a time limit"
    assert str(cost_of([unlimited, limited])) == (
        "2 runs, at most 1.0 GPU-hours and 1.0 node-hours per attempt, and 1 of them without a time limit"
    )


def test_a_rule_that_excludes_nothing_is_known() -> None:
    sweep = read({"a": [1, 2], "exclude": [{"a": 1}, {"a": 0.3}, {"a": True}]})
    assert [swept.at for swept in sweep.idle_rules()] == [("exclude", "1", "a"), ("exclude", "2", "a")]


@pytest.mark.parametrize(
    ("runs", "gpu_hours", "key"),
    [(10, 100.0, ""), (11, 1.0, "sweep_confirm_runs"), (10, 100.1, "sweep_confirm_gpu_hours")],
)
def test_what_exceeds_a_limit_names_its_key(runs: int, gpu_hours: float, key: str) -> None:
    excess = SweepCost(runs, 1.0, gpu_hours, 0).excess(10, 100)
    assert bool(excess) == bool(key)
    assert key in excess
