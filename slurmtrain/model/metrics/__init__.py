"""Metrics: their history over attempts, how it is drawn, and what the output of a script says about them."""
