"""Second jobs of runs that grow."""
