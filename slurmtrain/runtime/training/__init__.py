"""What runs inside a training script."""
