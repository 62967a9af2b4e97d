"""Runs that start after others: what is known of those others."""
