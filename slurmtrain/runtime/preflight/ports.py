"""The ports of training's rendezvous: such as neither outgoing connections nor other runs on the node can take.

The batch script runs this module before a job's tasks start: ``python -m slurmtrain.runtime.preflight.ports`` prints
lines for a shell to evaluate, which export where node 0 will listen. This way the nodes find each other without name
resolution and without waiting for a shared filesystem. Tasks that do not receive these variables read the same values
from a file that node 0 writes (:mod:`slurmtrain.runtime.preflight.entry`).
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import os
import secrets
import shlex
import socket
import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path

from slurmtrain.errors import LaunchError

_PROC = Path("/proc/sys/net/ipv4")
# ip(7), ip_local_port_range: the default of Linux.
_EPHEMERAL = range(32768, 61000)
_PREFERRED = 10000
_LOWEST = 1024
_END = 65536
# If fewer than this are left from _PREFERRED on, lower ports are used as well.
_ENOUGH = 1000
_TRIES = 50
RANKS = "ranks"
"""The salt of the ports that are left to rank 0, or to the launchers of runs (:func:`reserve_port`)."""
# Ports of other services on a cluster's nodes, which may start a moment later.
_KNOWN_SERVICES = {
    range(5000, 5001): "MLflow",
    range(6379, 6380): "redis, and with it ray",
    range(6817, 6820): "slurmctld, slurmd, slurmdbd",
    range(8265, 8266): "ray's dashboard",
    range(10001, 10002): "ray's clients",
    range(18515, 18516): "tests of InfiniBand (perftest)",
    range(20049, 20050): "NFS over RDMA",
    range(29400, 29401): "torchrun's rendezvous, by default",
    range(29500, 29501): "torch's MASTER_PORT, by default",
}


def usable_ports(range_text: str, reserved_text: str) -> list[range]:
    """The ports that may be used, ascending; empty if the ephemeral range covers them all.

    The texts are from ``ip_local_port_range`` and ``ip_local_reserved_ports`` (ip(7)); if the first cannot be read,
    Linux's default applies, and if the second cannot, nothing is reserved.
    """
    avoided = [*_KNOWN_SERVICES]
    match range_text.split():
        case [first, last] if all(word.isascii() and word.isdigit() for word in (first, last)):
            avoided.append(range(int(first), int(last) + 1))
        case _:
            avoided.append(_EPHEMERAL)
    for part in reserved_text.split(","):
        first, _, last = part.strip().partition("-")
        if first.isascii() and first.isdigit() and (not last or (last.isascii() and last.isdigit())):
            avoided.append(range(int(first), int(last or first) + 1))
    preferred = _without(range(_PREFERRED, _END), avoided)
    return preferred if sum(map(len, preferred)) >= _ENOUGH else _without(range(_LOWEST, _END), avoided)


def job_ports(job_id: str, restart: int, salt: str = "", ranges: Sequence[range] | None = None) -> Iterator[int]:
    """Every port that a start of a job may use, in the order of the tries; the same on each call.

    Args:
        job_id: The job's id, with the array task.
        restart: How often the job was restarted. The next restart begins elsewhere, at a port that this one tries late
            or never: processes that it left behind may still listen.
        salt: Selects different ports, for another purpose.
        ranges: The usable ports; by default this machine's.
    """
    if ranges is None:
        ephemeral, reserved = _read_setting("ip_local_port_range"), _read_setting("ip_local_reserved_ports")
        # If all ports are ephemeral, these are used: the kernel never assigns a bound port.
        ranges = usable_ports(ephemeral, reserved) or usable_ports("0 0", reserved)
    ports = [port for span in ranges for port in span]
    # Purposes never compete for a port.
    candidates = (ports[3::4] if salt == RANKS else ports[1::4] if salt else ports[::2]) or ports
    if not candidates:
        return
    digest = hashlib.sha256(f"{salt}\0{job_id}".encode()).digest()
    begin = int.from_bytes(digest[:8], "big") + restart * (_TRIES if len(candidates) > _TRIES else 1)
    for number in range(len(candidates)):
        yield candidates[(begin + number) % len(candidates)]


def listen_on_job_port(address: str, job_id: str, restart: int) -> socket.socket:
    """A socket that listens at the first of the job's ports that is free.

    It is handed on open: no other process can bind the port until it is closed.

    Args:
        address: A numeric address of this machine.
        job_id: The job's id, with the array task.
        restart: How often the job was restarted.

    Raises:
        LaunchError: The address is not this machine's, or none of the first 50 ports is free.
    """
    attempted, reason = [], "every port is in the ephemeral range or reserved"
    for port in islice(job_ports(job_id, restart), _TRIES):
        try:
            # Sets SO_REUSEADDR: an old connection in TIME_WAIT is harmless, a live listener still refuses.
            return listen(address, port)
        except OSError as error:
            attempted.append(port)
            reason = _describe_os_error(error)
            if error.errno == errno.EADDRNOTAVAIL:
                raise LaunchError(f"cannot listen on {address}: {socket.gethostname()} has no such address") from error
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise LaunchError(f"cannot listen on {address}: {reason}") from error
    problem = (
        f"none of the {len(attempted)} ports from {attempted[0]} on is free" if attempted else "there is no port to try"
    )
    raise LaunchError(f"cannot listen on {address}: {problem} ({reason})")


def reserve_port(job_id: str, restart: int) -> socket.socket:
    """A socket that keeps a port free for a process started later, which must be able to listen there itself.

    The port stays reserved until the socket is closed. It is bound but does not listen, with SO_REUSEADDR: another
    socket with that option, as all of torch's and Python's servers have, can still be bound to the port and listen. It
    was bound without the option, which fails if any other socket is bound to the port: so two runs never reserve the
    same one.

    Args:
        job_id: The job's id, with the array task.
        restart: How often the job was restarted.

    Raises:
        LaunchError: None of the first 50 ports is free.
    """
    reason = "every port is in the ephemeral range or reserved"
    for port in islice(job_ports(job_id, restart, RANKS), _TRIES):
        try:
            return reserve(port)
        except OSError as error:
            reason = _describe_os_error(error)
    raise LaunchError(f"no port is free for the ranks of the run on {socket.gethostname()}: {reason}")


def _read_setting(name: str) -> str:
    try:
        return (_PROC / name).read_text()
    except (OSError, UnicodeDecodeError):
        return ""


def _without(whole: range, removed: Iterable[range]) -> list[range]:
    """What is left of a range, in ascending pieces."""
    remaining, begin = [], whole.start
    for span in sorted(removed, key=lambda span: span.start):
        if span.start > begin:
            remaining.append(range(begin, min(span.start, whole.stop)))
        begin = max(begin, span.stop)
    remaining.append(range(begin, whole.stop))
    return [piece for piece in remaining if piece]


def _describe_os_error(error: OSError) -> str:
    """The system's message, without the address that create_server adds: the caller names it itself."""
    code = error.errno or 0
    return os.strerror(code) if code in errno.errorcode else str(error.strerror or error)


