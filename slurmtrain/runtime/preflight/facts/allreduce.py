"""An all-reduce over the elected network, run by child processes and measured as in nccl-tests.

``python -m slurmtrain.runtime.preflight.facts.allreduce JSON`` is one rank: one per GPU over NCCL, or one per node over
gloo. It leaves nothing in the agent: no CUDA context, which would hold GPU memory, and no threads.
"""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

from slurmtrain.model.experiment.launcher import NodeRanks
from slurmtrain.model.experiment.spec import Spec
from slurmtrain.runtime.environment.ranks import for_all_reduce
from slurmtrain.system.interpreter import own_python

_WARM_UPS, _REPEATS = 2, 5
# Less than node 0 waits for the report (participant.BANDWIDTH_S), so that the report says what went wrong.
_TIMEOUT_S = 100.0
_POLL_S = 0.05


def measure_all_reduce(spec: Spec, node: int, nodes: int, address: str, port: int, interface: str) -> dict[str, Any]:
    """Run this node's ranks of an all-reduce across all nodes.

    Args:
        spec: Says how many GPUs a node has, and how much to reduce.
        node: This node's number.
        nodes: How many nodes there are.
        address: Node 0's address, where the ranks meet.
        port: The port there.
        interface: The interface of this node that the libraries must use.

    Returns:
        What was measured, or ``skip`` or ``error`` with the reason. ``algbw_gb_s`` is the size divided by the time;
        ``busbw_gb_s`` is that times 2 (n - 1) / n, which the slowest link has carried in each direction (PERFORMANCE.md
        of nccl-tests). GB are 1e9 bytes.
    """
    gpus = [spec.resources.of_node(each).gpus_per_node for each in range(nodes)]
    with_gpus = all(gpus)
    ranks = NodeRanks(tuple(gpus) if with_gpus else (1,) * nodes)
    if ranks.world_size < 2:
        return {"skip": "there is only one rank"}
    # float32, of 4 bytes.
    elements = max(1, int(spec.preflight.bandwidth.size_mb * 1e6) // 4)
    configs = [
        {"rank": rank, "world_size": ranks.world_size, "gpu": local if with_gpus else None,
         "address": address, "port": port, "elements": elements}
        for local, rank in enumerate(ranks.ranks_of(node))
    ]  # fmt: skip
    return _run_ranks(configs, for_all_reduce(spec, interface, address))


def _run_ranks(configs: Sequence[Mapping[str, Any]], environ: Mapping[str, str]) -> dict[str, Any]:
    """Run a child process for each rank, and return their measurements, or how one of them failed."""
    with contextlib.ExitStack() as files:
        # Files, not pipes: libraries with NCCL_DEBUG=INFO fill a pipe, and then block until it is read.
        streams = [
            [files.enter_context(tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")) for _ in range(2)]
            for _ in configs
        ]
        children = [
            subprocess.Popen(
                own_python("-m", "slurmtrain.runtime.preflight.facts.allreduce", json.dumps(config)),
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
            )
            for config, (out, err) in zip(configs, streams, strict=True)
        ]
        try:
            deadline = time.monotonic() + _TIMEOUT_S
            codes = [child.poll() for child in children]
            # When one has failed, the others would wait for it until the time is up.
            while None in codes and not any(codes) and time.monotonic() <= deadline:
                time.sleep(_POLL_S)
                codes = [child.poll() for child in children]
        finally:
            for child in children:
                child.kill()
                child.wait()
        for stream in chain.from_iterable(streams):
            stream.seek(0)
        outputs = [(out.read(), err.read()) for out, err in streams]
    for code, (_, errors) in zip(codes, outputs, strict=True):
        if code:
            killed = f"killed by {signal.Signals(-code).name}" if code < 0 else ""
            last_line = (errors.strip().splitlines() or [""])[-1]
            return {"error": ": ".join(filter(None, (killed, last_line))) or f"exit code {code}"}
    if None in codes:
        return {"error": f"the all-reduce has not ended within {_TIMEOUT_S:.0f} s"}
    # Libraries may have printed their own lines first.
    figures = [line for line in outputs[0][0].splitlines() if line.startswith("{")][-1]
    facts: dict[str, Any] = json.loads(figures)
    return facts


def _run_rank(config: Mapping[str, Any]) -> dict[str, Any]:
    """Run one rank, and return the figures, which are the same on all ranks: the time is the slowest rank's."""
    import torch
    import torch.distributed as dist

    rank, world = config["rank"], config["world_size"]
    device = torch.device("cpu") if config["gpu"] is None else torch.device("cuda", config["gpu"])
    backend = "gloo" if config["gpu"] is None else "nccl"
    store = dist.TCPStore(config["address"], config["port"], world, rank == 0)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world)
    # A maximum of ones stays one, however often it is reduced: sums would overflow.
    load = torch.ones(config["elements"], dtype=torch.float32, device=device)
    for _ in range(_WARM_UPS):
        dist.all_reduce(load, op=dist.ReduceOp.MAX)
    _synchronize(device)
    began = time.perf_counter()
    for _ in range(_REPEATS):
        dist.all_reduce(load, op=dist.ReduceOp.MAX)
    _synchronize(device)
    seconds = torch.tensor([(time.perf_counter() - began) / _REPEATS], dtype=torch.float64, device=device)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    dist.destroy_process_group()
    slowest_s = float(seconds[0])
    algorithm_gb_per_s = load.numel() * load.element_size() / slowest_s / 1e9
    return {
        "algbw_gb_s": algorithm_gb_per_s,
        "busbw_gb_s": algorithm_gb_per_s * 2 * (world - 1) / world,
        "seconds": slowest_s,
        "ranks": world,
        "size_mb": load.numel() * load.element_size() / 1e6,
        "backend": backend,
    }


def _synchronize(device: Any) -> None:
    """Wait until a GPU has done what was queued; a CPU has done it already."""
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    print(json.dumps(_run_rank(json.loads(sys.argv[1]))))
