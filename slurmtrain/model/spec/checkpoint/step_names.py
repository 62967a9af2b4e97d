"""The step in the name of a checkpoint."""

from __future__ import annotations

import re

# Words that say that the number after them is a step, the most specific first: `global_step100`, `step=30`,
# `iter_0000100`, `checkpoint-500`. Such a word is not part of a longer one, nor the number part of a decimal.
_MARKED = [
    re.compile(rf"(?<![a-z])(?:{words})[=_\-:]?(\d+)(?!\d|\.\d)", re.IGNORECASE)
    for words in ("global[_-]?steps?", "steps?|it|iters?|iterations?", "ckpt|chkpt|checkpoint")
]
# Numbers that count or measure something else.
_OTHER = re.compile(
    r"[a-z_]+=-?[\d.]+(?:e[+-]?\d+)?|(?<![a-z])(?:epochs?|ep|seed|v|version|rank|part)[=_\-]?\d+", re.IGNORECASE
)
_DECIMAL = re.compile(r"\d+\.\d+(?:e[+-]?\d+)?|\d+e[+-]?\d+", re.IGNORECASE)
# Not attached to letters, as in `resnet50` or `fp16`.
_ALONE = re.compile(r"(?<![a-z\d])\d+(?![a-z\d])", re.IGNORECASE)
_NUMBER = re.compile(r"\d+")
_ENDING = re.compile(r"\.[a-z]\w*$", re.IGNORECASE)


def step_in_name(name: str) -> int | None:
    """The step that the ``name`` of a file or directory holds; None if it holds none.

    A number after a word for steps counts most, then one after a word for checkpoints, then the last whole number that
    stands alone. Numbers of epochs and metrics are no steps.
    """
    stem = _ENDING.sub("", name)
    marked = next(filter(None, (pattern.findall(stem) for pattern in _MARKED)), None)
    numbers = marked or _ALONE.findall(_DECIMAL.sub("", _OTHER.sub("", stem)))
    return int(numbers[-1]) if numbers else None


def last_number(name: str) -> int | None:
    """The last whole number of a name, whatever it counts: the names that one script chooses sort by it."""
    numbers = _NUMBER.findall(_DECIMAL.sub("", _ENDING.sub("", name)))
    return int(numbers[-1]) if numbers else None
