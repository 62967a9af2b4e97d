"""Train a small model with the Trainer of transformers: checkpoints at steps 3, 6 and 9 in the directory argv[1]."""

import sys

import torch
from ending import leave
from transformers import Trainer, TrainingArguments


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        output = self.layers(x).squeeze(-1)
        return {"loss": ((output - labels) ** 2).mean(), "logits": output}


torch.manual_seed(0)
data = [{"x": torch.randn(8), "labels": torch.randn(())} for _ in range(64)]
arguments = TrainingArguments(
    output_dir=sys.argv[1], max_steps=9, save_steps=3, per_device_train_batch_size=4, report_to=[], use_cpu=True,
    save_only_model="only" in sys.argv, disable_tqdm=True,
)  # fmt: skip
resume = next((word for word in sys.argv[2:] if word != "only"), None)
Trainer(model=Net(), args=arguments, train_dataset=data).train(resume_from_checkpoint=resume)
leave()
