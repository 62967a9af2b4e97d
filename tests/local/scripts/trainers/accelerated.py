"""A tiny network in a loop with accelerate, on as many processes as the run has; PARAMS say how."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import set_seed
from record import DIRECTORY, PARAMS, RESUME_FROM, SAVE_EVERY, STEPS, ended, slow_saves, trained

import slurmtrain


def main() -> None:
    slow_saves()
    adapted = bool(PARAMS.get("adapter"))
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))
    set_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    rows = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))
    # Persistent workers: with Python before 3.11.10 one that is forked in a later epoch may hang (gh-112275).
    loader = torch.utils.data.DataLoader(
        rows, batch_size=2, shuffle=True, num_workers=2, multiprocessing_context="fork", persistent_workers=True
    )
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    net, optimizer, loader = accelerator.prepare(net, optimizer, loader)

    def save(step: int) -> None:
        if adapted:
            from slurmtrain.integrations.accelerate import save_state

            save_state(accelerator, step)
        else:
            accelerator.save_state(str(DIRECTORY / f"checkpoint-{step}"))

    step = 0
    if adapted:
        from slurmtrain.integrations.accelerate import load_state

        step = load_state(accelerator)
        slurmtrain.progress(step, STEPS)
    elif RESUME_FROM:
        accelerator.load_state(RESUME_FROM)
        step = int(re.findall(r"\d+", Path(RESUME_FROM).name)[-1])
    while step < STEPS:
        epoch, skipped = divmod(step, len(loader))
        loader.set_epoch(epoch)
        for batch in accelerator.skip_first_batches(loader, skipped):
            loss = torch.nn.functional.mse_loss(net(batch)[:, 0], batch.sum(1))
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            step += 1
            trained(step)
            if adapted:
                slurmtrain.log(loss=loss)
                slurmtrain.progress(step, STEPS)
                if step < STEPS and slurmtrain.stop_requested():
                    save(step)
                    slurmtrain.leave()
            if step % SAVE_EVERY == 0:
                save(step)
            if step == STEPS:
                break
    ended(accelerator.unwrap_model(net))
    accelerator.end_training()


if __name__ == "__main__":
    main()
