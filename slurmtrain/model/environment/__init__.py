"""What runs execute in: packages, versions, machines and variables, and how these differ."""
