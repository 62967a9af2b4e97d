"""What a node measures about itself before training."""
