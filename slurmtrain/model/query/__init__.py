"""Questions about runs: conditions, order, what differs among them, and which is best."""
