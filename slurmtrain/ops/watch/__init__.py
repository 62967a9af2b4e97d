"""``watch``: what ``sync`` does once, again and again, by one process for all runs of a runs root."""
