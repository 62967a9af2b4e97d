"""Communication hooks of DistributedDataParallel: how it reduces gradients."""
