"""A tiny network with Lightning's Trainer, on as many processes as the run has; PARAMS say how."""

from __future__ import annotations

import os
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from record import DIRECTORY, PARAMS, RANK, RESUME_FROM, SAVE_EVERY, STEPS, ended, evaluated, slow_saves, trained
from torchdata.stateful_dataloader import StatefulDataLoader

SIZE = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


class Module(LightningModule):
    """Regression to the sum of eight numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        loss = torch.nn.functional.mse_loss(self.net(batch)[:, 0], batch.sum(1))
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: torch.Tensor, index: int) -> None:
        evaluated(index)
        self.log("val_loss", torch.nn.functional.mse_loss(self.net(batch)[:, 0], batch.sum(1)), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)


class Record(Callback):
    """Records each step."""

    def on_train_batch_end(self, trainer: Any, *arguments: Any) -> None:
        trained(trainer.global_step)


def main() -> None:
    slow_saves()
    seed_everything(0)
    rows = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))
    # Its state is in the checkpoint. With torch's own, Lightning resumes in mid-epoch with the first batches again, and
    # with its own DistributedSampler in the order of the first epoch.
    sampler = torch.utils.data.DistributedSampler(rows, int(os.environ["WORLD_SIZE"]), RANK, shuffle=False)
    # Persistent workers: with Python before 3.11.10 one that is forked in a later epoch may hang (gh-112275).
    loader = StatefulDataLoader(
        rows, 4, sampler=sampler, num_workers=2, multiprocessing_context="fork", persistent_workers=True
    )
    callbacks: list[Callback] = [
        Record(),
        ModelCheckpoint(DIRECTORY, filename="{epoch}-{step}", every_n_train_steps=SAVE_EVERY, save_top_k=-1),
    ]
    logger: Any = False
    if PARAMS.get("adapter"):
        from slurmtrain.integrations.lightning import SlurmtrainCallback, SlurmtrainLogger

        callbacks.append(SlurmtrainCallback())
        logger = SlurmtrainLogger()
    trainer = Trainer(
        max_steps=STEPS,
        accelerator="cpu",
        devices=PARAMS.get("devices", SIZE),
        num_nodes=int(os.environ.get("GROUP_WORLD_SIZE", "1")),
        strategy="ddp",
        logger=logger,
        callbacks=callbacks,
        log_every_n_steps=1,
        val_check_interval=PARAMS.get("eval_every"),
        limit_val_batches=2 if PARAMS.get("eval_every") else 0,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    module = Module()
    trainer.fit(module, loader, torch.utils.data.DataLoader(rows, 4), ckpt_path=RESUME_FROM)
    ended(module)


if __name__ == "__main__":
    main()
