"""Whether samples of nodes show that a run does nothing."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from slurmtrain.model.diagnosis.node_load import JOB_CORES, Idle, LoadSample, find_idle, joules, read_sample

NOW = 10_000.0
Node = Sequence[LoadSample]


def node(*use: float | None, gpus: int = 2, cores: float = 0.0, every_s: float = 15.0, until: float = NOW) -> Node:
    """A node whose GPUs were used so much, in percent, each at its time; None: they do not tell."""
    begin = until - every_s * len(use)
    return [
        LoadSample(
            begin + every_s * (place + 1),
            7,
            {JOB_CORES: cores}
            | ({} if percent is None else {f"gpu_{gpu}_utilization_percentage": percent for gpu in range(gpus)}),
        )
        for place, percent in enumerate(use)
    ]


def with_steps(samples: Node, *steps: int) -> Node:
    return [LoadSample(each.time, step, each.figures) for each, step in zip(samples, steps, strict=True)]


QUIET = [0.0] * 8
NONE = [None] * 8
CASES: list[tuple[str, dict[str, Node], bool, Idle | None]] = [
    ("all GPUs do nothing", {"a": node(*QUIET), "b": node(1.0, *QUIET)}, True, Idle(NOW - 105, 4, 2)),
    ("since the last that was busy", {"a": node(90.0, *QUIET[:6])}, True, Idle(NOW - 75, 2, 1)),
    ("busy on one node", {"a": node(*QUIET), "b": node(*QUIET[:7], 50.0)}, True, None),
    ("processors do not count beside GPUs", {"a": node(*QUIET, cores=30.0)}, True, Idle(NOW - 105, 2, 1)),
    ("too few samples to know", {"a": node(0.0, 0.0, 0.0)}, True, None),
    ("no sample", {"a": []}, True, None),
    ("no node", {}, True, None),
    ("GPUs that do not tell their use", {"a": node(*NONE)}, True, None),
    ("a node without GPUs adds nothing", {"a": node(*QUIET), "b": node(*NONE)}, True, Idle(NOW - 105, 2, 1)),
    ("stopped: nothing is noted any more", {"a": node(*QUIET, until=NOW - 200)}, True, None),
    ("notes of long runs are far apart", {"a": node(*QUIET, every_s=960, until=NOW - 900)}, True,
     Idle(NOW - 900 - 7 * 960, 2, 1)),
    ("a node that was lost", {"a": node(*QUIET), "b": node(80.0, *QUIET, until=NOW - 3600)}, True,
     Idle(NOW - 105, 2, 1)),
    ("without GPUs, processes that do nothing", {"a": node(*NONE)}, False, Idle(NOW - 105, 0, 1)),
    ("processes that compute", {"a": node(*NONE, cores=0.9)}, False, None),
    ("GPUs that were not asked for are used", {"a": node(*QUIET[:7], 30.0)}, False, None),
    ("steps that need no processor", {"a": with_steps(node(*NONE), *range(8))}, False, None),
    ("nothing is known of processes", {"a": [LoadSample(NOW - 15 * i, 1, {}) for i in range(8, 0, -1)]}, False, None),
]  # fmt: skip


@pytest.mark.parametrize(("nodes", "wants_gpus", "idle"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_a_run_is_idle_if_all_that_is_known_of_it_does_nothing(
    nodes: dict[str, Node], wants_gpus: bool, idle: Idle | None
) -> None:
    assert find_idle(nodes, NOW, wants_gpus=wants_gpus) == idle


def test_an_idle_run_is_described_in_a_sentence() -> None:
    sentences = [Idle(0.0, gpus, 1).describe() for gpus in (0, 1, 8)]
    assert sentences == [
        "its processes have computed nothing since 1970-01-01T00:00:00.000Z",
        "its GPU has been idle since 1970-01-01T00:00:00.000Z",
        "its 8 GPUs have been idle since 1970-01-01T00:00:00.000Z",
    ]
    assert Idle(0.0, 8, 2).to_dict() == {"since": "1970-01-01T00:00:00.000Z", "gpus": 8, "nodes": 2}


def test_energy_is_summed_over_starts_of_the_ranks() -> None:
    counted = [{"gpu_0_energy_joules": 100.0, "gpu_1_energy_joules": 5.0}, {"gpu_0_energy_joules": 250.0}, {"x": 1.0},
               {"gpu_0_energy_joules": 30.0}, {"gpu_0_energy_joules": 40.0}]  # fmt: skip
    assert joules(LoadSample(0.0, None, figures) for figures in counted) == 295.0
    assert joules([LoadSample(0.0, None, {"x": 1.0})]) is None
    # Files of runs may hold anything.
    assert read_sample(
        {"t": 1, "step": True, "metrics": {"a": 1, "b": "2", "c": None, "d": False, "e": float("nan"), "f": -1}}
    ) == LoadSample(1.0, None, {"a": 1.0})
    assert read_sample({"t": 1, "metrics": [1]}) is None
