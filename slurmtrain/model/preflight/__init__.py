"""What the checks before training say of nodes, networks and clocks."""
