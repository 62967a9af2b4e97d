"""What runs inside a job: the node agent, and the library that a training script imports."""
