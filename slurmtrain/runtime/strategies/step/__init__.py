"""What a step consists of under every strategy: forward passes, gradients of microbatches, scaling, clipping."""
