"""When a run may begin: the runs of a local sweep take turns."""
