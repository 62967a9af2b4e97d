"""Submitting: run directories first, whole or not at all, then the jobs."""

from slurmtrain.ops.submit.entrances import (
    load,
    load_all,
    merge_specs,
    split_sources,
    submit_spec,
    submit_specs,
    which_python,
)
from slurmtrain.ops.submit.submission import Submission

__all__ = [
    "Submission",
    "load",
    "load_all",
    "merge_specs",
    "split_sources",
    "submit_spec",
    "submit_specs",
    "which_python",
]
