"""Questions about runs: which to list, which is best, and how they differ."""
