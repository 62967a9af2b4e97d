"""Trainings that print what their library or their author prints by default: the first argument says which."""

from __future__ import annotations

import sys
import time
from typing import Any


def transformers() -> None:
    """Hugging Face's Trainer with its bars, and its dicts without a step."""
    import tempfile

    import torch
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    rows = torch.randint(16, (40, 8), generator=torch.Generator().manual_seed(1))
    data: Any = [{"input_ids": row, "labels": row} for row in rows]
    config = GPT2Config(
        vocab_size=16, n_positions=8, n_embd=8, n_layer=1, n_head=1, bos_token_id=0, eos_token_id=0, pad_token_id=0
    )
    with tempfile.TemporaryDirectory() as directory:
        args = TrainingArguments(
            output_dir=directory, max_steps=12, per_device_train_batch_size=4, logging_steps=4, eval_strategy="steps",
            eval_steps=6, save_strategy="no", use_cpu=True, report_to=[],
        )  # fmt: skip
        Trainer(model=GPT2LMHeadModel(config), args=args, train_dataset=data, eval_dataset=data).train()


def lightning() -> None:
    """Lightning's own bar, with a validation."""
    import lightning as pl
    import torch

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.nn.Linear(4, 1)

        def _loss(self, batch: torch.Tensor) -> torch.Tensor:
            return self.net(batch).square().mean()

        def training_step(self, batch: torch.Tensor) -> torch.Tensor:
            loss = self._loss(batch)
            self.log("train_loss", loss, prog_bar=True)
            return loss

        def validation_step(self, batch: torch.Tensor) -> None:
            self.log("val_loss", self._loss(batch), prog_bar=True)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    loader = torch.utils.data.DataLoader(torch.randn(24, 4), batch_size=4)
    trainer = pl.Trainer(max_epochs=3, accelerator="cpu", logger=False, enable_checkpointing=False)
    trainer.fit(Module(), loader, loader)


def tqdm() -> None:
    """A loop with tqdm and what it shows behind the bar."""
    from tqdm import tqdm

    for epoch in range(2):
        bar = tqdm(range(10), desc=f"epoch {epoch}", mininterval=0)
        for step in bar:
            bar.set_postfix(loss=1 / (1 + 10 * epoch + step), lr=f"{1e-3:.0e}")


def nanogpt() -> None:
    """As in nanoGPT's train.py."""
    for iter_num in range(31):
        if iter_num % 10 == 0:
            print(f"step {iter_num}: train loss {4 - iter_num / 10:.4f}, val loss {4.1 - iter_num / 10:.4f}")
        print(f"iter {iter_num}: loss {4 - iter_num / 10:.4f}, time {41.22:.2f}ms, mfu {-100:.2f}%")


def keras() -> None:
    """As Keras prints it into a file: a line for each update, with colours."""
    for epoch in range(1, 4):
        print(f"Epoch {epoch}/3")
        for step in (1, 4, 8):
            bar = f"\x1b[1m{step}/8\x1b[0m \x1b[32m{'━' * 2 * step}\x1b[0m\x1b[37m{'━' * 2 * (8 - step)}\x1b[0m"
            figures = f"accuracy: {0.1 * epoch:.4f} - loss: {1 / (8 * epoch + step):.4f}"
            print(f"\b\b\b\r{bar} \x1b[1m0s\x1b[0m 20ms/step - {figures}", end="")
        print(f" - val_accuracy: {0.1 * epoch:.4f} - val_loss: {1 / epoch:.4f}")


def examples() -> None:
    """As PyTorch's example for MNIST: samples of an epoch, and a summary."""
    for epoch in range(1, 3):
        for batch in range(3):
            share = f"[{batch * 640}/60000 ({batch}%)]"
            print(f"Train Epoch: {epoch} {share}\tLoss: {1 / (epoch + batch):.6f}")
        print(f"\nTest set: Average loss: {1 / epoch:.4f}, Accuracy: {9800 + epoch}/10000 (98%)\n")


def converted() -> None:
    """Prints a loss, and reports its steps to slurmtrain once a file is there."""
    from pathlib import Path

    import slurmtrain

    print("step 7/9 loss: 0.5", flush=True)
    while not Path(sys.argv[2]).exists():
        time.sleep(0.05)
    slurmtrain.log(accuracy=0.5)
    slurmtrain.progress(2, 2)
    print("step 8/9 loss: 0.4", flush=True)


def numberless() -> None:
    """Much of what has numbers and no metric."""
    print("2026-11-29 10:20:30,123 INFO train.py:12: torch 2.9.1 on 10.0.0.1, seed 3")
    print("python train.py --lr 0.1 --loss 3")
    print("Namespace(lr=0.1, loss='mse', label_smoothing=0.1)")
    print("Loading checkpoint shards:  50%|#####     | 1/2 [00:00<00:00, 80.1it/s]")
    print("the loss has the shape (3, 4); weights are in loss=0.31.pt, at 3e5f9ab")
    print('Traceback (most recent call last):\n  File "t.py", line 3, in f\n    loss = 0.5\nValueError: loss: 0.5')
    print("t.py:3: UserWarning: loss: 3\n  loss = 1")


if __name__ == "__main__":
    globals()[sys.argv[1]]()
