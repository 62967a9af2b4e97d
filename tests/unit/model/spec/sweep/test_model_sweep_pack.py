"""How runs of a sweep share jobs: what a spec may say, and what it costs."""

from __future__ import annotations

from typing import Any

import pytest

from slurmtrain.model.spec.kinds import KeyPath
from slurmtrain.model.spec.resources import ResourcesSpec
from slurmtrain.model.spec.sweep import Pack, cost_of, packing_problem, read_pack, read_sweep
from slurmtrain.model.spec.values import Nodes

SMALL = ResourcesSpec(gpus_per_node=1, time=3600)


def read(value: Any) -> tuple[Pack | None, list[tuple[KeyPath, str]]]:
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
    assert read(value) == (pack, [])
    assert pack is None or Pack.from_dict(pack.to_dict()) == pack


@pytest.mark.parametrize(
    ("value", "at", "message"),
    [
        (1, ("pack",), "of at least 2, found 1"),
        (-1, ("pack",), "of at least 2, found -1"),
        (True, ("pack",), "found true/false"),
        ([2], ("pack",), "expected a section"),
        ({}, ("pack", "runs"), "this key is required"),
        ({"runs": "4"}, ("pack", "runs"), "found text"),
        ({"runs": 4, "share_gpu": "yes"}, ("pack", "share_gpu"), "expected true or false"),
        ({"runs": 4, "share_gpus": True}, ("pack", "share_gpus"), "did you mean 'share_gpu'?"),
    ],
)
def test_another_value_is_a_mistake_at_its_place(value: Any, at: KeyPath, message: str) -> None:
    _, mistakes = read(value)
    assert [place for place, _ in mistakes] == [at]
    assert message in mistakes[0][1]


def test_fewer_runs_at_once_than_share_a_job_are_a_mistake() -> None:
    mistakes: list[tuple[KeyPath, str]] = []
    section = {"params.a": [1, 2, 3, 4], "parallel": 2, "pack": 4}
    read_sweep(section, lambda at, message: mistakes.append((at, message)), lambda _: None)
    assert mistakes == [(("parallel",), "the 4 runs of a pack run at once, which is more than 2")]


@pytest.mark.parametrize(
    ("resources", "pack", "slurm", "problem"),
    [
        (SMALL, Pack(2), {}, ""),
        (SMALL, Pack(2, share_gpu=True), {"gres": "gpu:a100:1"}, ""),
        (ResourcesSpec(nodes=Nodes(2, 2)), Pack(2), {}, "resources.nodes"),
        (ResourcesSpec(spares=1), Pack(2), {}, "resources.nodes"),
        (ResourcesSpec(), Pack(2, share_gpu=True), {}, "resources.gpus_per_node"),
        (SMALL, Pack(2), {"gres": "gpu:a100:1"}, "slurm.gres"),
    ],
)
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
