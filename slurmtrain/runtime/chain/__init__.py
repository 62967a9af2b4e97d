"""Runs that start after others: whether it is their turn, and what they get from those others."""
