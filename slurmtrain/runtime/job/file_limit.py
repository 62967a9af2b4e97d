"""How many files a process may have open: the agent as many as the system allows, its ranks as many as the user.

Node 0's agent holds a connection from every node, and serves the store to which every rank, and anybody who can reach
it, may connect: with the usual soft limit of 1,024 it could soon open no file any more.
"""

from __future__ import annotations

import resource

# Enough for all ports of a stranger's address, and not so many that a program which closes all it could have open,
# one by one, takes long.
_ENOUGH = 1 << 17
_limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def soft_limit_of_ranks() -> int:
    """The soft limit that this process was started with, and that its ranks get; RLIM_INFINITY is -1."""
    return _limit


def raise_soft_limit() -> None:
    """Raise this process's soft limit as far as the hard one allows, for the node agent."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, _ENOUGH)), hard))
