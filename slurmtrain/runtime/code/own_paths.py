"""Which paths in a run's own copy of its code are its own: links in it lead to files of the user's."""

from __future__ import annotations

import os
from pathlib import Path


def is_own_directory(tree: Path, path: str) -> bool:
    """Whether a path is a directory of a copy, and does not lead out of it.

    Args:
        tree: The copy.
        path: Relative to it; empty for the copy itself.
    """
    place = os.path.normpath(f"{os.path.realpath(tree)}/{path}")
    return os.path.realpath(place) == place and os.path.isdir(place)  # noqa: PTH112 (fast)
