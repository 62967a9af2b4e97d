"""A registry that fails or is damaged: what is wrong with it, what replaces it meanwhile, and how it is repaired."""
