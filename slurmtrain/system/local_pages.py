"""Pages that a command serves from this machine: their port, who can reach it, and how a browser elsewhere does."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import socket
from collections.abc import Mapping

from slurmtrain.errors import NotAvailable
from slurmtrain.system.owned_files import user_name

_LAST_PORT = 65535
# Where browsers open no page, since they would talk to other services (https://fetch.spec.whatwg.org/#port-blocking).
_BLOCKED = frozenset(
    (1719, 1720, 1723, 2049, 3659, 4045, 4190, 5060, 5061, 6000, 6566, *range(6665, 6670), 6679, 6697, 10080)
)
_SSH_PORT = "22"


def is_loopback(host: str) -> bool:
    """Whether ``host`` is an address of this machine alone."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def listen_on(host: str, first: int, *, or_next: bool = True) -> socket.socket:
    """Listen on a port that is free, and that browsers open.

    Args:
        host: The address to listen on.
        first: The port.
        or_next: Take the next such port if that one is none.

    Raises:
        NotAvailable: There is no such port.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for port in range(first, (_LAST_PORT if or_next else first) + 1):
        if port in _BLOCKED:
            continue
        try:
            return socket.create_server((host, port), family=family)
        except PermissionError as error:
            raise NotAvailable(
                f"port {port} of {host} cannot be used: {error.strerror}; choose one above 1023"
            ) from error
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise NotAvailable(f"cannot listen on {host}:{port}: {error.strerror}") from error
    if or_next:
        raise NotAvailable(f"all ports of {host} from {first} on are in use")
    why = "browsers refuse it" if first in _BLOCKED else "another process listens there"
    raise NotAvailable(f"port {first} of {host} cannot be used: {why}; choose another one with --port, or leave it out")


def place_of_page(host: str, port: int) -> str:
    """An address and a port as in a URI."""
    return f"{f'[{host}]' if ':' in host else host}:{port}"


def has_browser(environ: Mapping[str, str]) -> bool:
    """Whether this session has a screen where a browser can open a page of this machine."""
    return "SSH_CONNECTION" not in environ and any(environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY"))


def tunnel(environ: Mapping[str, str], host: str, port: int) -> str:
    """The command for the user's own machine that lets its browser reach a page here; empty unless this is ssh.

    Args:
        environ: The environment, where ssh says how the user has come here.
        host: The page's address.
        port: Its port.
    """
    connection = environ.get("SSH_CONNECTION", "").split()
    if not connection:
        return ""
    # CLIENT CLIENT_PORT SERVER SERVER_PORT (ssh(1)).
    option = f" -p {connection[3]}" if connection[3:] and connection[3] != _SSH_PORT else ""
    login = f"{user_name(os.getuid())}@{socket.gethostname()}"
    return f"ssh -N -L {port}:{place_of_page(host, port)}{option} {login}"
