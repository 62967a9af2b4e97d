"""The same training under Lightning's Trainer, with its requeueing of Slurm jobs."""

from __future__ import annotations

import argparse
import os
import signal
import time
from pathlib import Path
from typing import Any

import lightning
import torch
from _goodput_log import StepLog
from _goodput_train import Network, Task, make_optimizer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.environments import SLURMEnvironment

# More than the number of steps, so that the training never finishes its first epoch.
SAMPLES = 1_000_000


class Samples(torch.utils.data.Dataset[int]):
    """Numbers; the training data is the same at each step."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> int:
        return index


class Module(lightning.LightningModule):
    """The network, and its step."""

    def __init__(self, task: Task) -> None:
        super().__init__()
        self._task = task
        torch.manual_seed(0)
        self.network = Network()
        self._images, self._labels = torch.randn(32, 64), torch.randint(10, (32,))
        self._log: StepLog | None = None

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return make_optimizer(self.network)

    def on_train_start(self) -> None:
        self._log = StepLog(self._task.out, self.global_rank)

    def training_step(self, _batch: Any, _index: int) -> torch.Tensor:
        time.sleep(self._task.pause_s)
        return torch.nn.functional.cross_entropy(self.network(self._images), self._labels)

    def on_train_batch_end(self, *_: Any) -> None:
        assert self._log is not None
        self._log.finished(self.global_step)

    def on_train_end(self) -> None:
        # Also called if training was interrupted.
        if self._log is not None and self.global_step >= self._task.steps:
            self._log.finish()


def newest(folder: Path) -> Path | None:
    """The newest of the periodic checkpoints and those saved on a signal; Lightning looks for one kind only."""
    return max(folder.glob("*.ckpt"), key=lambda path: path.stat().st_mtime, default=None)


def main() -> None:
    parser = argparse.ArgumentParser()
    Task.add_arguments(parser)
    parser.add_argument("--requeue-signal", default="SIGUSR1")
    arguments = parser.parse_args()
    task = Task.chosen(arguments)
    torch.set_num_threads(1)
    folder = task.out / "lightning"
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        num_nodes=int(os.environ["SLURM_NNODES"]),
        strategy="ddp",
        plugins=[SLURMEnvironment(auto_requeue=True, requeue_signal=signal.Signals[arguments.requeue_signal])],
        max_steps=task.steps,
        default_root_dir=folder,
        callbacks=[ModelCheckpoint(dirpath=folder, every_n_train_steps=task.every)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loader = torch.utils.data.DataLoader(Samples(), batch_size=1)
    trainer.fit(Module(task), loader, ckpt_path=newest(folder), weights_only=False)


if __name__ == "__main__":
    main()
