"""Training on GPUs whose result depends on every step, every rank, and every random number drawn on the GPU."""

from __future__ import annotations

import hashlib
import os
import signal
import threading
from pathlib import Path

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import slurmtrain

PARAMS = {"steps": 24, "strategy": "ddp", "step_ms": 0, "die_at": -1, "hang_at": -1, "fault_at": -1}


def network(device: torch.device, strategy: str) -> nn.Module:
    model = nn.Sequential(nn.Linear(64, 256), nn.Dropout(0.5), nn.GELU(), nn.Linear(256, 8)).to(device)
    if strategy == "ddp":
        return DistributedDataParallel(model)
    from torch.distributed.fsdp import fully_shard

    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    return fully_shard(model)


def weights_digest(model: nn.Module) -> str:
    """SHA-256 of the bits of this rank's part of all parameters."""
    digest = hashlib.sha256()
    for value in model.parameters():
        local = value.to_local() if hasattr(value, "to_local") else value
        digest.update(local.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def misbehave(step: int, params: dict[str, object], rank: int, world_size: int) -> None:
    """Die, hang, or let the GPU fault at this step, once: the first time that a run gets there."""
    marker = Path(os.environ["SLURMTRAIN_RUN_DIR"]) / "misbehaved"
    if (
        rank != world_size - 1
        or marker.exists()
        or step not in (params["die_at"], params["hang_at"], params["fault_at"])
    ):
        return
    marker.touch()
    if step == params["die_at"]:
        os.kill(os.getpid(), signal.SIGKILL)
    if step == params["fault_at"]:
        from fault import write_to_nowhere

        write_to_nowhere()
    threading.Event().wait()


def main() -> None:
    torch.use_deterministic_algorithms(True)
    # NCCL has no two ranks on one GPU; gloo has.
    alone = int(os.environ["LOCAL_WORLD_SIZE"]) <= torch.cuda.device_count()
    with slurmtrain.session(params=PARAMS, backend=None if alone else "gloo") as run:
        params = run.params
        assert run.device.type == "cuda"
        torch.manual_seed(1)
        model = network(run.device, params["strategy"])
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01, fused=True)
        scaler = torch.amp.GradScaler(
            "cuda", init_scale=2.0**10, growth_interval=5, enabled=params["strategy"] == "ddp"
        )
        torch.manual_seed(100 + run.rank)
        run.checkpoint(model=model, optimizer=optimizer, scaler=scaler)
        for step in run.steps(params["steps"]):
            # Drawn on the GPU: without its generator's state no other run sees the same numbers.
            batch = torch.randn(32, 64, device=run.device)
            loss = model(batch).square().mean()
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            threading.Event().wait(params["step_ms"] / 1000)
            misbehave(step, params, run.rank, run.world_size)
            run.log(loss=loss)
        if run.dir is not None:
            (run.dir / f"weights-{run.rank}.txt").write_text(weights_digest(model))


if __name__ == "__main__":
    main()
