"""What a preflight found, as rows of tables."""

from __future__ import annotations

from typing import Any

import pytest

from slurmtrain.cli.shared.check_tables import (
    check_rows,
    describe_clocks,
    describe_count,
    excluded_addresses,
    has_failed,
    network_rows,
    notable,
    speed,
)


def finding(check: str, status: str, summary: str = "") -> dict[str, Any]:
    return {"check": check, "status": status, "summary": summary}


ALIKE = {f"n{i}": [finding("versions", "pass", "torch 2.13"), finding("gpu", "skip", "none")] for i in range(3)}


def test_a_check_that_all_nodes_agree_on_is_one_line() -> None:
    assert check_rows(ALIKE) == [
        ("versions", "pass", "all 3", "torch 2.13"),
        ("gpu", "skip", "all 3", "none"),
    ]
    assert notable(ALIKE) == []
    assert not has_failed(ALIKE)
    assert describe_count(ALIKE) == "1 check passed, 1 skipped"


def test_figures_of_nodes_that_pass_may_differ_and_one_is_shown_with_its_node() -> None:
    checks = {f"n{i}": [finding("disk", "pass", f"{i} GB free")] for i in range(3)}
    assert check_rows(checks) == [("disk", "pass", "all 3", "0 GB free (n0)")]


def test_each_node_that_deviates_is_a_line_of_its_own() -> None:
    checks = {
        "n0": [finding("clock", "pass", "ok")],
        "n1": [finding("clock", "fail", "5 s ahead")],
        "n2": [finding("clock", "pass", "ok")],
        "n3": [finding("clock", "fail", "9 s ahead")],
        "n4": [finding("clock", "pass", "ok")],
    }
    assert check_rows(checks) == [
        ("clock", "pass", "3 of 5", "ok"),
        ("clock", "fail", "n1", "5 s ahead"),
        ("clock", "fail", "n3", "9 s ahead"),
    ]
    assert [row[2] for row in notable(checks)] == ["n1", "n3"]
    assert has_failed(checks)
    assert describe_count(checks) == "0 checks passed"


def test_a_failure_of_all_nodes_is_one_line() -> None:
    checks = {f"n{i}": [finding("disk", "fail", "no room")] for i in range(2)}
    assert notable(checks) == [("disk", "fail", "all 2", "no room")]


def test_a_single_node_is_named() -> None:
    assert check_rows({"n0": [finding("disk", "pass", "ok")]}) == [("disk", "pass", "n0", "ok")]


def test_no_checks_are_no_words() -> None:
    assert (check_rows({}), describe_count({}), has_failed({})) == ([], "", False)


NETWORK = {
    "elected": "10.58.0.0/24",
    "networks": [
        {"name": "10.57.0.0/24", "kind": "ethernet", "speed_mbps": 100, "proved": None, "interfaces": {"n0": "eno1"}},
        {
            "name": "10.58.0.0/24",
            "kind": "ethernet",
            "speed_mbps": None,
            "proved": True,
            "mtu": 9000,
            "measured_mb_per_s": 512.3,
            "interfaces": {"n0": "hsn0", "n1": "ib0"},
        },
        {"name": "interface docker0", "speed_mbps": 10_000, "proved": False, "problems": ["a", "b", "c"]},
    ],
}


def test_networks_are_listed_with_the_elected_one_first() -> None:
    assert network_rows(NETWORK) == [
        ("10.58.0.0/24", "yes", "ethernet", "-", "512 MB/s", "9000", "hsn0, ib0", "yes"),
        ("10.57.0.0/24", "", "ethernet", "100 Mbit/s", "-", "-", "eno1", "not tried"),
        ("interface docker0", "", "-", "10 Gbit/s", "-", "-", "", "no: a; b; and 1 more"),
    ]
    assert network_rows(None) == []


def test_addresses_that_were_no_candidates_are_told_once_for_all_nodes() -> None:
    docker = {"interface": "docker0", "address": "172.17.0.1", "why": "of containers"}
    tap = {"host": "n1", "interface": "tap0", "address": "10.1.0.1", "why": "a tunnel"}
    network = {"networks": [], "elected": None, "excluded": [{"host": "n0", **docker}, {"host": "n1", **docker}, tap]}
    assert excluded_addresses(network) == [
        "docker0 172.17.0.1 on 2 nodes: of containers",
        "tap0 10.1.0.1 on n1: a tunnel",
    ]
    assert excluded_addresses(None) == []


def test_clocks_are_told_with_their_uncertainty() -> None:
    clock = {
        "n0": {"offset_ms": 0.0, "bound_ms": 0.0},
        "n1": {"offset_ms": 5003.2, "bound_ms": 0.0254},
        "n2": {"offset_ms": None, "bound_ms": None},
    }
    assert describe_clocks(clock) == "n0 +0 ms, n1 +5.003 s, n2 not measured"


def test_of_many_clocks_those_that_are_furthest_away_are_told() -> None:
    clock = {f"n{i}": {"offset_ms": float(-i), "bound_ms": None} for i in range(10)}
    assert describe_clocks(clock).startswith("n9 -9 ms, n8 -8 ms, ")
    assert describe_clocks(clock).endswith("n2 -2 ms, and 2 more")


@pytest.mark.parametrize(("mbps", "words"), [(None, "-"), (100, "100 Mbit/s"), (2500, "2.5 Gbit/s")])
def test_a_speed_is_told_in_its_unit(mbps: float | None, words: str) -> None:
    assert speed(mbps) == words
