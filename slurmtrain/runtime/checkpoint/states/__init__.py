"""States that differ between ranks, or are not plain data: parts of models, sharded optimizers, attributes."""
