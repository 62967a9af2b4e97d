"""What scripts print and write: reading metrics from it, and noting how long their logs were at what time."""
