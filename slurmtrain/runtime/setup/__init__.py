"""What runs before, beside and after the ranks of a job: the lines of setup, and helpers."""
