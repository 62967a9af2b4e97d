"""What becomes of the options of sbatch and srun in a spec."""
