"""Runs on GPUs: over NCCL, killed, stopped and restarted, they end with the weights of one that nothing disturbed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.site import Site, until

STEPS = 24
# cuBLAS is deterministic only with a fixed workspace (torch.use_deterministic_algorithms).
ENVIRONMENT = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
# Graphics engine exception, and MMU fault, in NVIDIA's Xid catalogue: a program brings them on itself.
XIDS_OF_PROGRAMS = {13, 31}
Submit = Callable[..., Path]


@pytest.fixture
def submit(site: Site, gpu_count: int) -> Submit:
    """Submits training on all GPUs, a rank each, and returns the run's directory."""

    def submit(
        name: str, *arguments: str, ranks: int = gpu_count, script: str = "train_on_gpu.py", code: int = 0, **keys: Any
    ) -> Path:
        params = {"steps": STEPS, **keys.pop("params", {})}
        spec = site.spec(
            name,
            script=script,
            **{
                "resources": {
                    "nodes": 1,
                    "procs_per_node": ranks,
                    "gpus_per_node": min(ranks, gpu_count),
                    "time": "00:08:00",
                },
                "checkpoint": {"every": {"steps": 5}},
                "env": ENVIRONMENT,
                "params": params if script == "train_on_gpu.py" else {},
                **keys,
            },
        )
        return site.runs / site.submit(spec, *arguments, code=code)

    return submit


def weights(run: Path) -> dict[str, str]:
    """The digest of each rank's weights, by the name of its file."""
    return {path.name: path.read_text() for path in run.glob("weights-*.txt")}


def events(run: Path, kind: str) -> list[dict[str, Any]]:
    """All events of a kind that the run's processes have journaled."""
    lines = [line for path in run.glob("attempts/*/*.jsonl") for line in path.read_text().splitlines()]
    return [event for event in map(json.loads, lines) if event.get("kind") == kind]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_a_run_killed_and_stopped_ends_with_the_weights_of_an_undisturbed_one(
    site: Site, submit: Submit, strategy: str
) -> None:
    undisturbed = submit("undisturbed", "--wait", params={"strategy": strategy})
    assert len(weights(undisturbed)) >= 1

    # A rank is killed in step 8, and the ranks are restarted in place; at step 14 or later the run is cancelled.
    run = submit("disturbed", params={"strategy": strategy, "die_at": 7, "step_ms": 200})
    until(lambda: site.step(run.name) >= 14, "step 14")
    site.call("cancel", run.name)
    stopped_at = site.status(run.name)["step"]
    assert 14 <= stopped_at < STEPS
    site.call("resume", run.name, "--wait", "params.step_ms=0")

    shown = site.status(run.name)
    assert (shown["state"], shown["step"], shown["attempt"]) == ("completed", STEPS, 2)
    assert sorted(event["step"] for event in events(run, "restored")) == [5, stopped_at]
    assert weights(run) == weights(undisturbed)


def test_the_session_uses_nccl_and_the_preflight_finds_every_gpu_fit(
    site: Site, submit: Submit, gpu_count: int
) -> None:
    run = submit("fit", "--wait")
    devices = {event["device"] for event in events(run, "session")}
    assert devices
    assert all(device.startswith("cuda") for device in devices)
    [preflight] = events(run, "preflight")
    [finding] = [finding for finding in preflight["findings"] if finding["check"] == "gpu"]
    assert finding["status"] == "pass"
    assert finding["evidence"]["count"] == gpu_count
    assert sorted(gpu["gpu"] for gpu in finding["evidence"]["gemm"]["gpus"]) == list(range(gpu_count))


@pytest.mark.slow
def test_two_ranks_share_a_gpu_over_gloo(submit: Submit, gpu_count: int) -> None:
    run = submit("shared", "--wait", ranks=gpu_count + 1)
    assert len(weights(run)) == gpu_count + 1
    assert len(set(weights(run).values())) == 1, "the replicas of DistributedDataParallel are equal"


@pytest.mark.slow
@pytest.mark.usefixtures("two_gpus")
def test_a_rank_that_hangs_while_others_wait_in_nccl_is_found_and_the_ranks_restarted(
    site: Site, submit: Submit, gpu_count: int
) -> None:
    run = submit("hangs", "--wait", params={"hang_at": 7}, requeue={"hang_after": 10})
    assert site.status(run.name)["state"] == "completed"
    [restart] = events(run, "restart")
    assert restart["cause"] == "hang"
    assert f"rank {gpu_count - 1}" in restart["why"]


def test_a_rank_that_exhausts_the_gpus_memory_is_out_of_memory(site: Site, submit: Submit) -> None:
    run = submit("full", "--wait", ranks=1, script="exhaust_memory.py", requeue={"enabled": False}, code=1)
    diagnosed = site.json("doctor", run.name)
    assert diagnosed["cause"] == "oom"
    assert diagnosed["root"]["cause"] == "GPU memory is full"


def test_a_gpu_fault_of_a_rank_is_evidence_of_its_attempt(site: Site, submit: Submit, faults: None) -> None:
    run = submit("faults", "--wait", ranks=1, params={"fault_at": 3}, requeue={"enabled": False}, code=1)
    [end] = events(run, "end")
    assert end["cause"] == "crash"
    xids = end["evidence"]["xids"]
    assert {xid["code"] for xid in xids} & XIDS_OF_PROGRAMS, xids
