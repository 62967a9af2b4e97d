"""A real Slurm cluster of several nodes on one machine; ``scripts/cluster`` is its command.

A node is a network namespace, a host name and a slurmd. The standard library only: it runs before anything is
installed. ``lifecycle`` begins and ends clusters and nodes with what the other modules make.
"""
