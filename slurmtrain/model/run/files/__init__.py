"""What the names of a run's files say."""
