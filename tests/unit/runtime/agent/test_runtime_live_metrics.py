"""The process that sends metrics from a node never holds up its job."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import psutil
import pytest
from helpers.simulated_run import RUN_ID, SimulatedRun
from helpers.site import until

from slurmtrain.model.run.layout import RunsRoot
from slurmtrain.runtime.agent import live_metrics
from slurmtrain.runtime.agent.live_metrics import send_live


def test_a_server_that_never_answers_holds_up_the_end_of_a_job_for_a_moment_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_metrics, "_LAST_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        uri = f"http://127.0.0.1:{silent.getsockname()[1]}"
        directory = RunsRoot(tmp_path).run(RUN_ID)
        run = SimulatedRun(directory).submitted().command("mlflow", mlflow_run_id="m", uri=uri).started()
        run.reached(1, loss=1.0).ended("completed")
        variables = {"MLFLOW_RUN_ID": "m", "MLFLOW_TRACKING_URI": uri}
        sending = send_live(directory, {**os.environ, **variables}, live=False)
        assert sending is not None
        process = psutil.Process(sending._process.pid)
        with silent.accept()[0]:  # it has sent a request
            assert process.nice() > 0
            sending.end(in_grace=False)
    until(lambda: not process.is_running(), "the end of the process")


def test_nothing_is_started_where_no_server_is_known(tmp_path: Path) -> None:
    run = RunsRoot(tmp_path).run(RUN_ID)
    assert send_live(run, {}, live=True) is None
    variables = {"MLFLOW_RUN_ID": "m", "MLFLOW_TRACKING_URI": "sqlite:////srv/mlflow.db"}
    assert send_live(run, variables, live=True) is None
