"""Whether the nodes of a job have the same hardware."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from helpers.node_facts import HOSTS

from slurmtrain.model.experiment.resources import ResourcesSpec
from slurmtrain.model.experiment.spec import Spec
from slurmtrain.model.preflight.checks import blamed_nodes, judge_checks
from slurmtrain.model.preflight.hardware import judge_hardware

A100 = {"name": "NVIDIA A100-SXM4-80GB", "memory": 85_095_874_560}
SMALL_A100 = {"name": "NVIDIA A100-SXM4-80GB", "memory": 42_949_672_960}
RTX = {"name": "NVIDIA GeForce RTX 3090", "memory": 25_446_645_760}


def gpus(*each: dict[str, Any]) -> dict[str, Any]:
    return {"gpus": list(each)}


def cpus(model: str, count: float) -> dict[str, Any]:
    return {"cpu": model, "cpus": count}


def test_equal_nodes_pass() -> None:
    judged = judge_hardware({0: gpus(A100, A100), 1: gpus(A100, A100)}, HOSTS, mixed=False)
    assert {(status, summary) for status, summary, _ in judged.values()} == {
        ("pass", "2 x NVIDIA A100-SXM4-80GB, 79 GiB")
    }


def test_different_gpus_are_refused_with_the_nodes_and_the_types() -> None:
    judged = judge_hardware({0: gpus(A100), 1: gpus(RTX), 2: gpus(A100)}, HOSTS, mixed=False)
    status, summary, evidence = judged[2]
    assert status == "fail"
    assert summary == (
        "GPUs differ (node0, node2: 1 x NVIDIA A100-SXM4-80GB, 79 GiB; node1: 1 x NVIDIA GeForce RTX 3090, 24 GiB): "
        "set 'resources.mixed: true', or request one type"
    )
    assert evidence["ambiguous"]


def test_gpus_of_the_same_name_may_differ_in_memory() -> None:
    judged = judge_hardware({0: gpus(A100), 1: gpus(SMALL_A100)}, HOSTS, mixed=False)
    assert {status for status, _, _ in judged.values()} == {"fail"}


def test_what_the_driver_keeps_of_the_memory_is_no_difference() -> None:
    less = {**A100, "memory": A100["memory"] - 50_000_000}
    judged = judge_hardware({0: gpus(A100), 1: gpus(less)}, HOSTS, mixed=False)
    assert {status for status, _, _ in judged.values()} == {"pass"}


def test_the_gpus_of_a_single_node_may_differ() -> None:
    assert judge_hardware({0: gpus(A100, RTX)}, HOSTS, mixed=False)[0][0] == "fail"
    assert judge_hardware({0: gpus(A100, RTX)}, HOSTS, mixed=True)[0][0] == "pass"


@pytest.mark.parametrize("other", [cpus("EPYC 7402", 8.0), cpus("Xeon 6248", 2.0)])
def test_different_cpus_are_a_warning(other: dict[str, Any]) -> None:
    status, summary, _ = judge_hardware({0: cpus("Xeon 6248", 8.0), 1: other}, HOSTS, mixed=False)[0]
    assert status == "warn"
    assert "node0: 8 x Xeon 6248; node1:" in summary


def test_a_mixture_that_is_allowed_is_recorded() -> None:
    judged = judge_hardware({0: gpus(A100), 1: gpus(RTX)}, HOSTS, mixed=True)
    assert judged[1] == ("pass", "1 x NVIDIA GeForce RTX 3090, 24 GiB", {"gpus": [RTX], "mixed": True})


def test_a_refused_mixture_puts_no_node_in_the_ledger() -> None:
    facts = {node: {"hardware": gpus(gpu)} for node, gpu in enumerate((A100, A100, RTX))}
    findings = judge_checks(facts, Spec(resources=ResourcesSpec(gpus_per_node=1)), HOSTS)
    hardware = {
        node: [each.status for each in of_node if each.check == "hardware"] for node, of_node in findings.items()
    }
    assert hardware == {0: ["fail"], 1: ["fail"], 2: ["fail"]}
    assert not blamed_nodes(findings)
    allowed = replace(Spec(), resources=ResourcesSpec(gpus_per_node=1, mixed=True))
    statuses = {each.status for of_node in judge_checks(facts, allowed, HOSTS).values() for each in of_node}
    assert "fail" not in statuses