# --- listening sockets, and the source address that the kernel would choose -------------------------------------------
# Connections that wait to be accepted: all nodes may connect at once. asyncio's servers call listen() again, with a
# backlog of 100 unless they are given this one too.
BACKLOG = 1024
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


# --- where node 0 will listen, chosen on the first node of a job before its tasks start -------------------------------
# By IP version, addresses reserved for documentation (RFC 5737, RFC 3849): they are never local, so the route to them
# is the default route.
_OUTSIDE_ADDRESSES = {4: "192.0.2.1", 6: "2001:db8::1"}


def announce_node_0() -> None:
    """Print the variables as ``export`` lines; if there is no network, print only why, on standard error."""
    # Late: they need psutil, and agents of a single node do without it.
    from slurmtrain.runtime.environment.node import BOOTSTRAP, CoordinatorEndpoints, this_slurm_job
    from slurmtrain.runtime.preflight.facts.interfaces import find_candidates

    candidates = [candidate.address for candidate in find_candidates(0)[0]]
    routes = [source_towards(_OUTSIDE_ADDRESSES[version]) for version in (4, 6)]
    # The default route's come first: all nodes can most likely reach these.
    addresses = list(dict.fromkeys([*(source for source in routes if source in candidates), *candidates]))
    if not addresses:
        sys.exit("this node has no network address that others could reach; they will look for a file")
    job_id, restart = this_slurm_job()
    # A port that is free now. If it is in use when node 0's agent starts, the agent chooses another one.
    with listen_on_first(job_ports(job_id, restart, salt=BOOTSTRAP)) as listener:
        port = int(listener.getsockname()[1])
    endpoints = CoordinatorEndpoints(tuple(addresses), port, secrets.token_bytes(32))
    for name, value in endpoints.variables().items():
        print(f"export {name}={shlex.quote(value)}")


if __name__ == "__main__":
    announce_node_0()
