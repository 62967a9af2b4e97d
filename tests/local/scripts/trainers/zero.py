"""A tiny network in DeepSpeed's engine with ZeRO-1, on as many processes as the run has; PARAMS say how."""

from __future__ import annotations

from pathlib import Path

import deepspeed
import torch
from record import DIRECTORY, PARAMS, RANK, RESUME_FROM, SAVE_EVERY, STEPS, ended, slow_saves, trained

import slurmtrain

CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "Adam", "params": {"lr": 0.01, "torch_adam": True}},
    "zero_optimization": {"stage": 1},
}


def main() -> None:
    slow_saves()
    adapted = bool(PARAMS.get("adapter"))
    deepspeed.init_distributed()
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.1), torch.nn.Linear(16, 1))
    engine, *_ = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=CONFIG)
    if RESUME_FROM:
        engine.load_checkpoint(str(Path(RESUME_FROM).parent), tag=Path(RESUME_FROM).name)
    if adapted:
        slurmtrain.progress(engine.global_steps, STEPS)
    while engine.global_steps < STEPS:
        torch.manual_seed(1000 * engine.global_steps + RANK)
        batch = torch.randn(4, 8)
        loss = torch.nn.functional.mse_loss(engine(batch)[:, 0], batch.sum(1))
        engine.backward(loss)
        engine.step()
        trained(engine.global_steps)
        stopping = False
        if adapted:
            slurmtrain.log(loss=loss)
            slurmtrain.progress(engine.global_steps, STEPS)
            stopping = engine.global_steps < STEPS and slurmtrain.stop_requested()
        if stopping or engine.global_steps % SAVE_EVERY == 0:
            engine.save_checkpoint(str(DIRECTORY))
        if stopping:
            slurmtrain.leave()
    ended(engine.module)


if __name__ == "__main__":
    main()
