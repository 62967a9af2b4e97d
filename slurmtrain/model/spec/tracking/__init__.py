"""What the section ``tracking`` of a spec consists of."""
