"""What the names of a run's files say, and which of its checkpoints stay."""
