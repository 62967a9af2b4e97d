"""What other users of this machine can learn of a run: nothing from its files or its processes."""

from __future__ import annotations

import secrets
import signal
import stat
from collections.abc import Iterator

import pytest
from helpers.command_lines import command_lines_with
from helpers.modes import open_to_others
from helpers.site import Site, until

TOKEN = secrets.token_hex(8)
# It is not in the command of the rank: that would be the user's own doing.
SETUP = ["export MY_API_TOKEN=" + TOKEN]
PRINT = "python -c \"import os; print('mask', oct(os.umask(0)), 'length', len(os.environ['MY_API_TOKEN']))\""


@pytest.fixture(scope="module")
def open_site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A user whose umask keeps nothing from others."""
    site = Site(tmp_path_factory.mktemp("open"))
    site.identity = {"umask": 0}
    yield site
    site.end_all()


def test_setup_lines_stand_in_no_command_line(open_site: Site) -> None:
    site = open_site
    params = {"steps": 200, "step_ms": 10, "slow_from": 20}
    spec = site.light("secret", params=params, setup=SETUP, checkpoint={"every": {"steps": 10}})
    with command_lines_with(TOKEN, str(site.runs)) as lines:
        completed = site.call("submit", str(spec), "--executor", "local")
        run_id = completed.stdout.strip()
        until(lambda: site.step(run_id) > 10, "a checkpoint")
        site.signal_all(run_id, signal.SIGKILL)
        assert site.json("sync")["started"] == [run_id]
        site.call("wait", run_id)
    assert TOKEN not in lines
    of_the_run = "".join(lines[str(site.runs)])
    assert all(
        module in of_the_run for module in ("slurmtrain.local", "submitit.local._local", "slurmtrain.runtime.task")
    )
    assert f"{spec}:" in completed.stderr
    assert "MY_API_TOKEN" in completed.stderr


def test_a_run_and_all_that_commands_make_of_it_are_private(open_site: Site) -> None:
    site = open_site
    run_id = site.submit(
        site.light(
            "tracked", params={"steps": 4}, tracking={"mlflow": {"enabled": True}}, checkpoint={"every": {"steps": 2}}
        ),
        "--wait",
    )
    site.call("export", run_id, "--to", "model.safetensors")
    site.call("export", run_id, "--to", "model.pt")
    made = {path.name for path in site.runs.rglob("*")}
    assert made >= {"mlflow.db", "registry.db", "controller.log", "rank-0.log", "metrics.jsonl", ".metadata"}
    assert any(name.endswith("_submitted.pkl") for name in made)
    assert any(name.endswith("_log.out") for name in made)
    assert open_to_others(site.runs) == {}
    for name in ("model.safetensors", "model.pt"):
        assert stat.S_IMODE((site.path / name).stat().st_mode) == 0o600


@pytest.mark.parametrize(("umask", "of_ranks"), [(0o777, "0o77"), (0o002, "0o2")])
def test_a_script_has_the_umask_of_its_user_but_never_loses_the_rights_of_the_owner(
    site: Site, umask: int, of_ranks: str
) -> None:
    spec = site.commanding(PRINT, setup=SETUP)
    site.identity = {"umask": umask}
    run_id = site.submit(spec, "--wait")
    assert f"mask {of_ranks} length {len(TOKEN)}" in site.call("logs", run_id).stdout
    assert open_to_others(site.runs) == {}
