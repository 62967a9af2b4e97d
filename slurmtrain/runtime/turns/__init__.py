"""When a run may begin: local runs take turns, those of a sweep as many at once as it says."""
