"""A real Slurm cluster of several nodes on one machine; ``scripts/cluster`` is its command.

A node is a network namespace, a host name and a slurmd. The standard library only: it runs before anything is
installed.

cluster      names, places and settings of a cluster, its lock
packages     the programs that it needs, and installing them
releases     Slurm of other Debian releases, unpacked beside that of this machine
processes    starting programs, finding and ending what a cluster started
network      namespaces, bridges and interfaces
config       the text of every configuration file
daemons      starting what is not running, in order
accounting   accounts, users and QOS
slurm        asking Slurm: nodes, jobs, preemption
lifecycle    up, down, and single nodes
status       what there is
cli          what people type
"""
