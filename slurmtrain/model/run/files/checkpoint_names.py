"""The names of checkpoints' directories: published, being built or deleted, and moved aside as damaged."""

from __future__ import annotations

import re

# Numbers are bounded: anybody can name a file, and what is read here goes into a database.
_STEP = re.compile(r"step-([0-9]{1,15})")
_STAGED = re.compile(r"\..+\.[0-9]{1,9}-step-([0-9]{1,15})")
_DAMAGED = re.compile(r"damaged-step-([0-9]{1,15})(?:\.[0-9]{1,9})?")


def checkpoint_name(step: int) -> str:
    """The directory name of a published checkpoint."""
    return f"step-{step}"


def checkpoint_step(name: str) -> int | None:
    """The step of a published checkpoint from its directory name; None for anything else, even temporary ones."""
    match = _STEP.fullmatch(name)
    return int(match[1]) if match else None


def staging_name(attempt: str, step: int) -> str:
    """The directory name under which an attempt builds a checkpoint before publishing it; ``attempt``: its owner."""
    return f".{attempt}-step-{step}"


def staged_step(name: str) -> int | None:
    """The step of a checkpoint that an attempt was building; None for anything else."""
    match = _STAGED.fullmatch(name)
    return int(match[1]) if match else None


def trash_name(name: str) -> str:
    """The directory name of a checkpoint while it is being deleted."""
    return f".trash-{name}"


def is_trash(name: str) -> bool:
    """Whether this is the name of a checkpoint that is being deleted."""
    return name.startswith(".trash-")


def damaged_name(step: int, number: int) -> str:
    """The name of a checkpoint moved aside because it could not be restored; ``number`` counts them for this step."""
    return f"damaged-{checkpoint_name(step)}" + (f".{number}" if number else "")


def damaged_step(name: str) -> int | None:
    """The step of a checkpoint that was moved aside as damaged; None for anything else."""
    match = _DAMAGED.fullmatch(name)
    return int(match[1]) if match else None
