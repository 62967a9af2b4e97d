"""Nodes, and what each of them reports, in as few words as possible."""

from __future__ import annotations

import pytest

from slurmtrain.cli.describe.node_lists import count_and_nodes, describe_clocks, describe_nodes, describe_values, merge

TB = [f"tb{i}" for i in range(1, 17)]


@pytest.mark.parametrize(
    ("hosts", "text"),
    [
        ([], ""),
        (["n1"], "n1"),
        (TB, "tb[1-16]"),
        (["n1", "n1"], "n1"),
        (["a b", "n1"], "a b,n1"),
        (
            [f"n{i}" for i in range(0, 90, 2)],
            "n[0,2,4,6,8,10,12,14,16,18,20,22,24,26,28,30,32,34,36,38,40,...] (45 nodes)",
        ),
        (["x" * 70, "y"], "x" * 60 + ",... (2 nodes)"),
    ],
)
def test_nodes_are_written_as_slurm_writes_them(hosts: list[str], text: str) -> None:
    assert describe_nodes(hosts) == text


def test_the_nodes_of_an_attempt_are_counted_if_there_are_several() -> None:
    assert count_and_nodes(TB) == "tb[1-16] (16 nodes)"
    assert count_and_nodes(["n1", "n1"]) == "n1 (2 nodes)"
    assert count_and_nodes(["n1"]) == "n1"


def test_a_value_that_all_nodes_have_is_written_once() -> None:
    interfaces = dict.fromkeys(TB, "hsn0")
    assert describe_values(interfaces) == "hsn0"
    assert describe_values({**interfaces, "tb1": "ib0", "tb2": "ib0"}) == "hsn0 on tb[3-16], ib0 on tb[1-2]"
    assert describe_values({}) == ""


def test_a_few_clocks_are_listed_with_their_uncertainty() -> None:
    clock = {
        "n0": {"offset_ms": 0.0, "bound_ms": 0.0},
        "n1": {"offset_ms": 5003.2, "bound_ms": 0.0254},
        "n2": {"offset_ms": None, "bound_ms": None},
        "n3": {"offset_ms": 0.5, "bound_ms": 0.0254},
    }
    assert describe_clocks(clock) == "n0 +0 ms, n1 +5.003 s, n2 not measured, n3 +0.5 ms ± 0.025"


def test_of_many_clocks_the_range_is_told_and_which_is_furthest_off() -> None:
    clock: dict[str, dict[str, float | None]] = {host: {"offset_ms": 0.1 * i - 0.2} for i, host in enumerate(TB[:7])}
    assert describe_clocks(clock) == "-0.2 ms to +0.4 ms, the furthest on tb7"
    unknown: dict[str, dict[str, float | None]] = {host: {"offset_ms": None} for host in TB[7:]}
    assert describe_clocks({**clock, **unknown}).endswith("on tb7; not measured on tb[8-16]")
    assert describe_clocks(unknown) == "not measured on tb[8-16]"
    assert describe_clocks({host: {"offset_ms": 0.0} for host in TB}) == "+0 ms"


def test_figures_that_differ_are_a_range_and_the_node_with_the_largest_is_named() -> None:
    texts = [("n1", "52 ms, 1.04 times the median (limit 2)"), ("n2", "96 ms, 1.92 times the median (limit 2)")]
    assert merge(texts) == "52 to 96 ms, 1.04 to 1.92 times the median (limit 2) (the largest on n2)"
    assert merge(texts[:1]) == texts[0][1]


@pytest.mark.parametrize("text", ["torch 2.13.0, CUDA 13.0", "10.0.0.4:29500 timed out", "node-7 s", "2x 3"])
def test_numbers_without_a_unit_are_no_figures(text: str) -> None:
    assert merge([("n1", text), ("n2", text.replace("2", "9"))]) == text
