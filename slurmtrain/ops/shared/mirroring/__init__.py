"""Sending runs to trackers. Knows no tracker but by its name and settings."""
