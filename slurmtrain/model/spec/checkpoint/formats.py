"""The values of ``checkpoint.format`` and ``checkpoint.step``."""

from __future__ import annotations

import re
from collections.abc import Sequence

AUTO = "auto"
"""The format is recognized from the content."""
OWN = "own"
"""The script finds its checkpoints itself, and is handed none."""
FORMATS = (AUTO, "torch", "safetensors", "dcp", "hf", "lightning", "accelerate", "deepspeed", OWN)


# A key inside a checkpoint, such as `iter_num` or `trainer.global_step`: no regular expression that finds digits.
_KEY = re.compile(r"[A-Za-z_][\w-]*(?:\.[\w-]+)*")
# The group that is the step, where there are several.
_STEP = "step"


def step_key(text: str | None) -> Sequence[str] | None:
    """The names of the key inside a checkpoint that ``checkpoint.step`` is; None if it is a regular expression."""
    return text.split(".") if text is not None and _KEY.fullmatch(text) else None


def check_step(text: str) -> None:
    """Check that ``text`` is a key, or a regular expression with a group for the step. Raises ValueError."""
    if step_key(text) is not None:
        return
    try:
        pattern = re.compile(text)
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(f"{text!r} is no regular expression: {error}") from error
    if pattern.groups != 1 and _STEP not in pattern.groupindex:
        raise ValueError(
            rf"{text!r} has {pattern.groups} groups; it must have one for the digits of the step, as in 'step=(\d+)', "
            r"or one of that name, as in '(\d+)-(?P<step>\d+)'; a key inside the checkpoint is written as 'iter_num'"
        )


def step_by_pattern(pattern: str, path: str) -> int | None:
    """The step in a checkpoint's ``path`` according to ``checkpoint.step``; None if it does not match."""
    match = re.search(pattern, path)
    if match is None:
        return None
    digits = match[_STEP if _STEP in match.re.groupindex else 1]
    return int(digits) if digits is not None and digits.isdecimal() else None
