"""What a user asks for: the spec, its values, sweeps, and the resolved plan."""
