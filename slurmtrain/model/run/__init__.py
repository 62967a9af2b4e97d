"""What is known of a run: its files, events, attempts, checkpoints and state."""
