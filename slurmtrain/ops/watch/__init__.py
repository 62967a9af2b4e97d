"""``watch``: repeats ``sync`` in one process for all runs of a runs root."""
