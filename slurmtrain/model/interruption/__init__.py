"""Decisions about interruptions: why a job was stopped, whether it starts again, how often to save."""
