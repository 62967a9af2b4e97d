"""What commands tell the runs of sweeps on this machine to wait for."""

from __future__ import annotations

from typing import Any

import pytest
from helpers.simulated_run import SimulatedRun
from helpers.workspaces import sync_again

from slurmtrain.local import local_launch as local_launch
from slurmtrain.model.run.layout import run_id
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.runtime.environment.node import Turn, read_launch
from slurmtrain.system.process import this_process

RUNS = [run_id(1_700_000_000_000 + number, 0) for number in range(5)]
SWEEPS = ("first", None, "second", "first", "second")


def test_a_run_that_sync_starts_waits_for_the_one_before_it_in_its_own_sweep(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_launch, "launch", lambda *_: this_process())
    for name, sweep in zip(RUNS, SWEEPS, strict=True):
        fields: dict[str, Any] = {} if sweep is None else {"sweep": sweep, "parallel": 2}
        SimulatedRun(workspace.root.run(name), spec={"name": "n"}, executor="local").created(**fields)
    assert sync_again(workspace).started == RUNS
    launches = [read_launch(workspace.root.run(name).submission(1)) for name in RUNS]
    assert [launch.turn for launch in launches if launch] == [
        Turn("first", 2),
        None,
        Turn("second", 2),
        Turn("first", 2, behind=RUNS[0]),
        Turn("second", 2, behind=RUNS[2]),
    ]
