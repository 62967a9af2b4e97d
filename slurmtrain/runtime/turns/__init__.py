"""When a run may begin: local runs take turns; as many runs of a sweep run at once as it says."""
