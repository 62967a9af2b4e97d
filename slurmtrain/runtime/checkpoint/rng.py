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
        states["numpy"] = numpy_state(sys.modules["numpy"].random)
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def restore(states: dict[str, Any], device: torch.device) -> None:
    """Set the generators to captured ``states``; generators without one are left alone."""
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))
    torch.set_rng_state(states["torch"])
    if "numpy" in states and "numpy" in sys.modules:
        set_numpy_state(sys.modules["numpy"].random, states["numpy"])
    if "cuda" in states and device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"], device)


def numpy_state(generator: Any) -> list[Any]:
    """The state of a ``generator`` of NumPy, or of its global one, as data that ``weights_only`` loading accepts."""
    name, keys, position, has_gauss, cached = generator.get_state()
    return [str(name), torch.from_numpy(keys.copy()), int(position), int(has_gauss), float(cached)]


def set_numpy_state(generator: Any, state: list[Any]) -> None:
    """Set a ``generator`` of NumPy to a ``state`` that :func:`numpy_state` has returned."""
    name, keys, position, has_gauss, cached = state
    generator.set_state((name, keys.numpy(), int(position), int(has_gauss), cached))


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
