"""What a preflight found, as rows of tables."""

from __future__ import annotations

from typing import Any

import pytest

from slurmtrain.cli import formatting
from slurmtrain.cli.describe import (
    check_rows,
    count_and_nodes,
    describe_clocks,
    describe_count,
    describe_evidence,
    describe_hang,
    describe_restart,
    describe_time,
    describe_values,
    excluded_addresses,
    finding_lines,
    has_failed,
    merge,
    network_rows,
    newest_lines,
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


def test_time_is_listed_in_the_order_of_an_attempt_without_kinds_that_took_none() -> None:
    spent = {"train": 3661.0, "queue": 12.4, "lost": 0.4, "stop": 0.0, "start": 59.6}
    assert describe_time(spent, 0.8666) == "queue 12s, start 1m00s, train 1h01m, goodput 87 %"
    assert describe_time({"queue": 12.0}) == "queue 12s"
    assert describe_time({}) == ""


@pytest.mark.parametrize(
    ("restart", "sentence"),
    [
        ({"cause": "crash", "reached": 18, "why": "rank 1 exited with 3"}, "crash after step 18: rank 1 exited with 3"),
        ({"cause": "node_fail", "why": "n2 is gone", "lost": [2, 5]}, "node_fail: n2 is gone; without node 2, 5"),
        ({}, "restart"),
    ],
)
def test_a_restart_in_place_has_its_cause_and_the_missing_nodes(restart: dict[str, Any], sentence: str) -> None:
    assert describe_restart(restart) == sentence


def test_a_hang_has_its_culprits_and_the_time_without_progress() -> None:
    ranks = [{"idle_s": 0.0}, {"idle_s": 63.2}, {"idle_s": 61.0}]
    hang = {"why": "rank 1 is stopped by a signal", "ranks": ranks}
    assert describe_hang(hang) == "rank 1 is stopped by a signal (no progress for 1m01s)"
    assert describe_hang({**hang, "ranks": ranks[:1]}) == "rank 1 is stopped by a signal"


def test_evidence_is_readable_and_what_is_empty_is_left_out() -> None:
    evidence = {"oom_kills": 2, "memory_limit": None, "xids": [79, 48], "gpus": [], "slurm": {"state": "COMPLETING"}}
    assert describe_evidence(evidence) == "oom_kills 2, xids 79, 48, slurm (state COMPLETING)"
    slurm = {"state": "PREEMPTED", "preempt_time": 1_700_000_000.0, "start_time": None, "time_left_s": 3_725.5}
    readable = "slurm (state PREEMPTED, preempt_time 2023-11-14 22:13, time_left 1h02m)"
    assert describe_evidence({"signal": "SIGTERM", "slurm": slurm}) == f"signal SIGTERM, {readable}"


def test_only_the_last_of_many_lines_are_shown_and_equal_ones_once() -> None:
    assert newest_lines(["a", "b", "a"]) == ["a (2 times)", "b"]
    assert newest_lines([str(i) for i in range(7)]) == ["2 earlier ones; --json shows them", "2", "3", "4", "5", "6"]


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
    assert formatting.describe_nodes(hosts) == text


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
