"""The random number generators of a process: their states, as data that ``weights_only`` loading accepts, and seeds."""

from __future__ import annotations

import io
import random
import sys
from typing import Any

import torch
import xxhash

from slurmtrain.runtime.environment.node import Worker
from slurmtrain.runtime.job.process_group import RankGroup


def capture(device: torch.device) -> dict[str, Any]:
    """The states of the generators of Python, NumPy (if it is loaded), torch and this ``device``."""
    version, internal, gauss = random.getstate()
    states: dict[str, Any] = {"python": [version, list(internal), gauss], "torch": torch.get_rng_state()}
    # It is not imported for this: a script that has not loaded it has drawn no number from it.
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
    torch.manual_seed(seed % 2**63)
    seed_modules(seed)


def seed_modules(number: int) -> None:
    """Seed the generators of Python and NumPy with a ``number`` of up to 64 bits."""
    random.seed(number)
    if "numpy" in sys.modules:
        # NumPy's global generator takes 32 bits.
        sys.modules["numpy"].random.seed(number % 2**32)


# --- what a spec demands: 'seed' and 'deterministic' ------------------------------------------------------------------


def make_repeatable(worker: Worker) -> None:
    """Seed the random numbers of this process, and let torch use only deterministic algorithms, if the spec says so.

    All ranks get the same seed, so that they initialize the same weights: the convention of Lightning, accelerate and
    transformers, too. Workers of torch's data loader derive theirs from it.

    Args:
        worker: This process.
    """
    if worker.deterministic:
        # As use_deterministic_algorithms(True) does, without importing torch's compiler, which learns it from a
        # variable.
        torch.set_deterministic_debug_mode("error")
        torch.backends.cudnn.deterministic = True
        torch.backends.cudnn.benchmark = False
    if worker.seed is not None:
        seed_all(worker.seed)


def share_random_numbers(ranks: RankGroup, size: int) -> None:
    """Give ranks that divide layers among them the first one's random numbers, such as the numbers for dropout.

    Otherwise they would not compute the same between these layers.

    Args:
        ranks: All ranks.
        size: How many neighbouring ranks have the same.
    """
    if size > 1:
        # Pickling alone cannot read NumPy's state again, a tensor of unsigned numbers.
        packed = io.BytesIO()
        torch.save(capture(ranks.device), packed)
        first = ranks.gather(packed.getvalue())[ranks.rank - ranks.rank % size]
        restore(torch.load(io.BytesIO(first), weights_only=True), ranks.device)
