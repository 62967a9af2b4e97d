"""The data loader of a training script: ``run.loader``."""
