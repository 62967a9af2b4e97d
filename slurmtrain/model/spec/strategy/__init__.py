"""How a spec distributes its model over the processes of a run."""
