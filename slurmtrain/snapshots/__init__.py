"""Snapshots of code: which files belong to it, and where their contents are kept."""
