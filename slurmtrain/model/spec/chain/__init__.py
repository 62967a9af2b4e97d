"""Runs that start after others: what a spec says about them."""
