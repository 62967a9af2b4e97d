"""Listening sockets, and the source address that the kernel would choose; without asyncio, for the batch script."""

from __future__ import annotations

import contextlib
import itertools
import socket
from collections.abc import Iterable

from slurmtrain.errors import LaunchError

# Connections that wait to be accepted: all nodes may connect at once. asyncio's servers call listen() again, with a
# backlog of 100 unless they are given this one too.
BACKLOG = 1024
_TRIES = 50
# Any port: nothing is sent there.
_PORT_FOR_ROUTE = 9


def listen(address: str, port: int) -> socket.socket:
    """A socket that listens on one address. Raises OSError."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, port), family=family, backlog=BACKLOG)


def listen_anywhere(port: int) -> socket.socket:
    """A socket that listens on all addresses of this machine, IPv4 and IPv6 if it has both. Raises OSError."""
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):
            return socket.create_server(("::", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=BACKLOG)
    return socket.create_server(("0.0.0.0", port), backlog=BACKLOG)  # noqa: S104 (peers must know the secret)


def reserve(port: int) -> socket.socket:
    """A socket bound to a port of all addresses of this machine, at which it does not listen. Raises OSError.

    While it is open, only sockets with SO_REUSEADDR can be bound to the port (socket(7)).
    """
    dual = socket.has_dualstack_ipv6()
    reserved = socket.socket(socket.AF_INET6 if dual else socket.AF_INET, socket.SOCK_STREAM)
    try:
        if dual:
            reserved.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        reserved.bind(("::" if dual else "0.0.0.0", port))  # noqa: S104 (it does not listen)
        # Only now: with the option, it could be bound to a port that is reserved already.
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    except OSError:
        reserved.close()
        raise
    return reserved


def listen_on_first(ports: Iterable[int]) -> socket.socket:
    """Like :func:`listen_anywhere`, on the first of these ports that is free. Raises LaunchError."""
    problem: OSError | None = None
    for port in itertools.islice(ports, _TRIES):
        try:
            return listen_anywhere(port)
        except OSError as error:
            problem = error
    raise LaunchError(f"none of {_TRIES} ports is free on {socket.gethostname()}: {problem}")


def source_towards(address: str) -> str | None:
    """The address that the kernel's routes choose for packets to another address; None if there is no route.

    Nothing is sent: connecting a datagram socket only looks up the route.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((address, _PORT_FOR_ROUTE))
            return str(probe.getsockname()[0])
    except OSError:
        return None
