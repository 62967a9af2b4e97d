"""How the code of two runs differs: the differing files of their snapshots, and the lines of text files."""

from __future__ import annotations

import difflib
from collections.abc import Collection

from slurmtrain.model.experiment.code import LINK, CodeFile, Difference, compare
from slurmtrain.model.run.layout import RunDir
from slurmtrain.runtime.code.code_copy import read_code, read_code_manifest

# Larger files are data or generated.
_MOST_BYTES = 1 << 20
_MOST_LINES = 10_000


def compare_snapshots(run: RunDir, earlier: str, later: str) -> Difference:
    """Which files differ.

    Args:
        run: A run in the runs root of both.
        earlier: The hash of a snapshot.
        later: The hash of another one.

    Raises:
        PathError: One of them is missing or damaged.
    """
    return compare(read_code_manifest(run, earlier), read_code_manifest(run, later))


def differing_lines(run: RunDir, earlier: str, later: str, difference: Difference) -> list[str]:
    """The differing lines of files, as ``diff -u`` prints them, at most 10,000.

    Args:
        run: A run in the runs root of both.
        earlier: The hash of a snapshot.
        later: The hash of another one.
        difference: How they differ.

    Raises:
        PathError: One of them is missing or damaged.
    """
    before = _texts(run, earlier, {*difference.changed, *difference.removed})
    after = _texts(run, later, {*difference.changed, *difference.added})
    lines: list[str] = []
    for path in sorted({*before, *after}):
        old, new = before.get(path, []), after.get(path, [])
        if old is None or new is None:
            lines.append(f"{path} differs: it is no text, or larger than 1 MiB")
        else:
            lines += difflib.unified_diff(old, new, f"a/{path}", f"b/{path}", lineterm="")
        if len(lines) > _MOST_LINES:
            return [*lines[:_MOST_LINES], f"(and more: these are the first {_MOST_LINES} lines)"]
    return lines


def _texts(run: RunDir, name: str, paths: Collection[str]) -> dict[str, list[str] | None]:
    """The lines of some files of a snapshot; None for what is no text, or too large. Raises PathError."""
    if not paths:
        return {}
    return {file.path: _lines(file, content) for file, content in read_code(run, name) if file.path in paths}


def _lines(file: CodeFile, content: bytes) -> list[str] | None:
    if file.kind == LINK:
        return [f"a link to {file.digest}"]
    if len(content) > _MOST_BYTES or b"\0" in content:
        return None
    try:
        return content.decode().splitlines()
    except UnicodeDecodeError:
        return None
