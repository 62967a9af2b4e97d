"""A watch beside runs on this machine."""

from __future__ import annotations

import json
import signal
import subprocess
import sys

from helpers.site import Site

# Submits, and is killed between making the run and starting its job.
KILLED = """
import os, signal, sys
from slurmtrain.cli import main
from slurmtrain.ops.submit import submission
submission.start = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
main(sys.argv[1:])
"""


def test_a_watch_starts_a_run_whose_submission_was_killed_and_reports_its_end(site: Site) -> None:
    spec = str(site.light(params={"steps": 2}))
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, "submit", spec, "--executor", "local"], cwd=site.path, env=site.environment()
    )
    assert killed.returncode == -signal.SIGKILL
    watch = subprocess.Popen(
        [sys.executable, "-m", "slurmtrain", "watch", "--every", "10", "--json"],
        cwd=site.path,
        env=site.environment(),
        stdout=subprocess.PIPE,
        text=True,
    )
    events = []
    try:
        assert watch.stdout is not None
        for line in watch.stdout:
            events.append(json.loads(line))
            if events[-1]["kind"] == "finished":
                break
        watch.send_signal(signal.SIGTERM)
        assert watch.wait(60) == 0
    finally:
        watch.kill()
    [run] = site.json("status")["runs"]
    assert [event["kind"] for event in events] == ["watching", "started", "finished"]
    assert {event["run"] for event in events[1:]} == {run["id"]}
    assert (events[-1]["state"], run["attempt"]) == ("completed", 1), events
