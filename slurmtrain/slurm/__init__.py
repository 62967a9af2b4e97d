"""The Slurm executor: requests to the scheduler and its answers."""
