"""Directories that people rename or delete while they are in use."""
