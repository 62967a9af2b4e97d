"""The port that training meets at: one that neither outgoing connections nor other runs on the node are likely to have.

Imported alone before anything else of a job is there: the standard library only.
"""

from __future__ import annotations

import errno
import hashlib
import os
import socket
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path

from slurmtrain.errors import LaunchError
from slurmtrain.runtime.preflight import sockets

_PROC = Path("/proc/sys/net/ipv4")
# ip(7), ip_local_port_range: what Linux has where nobody changed it.
_EPHEMERAL = range(32768, 61000)
_PREFERRED = 10000
_LOWEST = 1024
_END = 65536
# Where fewer than this are left from _PREFERRED on, those below it are taken as well.
_ENOUGH = 1000
_TRIES = 50
# What others listen at on a cluster's nodes, now or a moment later.
_OTHERS = {
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
    """The ports that may be used, ascending; empty where the ephemeral range takes them all.

    The texts are those of ``ip_local_port_range`` and ``ip_local_reserved_ports`` (ip(7)); what cannot be read of the
    first is Linux' default, and of the second nothing.
    """
    taken = [_ephemeral(range_text), *_reserved(reserved_text), *_OTHERS]
    preferred = _without(range(_PREFERRED, _END), taken)
    return preferred if sum(map(len, preferred)) >= _ENOUGH else _without(range(_LOWEST, _END), taken)


def job_ports(job_id: str, restart: int, salt: str = "", ranges: Sequence[range] | None = None) -> Iterator[int]:
    """Every port that a start of a job may use, the one to try first first; the same on each call.

    ``job_id`` includes the array task. The next restart begins elsewhere, at a port that this one tries late or never.
    With a salt these are other ports than without one. ``ranges`` are by default those of this machine.
    """
    ports = [port for each in (_of_this_machine() if ranges is None else ranges) for port in each]
    mine = (ports[1::2] if salt else ports[::2]) or ports
    if not mine:
        return
    digest = hashlib.sha256(f"{salt}\0{job_id}".encode()).digest()
    begin = int.from_bytes(digest[:8], "big") + restart * (_TRIES if len(mine) > _TRIES else 1)
    for number in range(len(mine)):
        yield mine[(begin + number) % len(mine)]


def listen_on_job_port(address: str, job_id: str, restart: int) -> socket.socket:
    """A socket that listens on this numeric address, at the first of the job's ports that is free.

    It is bound for good: nobody can take the port until it is closed. Raises LaunchError where the address is not this
    machine's, or none of the first 50 ports is free.
    """
    tried, reason = [], "no port is outside the ephemeral range and the reserved ones"
    for port in islice(job_ports(job_id, restart), _TRIES):
        try:
            # Sets SO_REUSEADDR: an old connection in TIME_WAIT is harmless, a live listener still refuses.
            return sockets.listen(address, port)
        except OSError as error:
            tried.append(port)
            reason = _reason(error)
            if error.errno == errno.EADDRNOTAVAIL:
                raise LaunchError(f"cannot listen on {address}: {socket.gethostname()} has no such address") from error
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise LaunchError(f"cannot listen on {address}: {reason}") from error
    which = f"none of {len(tried)} ports from {tried[0]} on is free" if tried else "there is no port to try"
    raise LaunchError(f"cannot listen on {address}: {which} ({reason})")


def _of_this_machine() -> list[range]:
    """The pool of this machine. Where the ephemeral range is everything, ports of it: a bound one stays bound."""
    ephemeral, reserved = _read("ip_local_port_range"), _read("ip_local_reserved_ports")
    return usable_ports(ephemeral, reserved) or usable_ports("0 0", reserved)


def _read(name: str) -> str:
    try:
        return (_PROC / name).read_text()
    except (OSError, UnicodeDecodeError):
        return ""


def _ephemeral(text: str) -> range:
    words = text.split()
    if len(words) != 2 or not all(word.isascii() and word.isdigit() for word in words):
        return _EPHEMERAL
    return range(int(words[0]), int(words[1]) + 1)


def _reserved(text: str) -> Iterator[range]:
    for part in text.split(","):
        first, _, last = part.strip().partition("-")
        if first.isascii() and first.isdigit() and (not last or (last.isascii() and last.isdigit())):
            yield range(int(first), int(last or first) + 1)


def _without(whole: range, taken: Iterable[range]) -> list[range]:
    """What is left of a range, in ascending pieces."""
    left, begin = [], whole.start
    for each in sorted(taken, key=lambda piece: piece.start):
        if each.start > begin:
            left.append(range(begin, min(each.start, whole.stop)))
        begin = max(begin, each.stop)
    left.append(range(begin, whole.stop))
    return [piece for piece in left if piece]


def _reason(error: OSError) -> str:
    """Without what Python adds to it, the address for one."""
    code = error.errno or 0
    return os.strerror(code) if code in errno.errorcode else str(error.strerror or error)
