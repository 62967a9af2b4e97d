"""What other users of this machine can learn of a run: nothing from its files or its processes."""

from __future__ import annotations

import secrets
import signal
from collections.abc import Iterator

import pytest
from helpers.command_lines import command_lines_with
from helpers.site import Site, until

TOKEN = secrets.token_hex(8)
# It is not in the command of the rank: that would be the user's own doing.
SETUP = ["export MY_API_TOKEN=" + TOKEN]


@pytest.fixture(scope="module")
def open_site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A user whose umask keeps nothing from others."""
    site = Site(tmp_path_factory.mktemp("open"))
    site.identity = {"umask": 0}
    yield site
    site.end_all()


def test_setup_lines_stand_in_no_command_line(open_site: Site) -> None:
    site = open_site
    spec = site.light("secret", params={"steps": 200, "step_ms": 20}, setup=SETUP, checkpoint={"every": {"steps": 10}})
    with command_lines_with(TOKEN, str(site.runs)) as found:
        completed = site.call("submit", str(spec), "--executor", "local")
        run_id = completed.stdout.strip()
        until(lambda: site.step(run_id) > 10, "a checkpoint")
        site.signal_all(run_id, signal.SIGKILL)
        assert site.json("sync")["started"] == [run_id]
        site.call("wait", run_id)
    assert TOKEN not in found
    seen = "".join(found[str(site.runs)])
    assert all(module in seen for module in ("slurmtrain.local.launcher", "submitit.local._local", "core._submit"))
    assert f"{spec}:" in completed.stderr
    assert "MY_API_TOKEN" in completed.stderr
