"""An all-reduce over the elected network, by processes of its own, as nccl-tests measure it.

``python -m slurmtrain.runtime.preflight.facts.allreduce JSON`` is one rank: one a GPU over NCCL, or one a node over
gloo. Nothing of it stays in the agent: no CUDA context, no threads.
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
from typing import Any

from slurmtrain.model.spec.spec import Spec
from slurmtrain.runtime.job.environment import for_all_reduce

_WARM_UPS, _REPEATS = 2, 5
_TIMEOUT_S = 100.0
_POLL_S = 0.05


def measure_all_reduce(spec: Spec, node: int, nodes: int, address: str, port: int, interface: str) -> dict[str, Any]:
    """This node's ranks of an all-reduce of all ``nodes``; what it measured, or ``skip`` or ``error`` with why not.

    ``algbw_gb_s`` is the size over the time; ``busbw_gb_s`` is that times 2 (n - 1) / n, which the slowest link has
    carried in each direction (PERFORMANCE.md of nccl-tests). GB are 1e9 bytes.
    """
    gpus = spec.resources.gpus_per_node
    here = gpus or 1
    if nodes * here < 2:
        return {"skip": "there is only one rank"}
    elements = max(1, int(spec.preflight.bandwidth.size_mb * 1e6) // 4)
    ranks = [
        {"rank": node * here + local, "world_size": nodes * here, "gpu": local if gpus else None,
         "address": address, "port": port, "elements": elements}
        for local in range(here)
    ]  # fmt: skip
    with contextlib.ExitStack() as files:
        # Files, not pipes: libraries that are told to say much fill a pipe, and wait until somebody reads it.
        said = [[files.enter_context(tempfile.TemporaryFile("w+")) for _ in ("out", "err")] for _ in ranks]
        children = [
            subprocess.Popen(
                [sys.executable, "-m", "slurmtrain.runtime.preflight.facts.allreduce", json.dumps(rank)],
                env=for_all_reduce(spec, interface, address),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
            )
            for rank, (out, err) in zip(ranks, said, strict=True)
        ]
        try:
            codes = _wait(children)
        finally:
            for child in children:
                child.kill()
                child.wait()
        for out, err in said:
            out.seek(0)
            err.seek(0)
        return _facts(codes, [(out.read(), err.read()) for out, err in said])


def _wait(children: Sequence[subprocess.Popen[bytes]]) -> list[int | None]:
    """How these have ended: until all have, or one has failed, for which the others would wait, or the time is up."""
    deadline = time.monotonic() + _TIMEOUT_S
    while True:
        codes = [child.poll() for child in children]
        if None not in codes or any(codes) or time.monotonic() > deadline:
            return codes
        time.sleep(_POLL_S)


def _facts(codes: Sequence[int | None], said: Sequence[tuple[str, str]]) -> dict[str, Any]:
    for code, (_, complaint) in zip(codes, said, strict=True):
        if code:
            return {"error": _why(code, (complaint.strip().splitlines() or [""])[-1])}
    if None in codes:
        return {"error": f"the all-reduce has not ended within {_TIMEOUT_S:.0f} s"}
    # Libraries may have said something as well.
    figures = [line for line in said[0][0].splitlines() if line.startswith("{")][-1]
    facts: dict[str, Any] = json.loads(figures)
    return facts


def _why(code: int, last_line: str) -> str:
    if code > 0:
        return last_line or f"exit code {code}"
    killed = f"killed by {signal.Signals(-code).name}"
    return f"{killed}: {last_line}" if last_line else killed


def _rank(told: Mapping[str, Any]) -> dict[str, Any]:
    """One rank's part. The time is that of the slowest rank."""
    import torch
    import torch.distributed as dist

    rank, world = told["rank"], told["world_size"]
    device = torch.device("cpu") if told["gpu"] is None else torch.device("cuda", told["gpu"])
    backend = "gloo" if told["gpu"] is None else "nccl"
    store = dist.TCPStore(told["address"], told["port"], world, rank == 0)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world)
    load = torch.ones(told["elements"], dtype=torch.float32, device=device)
    for _ in range(_WARM_UPS):
        dist.all_reduce(load, op=dist.ReduceOp.MAX)
    _finish(device)
    began = time.perf_counter()
    for _ in range(_REPEATS):
        dist.all_reduce(load, op=dist.ReduceOp.MAX)
    _finish(device)
    seconds = torch.tensor([(time.perf_counter() - began) / _REPEATS], dtype=torch.float64, device=device)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    dist.destroy_process_group()
    took = float(seconds[0])
    algorithm = load.numel() * load.element_size() / took / 1e9
    return {
        "algbw_gb_s": algorithm,
        "busbw_gb_s": algorithm * 2 * (world - 1) / world,
        "seconds": took,
        "ranks": world,
        "size_mb": load.numel() * load.element_size() / 1e6,
        "backend": backend,
    }


def _finish(device: Any) -> None:
    """Wait for what a GPU still does."""
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    print(json.dumps(_rank(json.loads(sys.argv[1]))))
