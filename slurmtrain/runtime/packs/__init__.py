"""The part of an agent whose run shares its job with others."""
