"""Runs that start after others: whether it is their turn, and the results that they get from the other runs."""
