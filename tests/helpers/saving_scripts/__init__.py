"""Scripts that train small models with trainers that people have."""
