"""The header of a safetensors file, which says how long the file is.

Eight bytes for the length of the header, JSON with offsets, then the data
(https://huggingface.co/docs/safetensors/index).
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slurmtrain.system.owned_files import open_readable

# The library refuses larger headers.
_LIMIT_BYTES = 100 * 2**20
_LENGTH_BYTES = 8
METADATA = "__metadata__"
"""The key of the header under which text is stored; all others are tensors."""


def safetensors_problem(path: Path) -> str | None:
    """Why a file is not whole, as a phrase; None if it is exactly as long as its header says. Raises OSError."""
    header, begin = read_header(path)
    if header is None:
        return "its header is cut off or damaged"
    with contextlib.suppress(TypeError, LookupError, AttributeError, ValueError):
        spans = sorted((int(entry["data_offsets"][0]), int(entry["data_offsets"][1])) for entry in _tensors(header))
        # Without gaps or overlaps, as the format demands.
        position = 0
        for start, end in spans:
            if start != position or end < start:
                return "its header is damaged"
            position = end
        length, size = begin + position, path.stat().st_size
        return None if size == length else f"it has {size} bytes, and its header says {length}"
    return "its header is damaged"


def _tensors(header: Mapping[str, Any]) -> list[Any]:
    return [entry for name, entry in header.items() if name != METADATA]


def read_header(path: Path) -> tuple[Mapping[str, Any] | None, int]:
    """The header, None if it cannot be read, and where the data begins. Raises OSError."""
    with open_readable(path) as file:
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        content = file.read(length) if length <= _LIMIT_BYTES else b""
    with contextlib.suppress(ValueError, RecursionError):
        header = json.loads(content)
        if isinstance(header, dict) and len(content) == length:
            return header, _LENGTH_BYTES + length
    return None, 0
