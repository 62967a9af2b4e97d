"""Showing a run from its own node 0, over REST: a small process, which imports no mlflow."""
