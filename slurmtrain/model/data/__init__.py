"""How the samples of a dataset are divided over steps, and over the ranks of each."""
