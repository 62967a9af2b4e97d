"""What a node measures of itself while it trains: how busy its processors and GPUs are, and their memory."""
