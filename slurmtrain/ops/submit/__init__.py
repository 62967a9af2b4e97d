"""Submitting: run directories first, whole or not at all, then the jobs."""

from slurmtrain.ops.submit.specs import load_all, merge_specs, split_words
from slurmtrain.ops.submit.submission import Submission, load, submit, submit_spec, submit_specs, which_python

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
