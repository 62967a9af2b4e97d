"""The connections of processes."""

from __future__ import annotations

import contextlib
import os
import socket
import sys

from slurmtrain.system.process import established, has_loaded, sockets_of, variable_of, was_connected


def test_both_ends_of_a_connection_are_seen_as_each_others() -> None:
    for family, address in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")):
        with socket.socket(family) as listener:
            listener.bind((address, 0))
            listener.listen()
            with socket.create_connection(listener.getsockname()[:2]) as client:
                served, _ = listener.accept()
                with served:
                    connections, own = established(os.getpid()), sockets_of(os.getpid())
                    ends = [connections[os.fstat(each.fileno()).st_ino] for each in (client, served)]
                    assert {os.fstat(each.fileno()).st_ino for each in (client, served, listener)} <= own
                    assert ends[0] == ends[1][::-1]
                    assert os.fstat(listener.fileno()).st_ino not in connections


def test_a_socket_of_both_families_is_compared_as_one_of_ipv4() -> None:
    with (
        socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True) as listener,
        socket.create_connection(("127.0.0.1", listener.getsockname()[1])) as client,
        listener.accept()[0] as served,
    ):
        connections = established(os.getpid())
        ends = [connections[os.fstat(each.fileno()).st_ino] for each in (client, served)]
        assert ends[0] == ends[1][::-1]


def test_a_connection_is_remembered_for_a_while_and_a_listener_is_none() -> None:
    with contextlib.ExitStack() as listeners:
        # One of several: a connection of another test to the same port may be remembered still.
        several = [listeners.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(9)]
        listener = next(each for each in several if not was_connected(each.getsockname()[1]))
        port = listener.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client, listener.accept()[0] as served:
            assert was_connected(port)
            client.close()
            served.close()
    assert was_connected(port)


def test_what_cannot_be_seen_is_nothing() -> None:
    gone = 2**22 + 1
    assert (established(gone), sockets_of(gone), has_loaded(gone, ["lib"]), variable_of(gone, "A")) == (
        {}, set(), False, None,
    )  # fmt: skip
    assert has_loaded(os.getpid(), ["/libc.so", os.path.basename(sys.executable)])  # noqa: PTH119
    assert variable_of(os.getpid(), "PATH")
