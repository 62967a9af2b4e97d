"""Train a small model with accelerate: two checkpoints, of step 3 and 6, in argv[1]/checkpoints."""

import sys

import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration
from ending import leave


class Counter:
    steps = 0

    def state_dict(self) -> dict[str, int]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.steps = state["steps"]


accelerator = Accelerator(
    cpu=True, project_config=ProjectConfiguration(project_dir=sys.argv[1], automatic_checkpoint_naming=True)
)
torch.manual_seed(0)
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.AdamW(model.parameters())
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
loader = torch.utils.data.DataLoader([torch.randn(8) for _ in range(64)], batch_size=4, shuffle=True)
model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
counter = Counter()
accelerator.register_for_checkpointing(counter)
for batch in loader:
    accelerator.backward(model(batch).pow(2).mean())
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    counter.steps += 1
    if counter.steps in (3, 6):
        accelerator.save_state()
leave()
