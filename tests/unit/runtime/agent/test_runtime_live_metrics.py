"""The process that sends metrics from a node never holds up its job."""

from __future__ import annotations

import socket
from pathlib import Path

import psutil
import pytest
from helpers.simulated_run import RUN_ID, SimulatedRun
from helpers.site import until

from slurmtrain.model.run.layout import RunsRoot, SubmissionDir
from slurmtrain.runtime import script_metrics
from slurmtrain.runtime.script_metrics import send_live


def submission(root: Path) -> SubmissionDir:
    """The submission of a run that has logged one step."""
    directory = RunsRoot(root).run(RUN_ID)
    SimulatedRun(directory, spec={}).submitted().started().reached(1, loss=1.0)
    assert directory.submission(1).plan.exists()
    return directory.submission(1)


def test_a_server_that_never_answers_holds_up_the_start_and_the_end_of_a_job_for_a_moment_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script_metrics, "_BEGIN_S", 0.1)
    monkeypatch.setattr(script_metrics, "_END_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        uri = f"http://127.0.0.1:{silent.getsockname()[1]}"
        sending = send_live(submission(tmp_path), uri, live=False)
        assert sending is not None
        process = psutil.Process(sending._process.pid)
        with silent.accept()[0]:  # it has sent a request
            assert process.nice() > 0
            assert sending.wait_for_run(give_up=lambda: False) is None
            sending.end(in_grace=False)
    until(lambda: not process.is_running(), "the end of the process")


def test_ranks_do_not_wait_for_a_server_that_is_known_to_be_down_nor_after_a_signal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script_metrics, "_BEGIN_S", 1000.0)
    with socket.create_server(("127.0.0.1", 0)) as server:
        uri = f"http://127.0.0.1:{server.getsockname()[1]}"
        sending = send_live(submission(tmp_path), uri, live=False)
        assert sending is not None
        assert sending.wait_for_run(give_up=lambda: True) is None
    assert sending.wait_for_run(give_up=lambda: False) is None
    sending.end(in_grace=True)


def test_nothing_is_started_where_the_run_has_no_server(tmp_path: Path) -> None:
    assert send_live(RunsRoot(tmp_path).run(RUN_ID).submission(1), "", live=True) is None
