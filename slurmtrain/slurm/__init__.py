"""The Slurm executor: what is asked of the scheduler."""
