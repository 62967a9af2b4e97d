"""Where node 0 will be: noted on the first node of a job before its tasks start, and exported to all of them.

``python -m slurmtrain.runtime.preflight.announce`` prints lines for a shell to evaluate. So the nodes find each other
without name resolution, and without waiting for a shared filesystem. Where a task does not get these variables, the
same stands in a file that node 0 writes.
"""

from __future__ import annotations

import secrets
import shlex
import sys
from collections.abc import Iterator

from slurmtrain.runtime.job.environment import BOOTSTRAP, CoordinatorEndpoints, this_slurm_job
from slurmtrain.runtime.preflight import ports
from slurmtrain.runtime.preflight.facts.interfaces import find_candidates
from slurmtrain.runtime.preflight.sockets import listen_on_first, source_towards

# Reserved for documentation, so never on the local network: its route is the default route.
_ELSEWHERE = {4: "192.0.2.1", 6: "2001:db8::1"}


def main() -> None:
    """Print the variables as ``export`` lines; nothing, and why on standard error, where there is no network."""
    addresses = list(_addresses())
    if not addresses:
        sys.exit("this node has no network address that others could reach; they will look for a file")
    job_id, restart = this_slurm_job()
    port = _free_port(job_id, restart)
    invitation = CoordinatorEndpoints(tuple(addresses), port, secrets.token_bytes(32))
    for name, value in invitation.variables().items():
        print(f"export {name}={shlex.quote(value)}")


def _addresses() -> Iterator[str]:
    """All addresses of this node, that of the default route first."""
    found = [one.address for one in find_candidates(0)[0]]
    first = [source for family in (4, 6) if (source := source_towards(_ELSEWHERE[family])) in found]
    yield from dict.fromkeys([*first, *found])


def _free_port(job_id: str, restart: int) -> int:
    """A port that nobody listens on now. Should it be taken before node 0's agent starts, that chooses another one."""
    with listen_on_first(ports.job_ports(job_id, restart, salt=BOOTSTRAP)) as listener:
        return int(listener.getsockname()[1])


if __name__ == "__main__":
    main()
