"""Formats of checkpoints that trainers save: what is complete, its step, its identity and its contents."""
