"""How many threads of gloo are left once the session has ended: those of no group that is still referred to."""

from pathlib import Path

import torch

import slurmtrain

with slurmtrain.session() as run:
    model = torch.nn.Linear(2, 2)
    run.checkpoint(model=model)
    for _ in run.steps(3):
        pass

names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
print("gloo threads:", sum(name.startswith("pt_gloo") for name in names), flush=True)
