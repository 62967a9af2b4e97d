"""Formats in which trainers save checkpoints: what is complete, its step, its identity and what it holds."""
