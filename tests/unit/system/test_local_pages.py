"""Ports of pages, and how browsers reach them."""

from __future__ import annotations

from contextlib import closing

import pytest

from slurmtrain.errors import NotAvailable
from slurmtrain.system.local_pages import has_browser, listen_on, tunnel

SSH = {"SSH_CONNECTION": "10.0.0.1 50000 10.0.0.2 22"}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [({"DISPLAY": ":0"}, True), ({"WAYLAND_DISPLAY": "w"}, True), ({"DISPLAY": ":0", **SSH}, False), ({}, False)],
)
def test_a_browser_is_opened_on_a_screen_of_this_machine_only(environ: dict[str, str], expected: bool) -> None:
    assert has_browser(environ) is expected


def test_an_ssh_session_gets_the_line_for_a_tunnel() -> None:
    assert tunnel({}, "127.0.0.1", 5001) == ""
    assert tunnel(SSH, "127.0.0.1", 5001).startswith("ssh -N -L 5001:127.0.0.1:5001 ")
    assert tunnel(SSH, "::1", 5001).startswith("ssh -N -L 5001:[::1]:5001 ")
    assert " -p " not in tunnel(SSH, "127.0.0.1", 5001)
    assert " -p 2222 " in tunnel({"SSH_CONNECTION": "a 1 b 2222"}, "127.0.0.1", 5001)


def test_a_port_that_browsers_refuse_is_passed_over_or_is_an_error() -> None:
    with closing(listen_on("127.0.0.1", 6665)) as listener:
        assert listener.getsockname()[1] > 6669
    with pytest.raises(NotAvailable, match="browsers refuse it; choose another one"):
        listen_on("127.0.0.1", 6665, or_next=False)


def test_a_port_in_use_is_passed_over_or_is_an_error() -> None:
    with closing(listen_on("127.0.0.1", 8321)) as first, closing(listen_on("127.0.0.1", 8321)) as second:
        port = first.getsockname()[1]
        assert second.getsockname()[1] > port
        with pytest.raises(NotAvailable, match=f"port {port} of 127.0.0.1 cannot be used: another process"):
            listen_on("127.0.0.1", port, or_next=False)
