"""Train a small model with Lightning: checkpoints at steps 3, 6 and 9 in argv[1]; argv[2] is "ddp" or "sharded"."""

import sys

import lightning
import torch
from ending import leave
from lightning.pytorch.callbacks import ModelCheckpoint, Timer
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard


class Net(lightning.LightningModule):
    def __init__(self, lr: float = 0.1, place: str = sys.argv[1]) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layer = torch.nn.Linear(8, 1)

    def configure_model(self) -> None:
        if sys.argv[2] == "sharded":
            fully_shard(self.layer, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        loss = self.layer(batch).pow(2).mean()
        self.log("val_loss", loss)
        return loss

    def configure_optimizers(self) -> dict[str, object]:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.1)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2)}


lightning.seed_everything(0)
loader = torch.utils.data.DataLoader([torch.randn(8) for _ in range(64)], batch_size=4)
saving = ModelCheckpoint(
    dirpath=sys.argv[1], filename="{epoch}-{step}-{val_loss:.2f}", every_n_train_steps=3, save_top_k=-1, save_last=True
)
trainer = lightning.Trainer(
    max_steps=9, accelerator="cpu", devices=2, strategy=ModelParallelStrategy() if sys.argv[2] == "sharded" else "ddp",
    callbacks=[saving, Timer()], enable_progress_bar=False, logger=False, enable_model_summary=False,
)  # fmt: skip
trainer.fit(Net(), loader, ckpt_path=sys.argv[3] if len(sys.argv) > 3 else None)
leave()
