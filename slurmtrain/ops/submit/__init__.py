"""Submitting: run directories first, whole or not at all, then the jobs."""

from slurmtrain.ops.submit.entrances import submit, submit_spec, submit_specs
from slurmtrain.ops.submit.specs import load, load_all, merge_specs, split_words, which_python
from slurmtrain.ops.submit.submission import Submission

__all__ = [
    "Submission",
    "load",
    "load_all",
    "merge_specs",
    "split_words",
    "submit",
    "submit_spec",
    "submit_specs",
    "which_python",
]
