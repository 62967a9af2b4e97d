"""A listening socket that serves this account alone: the others on a machine can connect to its loopback interface too.

Who has opened a connection from this machine, the kernel knows (proc_pid_net(5), ``tcp``). A tunnel of ssh connects as
the user who is logged in.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import sys
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

_TABLES = ("/proc/self/net/tcp", "/proc/self/net/tcp6")
_ESTABLISHED = "01"
# What a socket has that no process has any more: the kernel may give such a one to root.
_NO_INODE = "0"
_CHUNK = 1 << 16
_LAST_WORDS_S = 1.0
_REFUSAL = b"HTTP/1.1 403 Forbidden\r\nConnection: close\r\n\r\nthis page is for another account of this machine\n"
Endpoint = tuple[str, int]


@contextlib.contextmanager
def gate(listener: socket.socket, target: Path, *, only_own: bool) -> Iterator[None]:
    """Pass connections on to the socket at ``target``, as long as this context lasts.

    Args:
        listener: The socket where they arrive; it is closed at the end.
        target: A socket in a directory that only this account can enter; it need not exist yet.
        only_own: Refuse connections that this account has not opened on this machine.
    """
    with listener:
        threading.Thread(target=_accept_all, args=(listener, target, only_own), daemon=True).start()
        try:
            yield
        finally:
            # This ends the accept() of the thread, which closing alone does not.
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)


def _accept_all(listener: socket.socket, target: Path, only_own: bool) -> None:
    with contextlib.suppress(OSError):
        while True:
            connection, _ = listener.accept()
            threading.Thread(target=_serve, args=(connection, target, only_own), daemon=True).start()


def _serve(connection: socket.socket, target: Path, only_own: bool) -> None:
    with contextlib.suppress(OSError), connection, socket.socket(socket.AF_UNIX) as server:
        if only_own and not is_own(connection.getpeername()[:2], connection.getsockname()[:2], _lines()):
            connection.sendall(_REFUSAL)
            connection.shutdown(socket.SHUT_WR)
            # What is closed before it was read is reset, and the refusal may be lost.
            connection.settimeout(_LAST_WORDS_S)
            connection.recv(_CHUNK)
            return
        server.connect(str(target))
        answers = threading.Thread(target=_copy, args=(server, connection), daemon=True)
        answers.start()
        _copy(connection, server)
        answers.join()


def _copy(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while chunk := source.recv(_CHUNK):
            target.sendall(chunk)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_WR)


def is_own(peer: Endpoint, own: Endpoint, lines: Iterable[str]) -> bool:
    """Whether a process of this account has the other end of a connection.

    Args:
        peer: The other end, an address and a port.
        own: This end.
        lines: Lines of the kernel's tables of connections.
    """
    for line in lines:
        # sl local_address rem_address st tx_queue:rx_queue tr:tm->when retrnsmt uid timeout inode ...
        fields = line.split()
        if len(fields) < 10 or not (_has_port(fields[1], peer) and _has_port(fields[2], own)):
            continue
        if (_address(fields[1]), _address(fields[2])) == (_plain(peer[0]), _plain(own[0])):
            return fields[3] == _ESTABLISHED and int(fields[7]) == os.geteuid() and fields[9] != _NO_INODE
    return False


def _lines() -> Iterator[str]:
    for table in _TABLES:
        # There is no such file where IPv6 is switched off.
        with contextlib.suppress(OSError):
            yield from Path(table).read_text(encoding="utf-8").splitlines()[1:]


def _has_port(field: str, endpoint: Endpoint) -> bool:
    return field.endswith(f":{endpoint[1]:04X}")


def _address(field: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """The address in a field such as ``0100007F:1388``: words of four bytes, in the order of this machine."""
    words = bytes.fromhex(field.partition(":")[0])
    if sys.byteorder == "little":
        words = b"".join(words[at : at + 4][::-1] for at in range(0, len(words), 4))
    return _plain(words)


def _plain(address: str | bytes) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """An address; of IPv4 if it is one of IPv4 on a socket for IPv6."""
    parsed = ipaddress.ip_address(address)
    return getattr(parsed, "ipv4_mapped", None) or parsed
