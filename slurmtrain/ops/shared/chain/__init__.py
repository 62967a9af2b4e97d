"""Runs that start after others: their jobs, and what ends them."""
