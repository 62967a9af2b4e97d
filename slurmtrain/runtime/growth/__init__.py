"""How an attempt gets more nodes while it runs: its request for them, and their agents until they take part."""
