"""Which CPUs each rank of a node is bound to."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurmtrain.model.spec.resources import BINDINGS, Cpu, bind_ranks, read_cpus, write_cpus

# Two packages, each with a NUMA node of four cores with two threads: 0-7 are the first threads, 8-15 the second.
MACHINE = {cpu: Cpu(node=cpu % 8 // 4, package=cpu % 8 // 4, core=cpu % 4) for cpu in range(16)}
FIRST, SECOND = range(0, 4), range(4, 8)


def bound(bind: str, ranks: int, near: list[set[int]] | None = None, cpus: dict[int, Cpu] = MACHINE) -> list[str]:
    return [write_cpus(each) for each in bind_ranks(bind, cpus, ranks, near or [])]


@pytest.mark.parametrize(
    ("bind", "ranks", "expected"),
    [
        ("cores", 2, ["0-3,8-11", "4-7,12-15"]),
        ("cores", 4, ["0-1,8-9", "2-3,10-11", "4-5,12-13", "6-7,14-15"]),
        ("cores", 3, ["0-1,8-9", "2-4,10-12", "5-7,13-15"]),
        ("cores", 16, [f"{core},{core + 8}" for core in range(8) for _ in range(2)]),
        ("numa", 1, ["0-15"]),
        ("numa", 2, ["0-3,8-11", "4-7,12-15"]),
        ("numa", 4, ["0-3,8-11"] * 2 + ["4-7,12-15"] * 2),
    ],
)
def test_ranks_get_equal_shares_whose_cores_are_whole(bind: str, ranks: int, expected: list[str]) -> None:
    assert bound(bind, ranks) == expected


def test_ranks_near_the_same_gpus_divide_the_cpus_near_them() -> None:
    near = [set(SECOND) | {12, 13, 14, 15}] * 2 + [set(FIRST)] * 2
    assert bound("gpu", 4, near) == ["4-5,12-13", "6-7,14-15", "0-1", "2-3"]
    # Nothing is known of the GPU, or the job has none of the CPUs near it.
    assert bound("gpu", 2, [set(), {99}]) == ["0-3,8-11", "4-7,12-15"]


def test_only_cpus_that_the_agent_may_use_are_bound_to() -> None:
    allowed = {cpu: MACHINE[cpu] for cpu in (2, 3, 10, 11, 5)}
    assert bound("cores", 3, cpus=allowed) == ["2,10", "3,11", "5"]
    assert bound("numa", 2, cpus=allowed) == ["2-3,10-11", "5"]


@given(st.sampled_from(BINDINGS), st.integers(1, 40), st.sets(st.integers(0, 15), min_size=1), st.data())
def test_each_rank_has_cpus_and_only_those_of_the_agent(
    bind: str, ranks: int, allowed: set[int], data: st.DataObject
) -> None:
    near = [data.draw(st.sets(st.integers(0, 20))) for _ in range(ranks)]
    parts = bind_ranks(bind, {cpu: MACHINE[cpu] for cpu in allowed}, ranks, near)
    assert len(parts) == ranks
    assert all(part and part <= allowed for part in parts)


@given(st.sets(st.integers(0, 300)))
def test_a_list_of_cpus_reads_back_as_itself(cpus: set[int]) -> None:
    assert read_cpus(write_cpus(cpus)) == cpus
