"""Which runs ``ui`` shows, and how a browser gets there."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from helpers.simulated_run import SimulatedRun

from slurmtrain.ops import ui
from slurmtrain.ops.shared.observe import observe
from slurmtrain.ops.shared.workspace import Workspace

FIRST, SECOND, OTHER, SWEEP = "0aaaaaaaaa", "0aaaaaaaab", "0aaaaaaaac", "0sweepswee"
SSH = {"SSH_CONNECTION": "10.0.0.1 50000 10.0.0.2 22"}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (None, [FIRST, SECOND, OTHER]),
        ("digits", [SECOND]),
        (SWEEP, [SECOND, OTHER]),
        ("*", [FIRST, SECOND, OTHER]),
        (SECOND, [SECOND]),
        ("words", [OTHER]),
        ("@last", [OTHER]),
    ],
)
def test_a_name_means_what_it_means_everywhere(workspace: Workspace, name: str | None, expected: list[str]) -> None:
    for run_id, of_run, sweep in ((FIRST, "digits", None), (SECOND, "digits", SWEEP), (OTHER, "words", SWEEP)):
        SimulatedRun(workspace.root.run(run_id), spec={"name": of_run}, executor="local").created(sweep=sweep)
    observed = observe(workspace, ask_slurm=False)
    assert ui.runs_to_show(workspace, observed, name) == expected


@pytest.mark.parametrize(
    ("environ", "expected"),
    [({"DISPLAY": ":0"}, True), ({"WAYLAND_DISPLAY": "w"}, True), ({"DISPLAY": ":0", **SSH}, False), ({}, False)],
)
def test_a_browser_is_opened_on_a_screen_of_this_machine_only(environ: dict[str, str], expected: bool) -> None:
    assert ui.has_browser(environ) is expected


def test_an_ssh_session_gets_the_line_for_a_tunnel() -> None:
    server: Any = SimpleNamespace(port=5001, place="127.0.0.1:5001")
    assert ui.tunnel({}, server) == ""
    assert ui.tunnel(SSH, server).startswith("ssh -N -L 5001:127.0.0.1:5001 ")
    assert " -p " not in ui.tunnel(SSH, server)
    assert " -p 2222 " in ui.tunnel({"SSH_CONNECTION": "a 1 b 2222"}, server)
