"""Histories of metrics in columns: a cache of the metrics files of runs, which can be deleted at any time."""
