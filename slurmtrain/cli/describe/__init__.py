"""Attempts, their nodes and what was found there, in words and rows of tables. Pure."""
