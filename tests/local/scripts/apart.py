"""Trains for some seconds, joined with other ranks if it is told ``--join``."""

from __future__ import annotations

import sys
import time

import torch

torch.manual_seed(0)
if "--join" in sys.argv:
    torch.distributed.init_process_group("gloo")
for step in range(14):
    value = torch.ones(1)
    if "--join" in sys.argv:
        torch.distributed.all_reduce(value)
    print(f"step {step} loss {1 / (1 + step):.3f} {value.item()}", flush=True)
    time.sleep(1)
if "--join" in sys.argv:
    torch.distributed.destroy_process_group()
