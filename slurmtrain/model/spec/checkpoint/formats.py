"""The values of ``checkpoint.format`` and ``checkpoint.step``."""

from __future__ import annotations

import re

AUTO = "auto"
"""The format is recognized from the content."""
OWN = "own"
"""The script finds its checkpoints itself, and is handed none."""
FORMATS = (AUTO, "torch", "safetensors", "dcp", "hf", "lightning", "accelerate", "deepspeed", OWN)


def check_step_pattern(pattern: str) -> None:
    """Check that ``pattern`` is a regular expression with one group. Raises ValueError."""
    try:
        groups = re.compile(pattern).groups
    except re.error as error:
        raise ValueError(f"{pattern!r} is no regular expression: {error}") from error
    if groups != 1:
        raise ValueError(
            rf"{pattern!r} has {groups} groups; it must have one, for the digits of the step, as in 'step=(\d+)'"
        )


def step_by_pattern(pattern: str, path: str) -> int | None:
    """The step in a checkpoint's ``path`` according to ``checkpoint.step``; None if it does not match."""
    match = re.search(pattern, path)
    return int(match[1]) if match is not None and match[1] is not None and match[1].isdecimal() else None
