"""What is known about a run: its files, events, attempts, checkpoints and state."""
