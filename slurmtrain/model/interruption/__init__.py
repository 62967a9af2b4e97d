"""What follows an interruption: why a job was stopped, whether it starts again, how often to save."""
