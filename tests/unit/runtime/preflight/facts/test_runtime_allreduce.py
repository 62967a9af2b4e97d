"""The all-reduce that measures a network: real ranks over gloo on loopback, and ranks that fail."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from helpers.rare import rare
from helpers.site import PATIENCE_S

from slurmtrain.model.experiment.resources import ResourcesSpec
from slurmtrain.model.experiment.sections import BandwidthCheck, PreflightSpec
from slurmtrain.model.experiment.spec import Spec
from slurmtrain.model.experiment.values import Nodes
from slurmtrain.runtime.preflight import ports
from slurmtrain.runtime.preflight.facts import allreduce
from slurmtrain.runtime.preflight.facts.allreduce import measure_all_reduce


def spec(nodes: int, gpus: int = 0, **rest: Any) -> Spec:
    bandwidth = BandwidthCheck(level="fail", size_mb=1)
    resources = ResourcesSpec(nodes=Nodes(nodes, nodes), gpus_per_node=gpus)
    return Spec(resources=resources, preflight=PreflightSpec(bandwidth=bandwidth), **rest)


def free_port() -> int:
    """One that the kernel gives to no connection of another test: it is bound seconds later, when torch is there."""
    with ports.listen_on_job_port("127.0.0.1", f"tests of {os.getpid()}", 0) as probe:
        return int(probe.getsockname()[1])


def reduce_on_all_nodes(nodes: int, interfaces: Sequence[str]) -> list[dict[str, Any]]:
    """What every node has measured, all of them at the same time."""
    port, results = free_port(), [{} for _ in range(nodes)]  # type: list[Any]

    def run_node(node: int) -> None:
        results[node] = measure_all_reduce(spec(nodes), node, nodes, "127.0.0.1", port, interfaces[node])

    threads = [threading.Thread(target=run_node, args=(node,)) for node in range(nodes)]
    with mock.patch.object(allreduce, "_TIMEOUT_S", 4 * PATIENCE_S):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return results


@pytest.fixture
def python(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Have another program run as the ranks; its last argument is the JSON that a rank is told."""

    def run_script(script: str) -> None:
        path = tmp_path / "python"
        path.write_text(f"#!/bin/sh\nfor told; do :; done\n{script}\n")
        path.chmod(0o755)
        monkeypatch.setattr(allreduce.sys, "executable", str(path))

    return run_script


# --- ranks that do their work -----------------------------------------------------------------------------------


def test_three_ranks_measure_one_figure_and_what_the_slowest_link_has_carried() -> None:
    first, *others = reduce_on_all_nodes(3, ["lo"] * 3)
    assert others == [first, first]
    assert first["ranks"] == 3
    assert first["backend"] == "gloo"
    assert first["size_mb"] == 1.0
    assert first["seconds"] > 0
    assert first["algbw_gb_s"] == pytest.approx(1e6 / first["seconds"] / 1e9)
    assert first["busbw_gb_s"] == pytest.approx(first["algbw_gb_s"] * 2 * 2 / 3)
    assert json.loads(json.dumps(first, allow_nan=False)) == first


def test_a_rank_gets_its_number_its_gpu_and_the_variables_of_the_network(python: Any) -> None:
    python('echo "{\\"told\\": $told, \\"gloo\\": \\"$GLOO_SOCKET_IFNAME\\", \\"nccl\\": \\"$NCCL_SOCKET_IFNAME\\", '
           '\\"mine\\": \\"$MINE\\"}"')  # fmt: skip
    facts = measure_all_reduce(spec(3, gpus=2, env={"MINE": "yes"}), 1, 3, "10.0.0.1", 4711, "ib0")
    assert (facts["gloo"], facts["nccl"], facts["mine"]) == ("ib0", "=ib0", "yes")
    assert facts["told"] == {
        "rank": 2,
        "world_size": 6,
        "gpu": 0,
        "address": "10.0.0.1",
        "port": 4711,
        "elements": 250_000,
    }


def test_figures_are_found_among_much_output_of_libraries(python: Any) -> None:
    python("yes 'NCCL INFO {Bootstrap}' | head -n 100000; yes NCCL WARN | head -n 100000 >&2; echo '{\"ranks\": 2}'; "
           "echo 'NCCL INFO comm destroyed'")  # fmt: skip
    assert measure_all_reduce(spec(1, gpus=2), 0, 1, "127.0.0.1", 1, "lo") == {"ranks": 2}


# --- ranks that fail --------------------------------------------------------------------------------------------


@rare
def test_ranks_that_cannot_use_their_interface_report_an_error() -> None:
    for results in reduce_on_all_nodes(2, ["nope0"] * 2):
        assert set(results) == {"error"}
        assert "nope0" in results["error"]
        assert "\n" not in results["error"]


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("echo Traceback >&2; echo 'RuntimeError: out of memory' >&2; exit 1", "RuntimeError: out of memory"),
        ("exit 3", "exit code 3"),
        ("kill -9 $$", "killed by SIGKILL"),
        ("echo 'NCCL WARN no device' >&2; kill -ABRT $$", "killed by SIGABRT: NCCL WARN no device"),
    ],
)
def test_the_error_of_a_rank_that_dies_says_how_it_died(python: Any, script: str, reason: str) -> None:
    python(script)
    assert measure_all_reduce(spec(2), 1, 2, "127.0.0.1", 1, "lo") == {"error": reason}


@pytest.mark.parametrize("failing_rank", [0, 1])
def test_when_one_rank_dies_the_others_are_killed(python: Any, failing_rank: int, tmp_path: Path) -> None:
    python(f"""case "$told" in
    *'"rank": {failing_rank},'*) echo 'RuntimeError: no GPU' >&2; exit 1;;
    *) : > {tmp_path}/$$; exec sleep 1000;;
    esac""")
    assert measure_all_reduce(spec(1, gpus=2), 0, 1, "127.0.0.1", 1, "lo") == {"error": "RuntimeError: no GPU"}
    started = [file.name for file in tmp_path.iterdir() if file.name.isdecimal()]  # none, where it was ended first
    assert not any(Path(f"/proc/{pid}").exists() for pid in started)


def test_ranks_that_do_not_end_in_time_are_killed(python: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allreduce, "_TIMEOUT_S", 0.1)
    python("exec sleep 1000")
    assert measure_all_reduce(spec(1, gpus=2), 0, 1, "127.0.0.1", 1, "lo") == {
        "error": "the all-reduce has not ended within 0 s"
    }
