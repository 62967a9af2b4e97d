"""Runs that start after others: what is known of the others."""
