"""Where the server that shows a store listens."""

from __future__ import annotations

from contextlib import closing

from slurmtrain.tracking import server


def test_a_port_that_browsers_refuse_is_passed_over() -> None:
    with closing(server._listen("127.0.0.1", 6665)) as listener:
        assert listener.getsockname()[1] > 6669
