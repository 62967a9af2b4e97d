"""``doctor RUN``: why an attempt of a run failed."""
