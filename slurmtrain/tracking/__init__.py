"""Trackers: what shows the metrics of runs, each behind the same three calls."""
