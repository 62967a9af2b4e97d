"""How the agents of an attempt find node 0: by variables that the batch script exported, or by a file.

The file is in the run directory. Either source holds node 0's addresses, a port, and the secret of the attempt.
"""

from __future__ import annotations

import itertools
import secrets
import socket
import time
from collections.abc import Callable, Sequence

from slurmtrain.model.run.layout import AttemptDir
from slurmtrain.runtime.environment.node import BOOTSTRAP, CoordinatorEndpoints
from slurmtrain.runtime.preflight import ports
from slurmtrain.runtime.preflight.connections import Endpoint
from slurmtrain.runtime.preflight.ports import listen, listen_on_first
from slurmtrain.system.files import read_json, write_json

# If endpoints were exported, the file is read only after they have not worked for this long,
_EXPORTED_ONLY_S = 3.0
# and then only at this interval: a shared filesystem is slow.
_FILE_POLL_S = 0.5


def listen_for_participants(
    attempt: AttemptDir, job_id: str, restart: int, exported: CoordinatorEndpoints | None, addresses: Sequence[str]
) -> tuple[socket.socket, bytes]:
    """Listen, as node 0, on the exported port or else on another one, and write a file with the endpoints.

    Args:
        attempt: Where the file is written.
        job_id: The job's id, from which other ports are derived.
        restart: How often the job was restarted, which affects the choice too.
        exported: What the batch script exported; None if it exported nothing.
        addresses: This node's.

    Returns:
        The listening socket, and the secret.

    Raises:
        LaunchError: No port is free.
    """
    secret = exported.secret if exported is not None else secrets.token_bytes(32)
    candidates = ports.job_ports(job_id, restart, salt=BOOTSTRAP)
    if list(addresses) == ["127.0.0.1"]:  # all nodes are on this machine: no other machine connects
        listener = listen("127.0.0.1", 0)
    else:
        listener = listen_on_first(itertools.chain([exported.port] if exported is not None else [], candidates))
    # Always written: a task may not have received the variables, and the port may differ from the exported one.
    endpoints = CoordinatorEndpoints(tuple(addresses), int(listener.getsockname()[1]), secret)
    write_json(attempt.rendezvous, endpoints.to_dict(), private=True)
    return listener, secret


def watch_endpoints(attempt: AttemptDir, exported: CoordinatorEndpoints | None) -> Callable[[], Sequence[Endpoint]]:
    """A function that returns the endpoints of node 0 that are known when it is called.

    These are the ``exported`` ones and, after a while, the endpoints in the file.
    """
    from_environment = _endpoints(exported)
    next_look = time.monotonic() + (_EXPORTED_ONLY_S if from_environment else 0.0)
    from_file: list[Endpoint] = []

    def known_endpoints() -> list[Endpoint]:
        nonlocal next_look
        if not from_file and time.monotonic() >= next_look:
            content = read_json(attempt.rendezvous)
            from_file.extend(_endpoints(CoordinatorEndpoints.from_dict(content) if content is not None else None))
            # Without exported endpoints the file is the only source, so each call reads it.
            next_look = time.monotonic() + (_FILE_POLL_S if from_environment else 0.0)
        return from_environment + [endpoint for endpoint in from_file if endpoint not in from_environment]

    return known_endpoints


def _endpoints(coordinator: CoordinatorEndpoints | None) -> list[Endpoint]:
    if coordinator is None:
        return []
    return [Endpoint(address, coordinator.port, coordinator.secret) for address in coordinator.addresses]
