"""How the agents of an attempt find node 0: by what the batch script exported, or else by a file in the run directory.

Either holds node 0's addresses, a port, and the secret of the attempt.
"""

from __future__ import annotations

import itertools
import secrets
import socket
import time
from collections.abc import Callable, Sequence

from slurmtrain.model.run.layout import AttemptDir
from slurmtrain.runtime.job.environment import BOOTSTRAP, CoordinatorEndpoints
from slurmtrain.runtime.preflight import ports
from slurmtrain.runtime.preflight.connections import Endpoint
from slurmtrain.runtime.preflight.sockets import listen, listen_on_first
from slurmtrain.system.files import read_json, write_json

# Those who have been told where node 0 is look at the file only when it cannot be found there for so long,
_PATIENCE_S = 3.0
# and not more often than this: a shared filesystem is slow.
_LOOK_EVERY_S = 0.5


def listen_for_participants(
    attempt: AttemptDir, job_id: str, restart: int, invited: CoordinatorEndpoints | None, addresses: Sequence[str]
) -> tuple[socket.socket, bytes]:
    """Node 0's part: listen where it was said, or on another port, and leave a file that says where.

    ``addresses``: this node's. Returns the listening socket, and the secret. Raises LaunchError.
    """
    secret = invited.secret if invited is not None else secrets.token_bytes(32)
    choices = ports.job_ports(job_id, restart, salt=BOOTSTRAP)
    if list(addresses) == ["127.0.0.1"]:  # all nodes are on this machine: nobody else need be let in
        listener = listen("127.0.0.1", 0)
    else:
        listener = listen_on_first(itertools.chain([invited.port] if invited is not None else [], choices))
    there = CoordinatorEndpoints(tuple(addresses), int(listener.getsockname()[1]), secret)
    write_json(attempt.rendezvous, there.to_dict())
    return listener, secret


def watch_endpoints(attempt: AttemptDir, invited: CoordinatorEndpoints | None) -> Callable[[], Sequence[Endpoint]]:
    """Where the other nodes are to look: called again and again, it may find more."""
    told = _endpoints(invited)
    look_at = time.monotonic() + (_PATIENCE_S if told else 0.0)
    written: list[Endpoint] = []

    def now() -> list[Endpoint]:
        nonlocal look_at
        if not written and time.monotonic() >= look_at:
            said = read_json(attempt.rendezvous)
            written.extend(_endpoints(CoordinatorEndpoints.from_dict(said) if said is not None else None))
            look_at = time.monotonic() + (_LOOK_EVERY_S if told else 0.0)
        return told + [door for door in written if door not in told]

    return now


def _endpoints(invitation: CoordinatorEndpoints | None) -> list[Endpoint]:
    if invitation is None:
        return []
    return [Endpoint(address, invitation.port, invitation.secret) for address in invitation.addresses]
