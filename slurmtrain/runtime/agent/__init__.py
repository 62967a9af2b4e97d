"""The node agent: starts the ranks of its node, watches them, ends them, and says why they ended."""
