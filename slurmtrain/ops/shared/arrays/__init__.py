"""Job arrays: several runs that request the same are one submission to Slurm."""
