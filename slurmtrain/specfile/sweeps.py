"""The sweep of a file and the sweep of the command line, as one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from slurmtrain.model.spec.kinds import suggestion
from slurmtrain.model.spec.sweep import WORDS, Sweep, read_sweep
from slurmtrain.specfile.mistakes import Mistakes
from slurmtrain.specfile.overrides import Override, check_path


def merge_sweeps(
    in_file: object, data: Mapping[str, Any], swept: Sequence[Override], mistakes: Mistakes, *, max_runs: int
) -> Sweep:
    """The sweep of the file merged with the sweep of the command line, which wins key by key.

    Args:
        in_file: The section ``sweep`` of the file; None: there is none.
        data: The rest of the file.
        swept: What the command line varies.
        mistakes: Receives what is wrong.
        max_runs: How many runs a sweep may have.
    """
    if in_file is None and not swept:
        return Sweep()
    new = {".".join(override.path): override.value for override in swept}

    def check_key(key: str) -> None:
        # Keys of the command line have been checked, and may be parameters that the file does not have.
        if key not in new:
            _check_key(key, data)

    merged = {**in_file, **new} if isinstance(in_file, Mapping) else in_file if in_file is not None else new
    return read_sweep(merged, lambda at, message: mistakes.add(("sweep", *at), message), check_key, max_runs=max_runs)


def _check_key(key: str, data: Mapping[str, Any]) -> None:
    near = suggestion(key, WORDS)
    try:
        check_path(tuple(key.split(".")), data)
    except ValueError as error:
        raise ValueError(f"there is no key {key!r}{near}" if near else str(error)) from None
