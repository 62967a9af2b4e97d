"""Keys of the section ``checkpoint`` that are more than one value."""
