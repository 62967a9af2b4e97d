"""What a node measures of itself before training."""
