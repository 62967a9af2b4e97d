"""The states of all random number generators of a process, as data that ``weights_only`` loading accepts."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch
import xxhash


def capture(device: torch.device) -> dict[str, Any]:
    """The states of the generators of Python, NumPy (if it is loaded), torch and this ``device``."""
    version, internal, gauss = random.getstate()
    states: dict[str, Any] = {"python": [version, list(internal), gauss], "torch": torch.get_rng_state()}
    if "numpy" in sys.modules:
        name, keys, position, has_gauss, cached = sys.modules["numpy"].random.get_state()
        states["numpy"] = [str(name), torch.from_numpy(keys.copy()), int(position), int(has_gauss), float(cached)]
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def restore(states: dict[str, Any], device: torch.device) -> None:
    """Set the generators to captured ``states``; generators without one are left alone."""
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))
    torch.set_rng_state(states["torch"])
    if "numpy" in states and "numpy" in sys.modules:
        name, keys, position, has_gauss, cached = states["numpy"]
        sys.modules["numpy"].random.set_state((name, keys.numpy(), position, has_gauss, cached))
    if "cuda" in states and device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"], device)


def reseed(plan_hash: str | None, step: int, rank: int) -> None:
    """Seed the generators of a ``rank`` whose states were not saved because the number of ranks was different.

    The seed is XXH3-64 of "<``plan_hash``>:<``step``>:<rank>": different on every rank, the same on every resume.
    """
    seed_all(xxhash.xxh3_64_intdigest(f"{plan_hash}:{step}:{rank}".encode()))


def seed_all(seed: int) -> None:
    """Seed the generators of Python, NumPy, torch and all devices with this number, of up to 64 bits.

    Torch has imported NumPy if it is installed: a script cannot import it later without having it seeded.
    """
    random.seed(seed)
    torch.manual_seed(seed % 2**63)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)
