"""Checkpoints inside a job: taking, writing, publishing, verifying and restoring them."""
