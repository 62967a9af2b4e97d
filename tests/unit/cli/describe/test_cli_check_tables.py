"""What a preflight found, as rows of tables."""

from __future__ import annotations

from typing import Any

import pytest

from slurmtrain.cli.describe.check_tables import (
    check_rows,
    describe_count,
    excluded_addresses,
    finding_lines,
    has_failed,
    network_rows,
    node_rows,
    speed,
)


def finding(check: str, status: str, summary: str = "") -> dict[str, Any]:
    return {"check": check, "status": status, "summary": summary}


def test_a_check_that_all_nodes_agree_on_is_one_line() -> None:
    alike = {f"n{i}": [finding("versions", "pass", "torch 2.13"), finding("gpu", "skip", "none")] for i in range(3)}
    assert check_rows(alike) == [("versions", "pass", "all 3", "torch 2.13"), ("gpu", "skip", "all 3", "none")]
    assert (has_failed(alike), describe_count(alike)) == (False, "1 check passed, 1 skipped")
    assert (check_rows({}), describe_count({}), has_failed({})) == ([], "", False)


@pytest.mark.parametrize(
    ("status", "summaries", "nodes", "shown"),
    [
        ("pass", ["0 GB free", "1 GB free", "2 GB free"], "all 3", "0 to 2 GB free (the largest on n2)"),
        ("pass", [f"1 GPU, model {name}" for name in "xxy"], "all 3", "1 GPU, model x (n0)"),
        ("fail", ["no room", "no room"], "all 2", "no room"),
        ("pass", ["ok"], "n0", "ok"),
    ],
    ids=["a range of figures", "one of several words", "a failure of all", "a single node"],
)
def test_what_all_nodes_say_of_a_check_is_a_line(status: str, summaries: list[str], nodes: str, shown: str) -> None:
    checks = {f"n{i}": [finding("disk", status, summary)] for i, summary in enumerate(summaries)}
    assert check_rows(checks) == [("disk", status, nodes, shown)]


def test_nodes_with_the_same_finding_share_a_line_whatever_its_figures() -> None:
    checks = {
        "n0": [finding("clock", "pass", "ok")],
        "n1": [finding("clock", "fail", "5.5 s ahead (limit 1 s)")],
        "n2": [finding("clock", "pass", "ok")],
        "n3": [finding("clock", "fail", "9 s ahead (limit 1 s)")],
        "n4": [finding("clock", "warn", "it was not measured")],
    }
    assert check_rows(checks) == [
        ("clock", "pass", "n[0,2]", "ok"),
        ("clock", "fail", "n[1,3]", "5.5 to 9 s ahead (limit 1 s) (the largest on n3)"),
        ("clock", "warn", "n4", "it was not measured"),
    ]

    assert has_failed(checks)
    assert describe_count(checks) == "0 checks passed"


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
    taps = [{"host": f"n{i}", "interface": "tap0", "address": f"10.1.0.{i}", "why": "a tunnel"} for i in range(3)]
    network = {"networks": [], "elected": None, "excluded": [{"host": "n0", **docker}, {"host": "n1", **docker}, *taps]}
    assert excluded_addresses(network) == [
        "docker0 172.17.0.1 on n[0-1]: of containers",
        "tap0 10.1.0.0 and 2 more on n[0-2]: a tunnel",
    ]
    assert excluded_addresses(None) == []


def test_a_finding_of_many_nodes_and_attempts_is_one_line() -> None:
    unlimited = finding("limits", "pass", "any number of open files")
    checks = {f"tb{i}": [finding("clock", "warn", "not measured: no answer"), unlimited] for i in range(1, 16)}
    attempts = [{"number": number, "checks": checks} for number in (1, 2, 3, 5)]
    assert finding_lines(attempts) == ["warn  clock on tb[1-15] in attempts 1-3,5: not measured: no answer"]
    assert finding_lines(attempts[:1]) == ["warn  clock on tb[1-15]: not measured: no answer"]
    late = {"number": 6, "checks": {"tb7": [finding("clock", "fail", "7 s ahead")]}}
    assert finding_lines([*attempts, late])[1:] == ["fail  clock on tb7 in attempt 6: 7 s ahead"]


def test_a_row_of_a_node_has_all_that_is_known_about_it_alone() -> None:
    attempt = {
        "nodes": ["n0", "n1", "n1"],
        "interfaces": {"n0": "ib0"},
        "clock": {"n1": {"offset_ms": 0.25, "bound_ms": 0.01}},
        "checks": {"n1": [finding("disk", "pass"), finding("gpu", "fail", "7 of 8 GPUs")]},
    }
    assert node_rows(attempt) == [("n0", "ib0", "-", ""), ("n1", "-", "+0.25 ms ± 0.01", "fail gpu: 7 of 8 GPUs")]


@pytest.mark.parametrize(("mbps", "words"), [(None, "-"), (100, "100 Mbit/s"), (2500, "2.5 Gbit/s")])
def test_a_speed_is_told_in_its_unit(mbps: float | None, words: str) -> None:
    assert speed(mbps) == words
