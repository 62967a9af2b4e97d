"""Choosing among very many runs by SQL, without reading them."""
