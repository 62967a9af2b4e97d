"""Submitting: run directories first, whole or not at all, then the jobs."""

from slurmtrain.ops.submit.submission import Submission, load, submit, submit_spec, which_python

__all__ = ["Submission", "load", "submit", "submit_spec", "which_python"]
