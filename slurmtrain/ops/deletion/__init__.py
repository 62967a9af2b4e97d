"""Deleting runs: what goes, what stays, and how a tree is removed."""
