"""What connects the agents of an attempt: authenticated connections, and the messages that they exchange over them."""
