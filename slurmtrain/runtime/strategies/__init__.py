"""How the model of a script is distributed over the processes of its run, by torch's own implementations."""
