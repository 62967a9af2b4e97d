"""Choose where node 0 will listen, on the first node of a job before its tasks start, and export it to all of them.

``python -m slurmtrain.runtime.preflight.announce`` prints lines for a shell to evaluate. This way the nodes find each
other without name resolution and without waiting for a shared filesystem. Tasks that do not receive these variables
read the same values from a file that node 0 writes (:mod:`slurmtrain.runtime.preflight.entry`).
"""

from __future__ import annotations

import secrets
import shlex
import sys

from slurmtrain.runtime.environment.node import BOOTSTRAP, CoordinatorEndpoints, this_slurm_job
from slurmtrain.runtime.preflight import ports
from slurmtrain.runtime.preflight.facts.interfaces import find_candidates
from slurmtrain.runtime.preflight.ports import listen_on_first, source_towards

# By IP version, addresses reserved for documentation (RFC 5737, RFC 3849): they are never local, so the route to them
# is the default route.
_OUTSIDE_ADDRESSES = {4: "192.0.2.1", 6: "2001:db8::1"}


def announce_node_0() -> None:
    """Print the variables as ``export`` lines; if there is no network, print only why, on standard error."""
    candidates = [candidate.address for candidate in find_candidates(0)[0]]
    routes = [source_towards(_OUTSIDE_ADDRESSES[version]) for version in (4, 6)]
    # The default route's come first: all nodes can most likely reach these.
    addresses = list(dict.fromkeys([*(source for source in routes if source in candidates), *candidates]))
    if not addresses:
        sys.exit("this node has no network address that others could reach; they will look for a file")
    job_id, restart = this_slurm_job()
    # A port that is free now. If it is in use when node 0's agent starts, the agent chooses another one.
    with listen_on_first(ports.job_ports(job_id, restart, salt=BOOTSTRAP)) as listener:
        port = int(listener.getsockname()[1])
    endpoints = CoordinatorEndpoints(tuple(addresses), port, secrets.token_bytes(32))
    for name, value in endpoints.variables().items():
        print(f"export {name}={shlex.quote(value)}")


if __name__ == "__main__":
    announce_node_0()
