"""Allocates more memory than a GPU has."""

from __future__ import annotations

import torch

import slurmtrain

with slurmtrain.session() as run:
    kept = []
    for _ in run.steps(10_000):
        kept.append(torch.empty(2**30, dtype=torch.uint8, device=run.device))
