"""Runs whose commands get no lock: another command holds it and stands still, or the file system has none."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers import without_locks
from helpers.site import Site, until

from slurmtrain.system.process import Process

# Submits, and is stopped when everything is ready for the job to start.
STOPPED = """
import os, signal, sys
from slurmtrain.cli import main
from slurmtrain.ops.shared import start
submit = start._Group.submit
def stop_first(*arguments):
    os.kill(os.getpid(), signal.SIGSTOP)
    return submit(*arguments)
start._Group.submit = stop_first
main(sys.argv[1:])
"""


def test_a_run_whose_submission_is_stopped_can_be_cancelled_and_does_not_train(site: Site) -> None:
    submit = subprocess.Popen(
        [sys.executable, "-c", STOPPED, "submit", str(site.light()), "--executor", "local"],
        cwd=site.path, env=site.environment(), stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        os.waitid(os.P_PID, submit.pid, os.WSTOPPED | os.WNOWAIT)
        [run_id] = [path.name for path in site.runs.iterdir() if (path / "plan.json").exists()]
        # Twice: the second one neither waits longer nor believes that the run has ended.
        for _ in range(2):
            cancelled = site.call("cancel", run_id, code=1)
            assert f"process {submit.pid}, which is stopped" in cancelled.stderr
            assert "the request is recorded" in cancelled.stderr.lower()
        submit.send_signal(signal.SIGCONT)
        _, err = submit.communicate(timeout=120)
    finally:
        submit.kill()
    assert f"run {run_id} was cancelled while its job was being submitted" in err
    site.until_state(run_id, "cancelled")
    until(lambda: not site.processes(run_id), "the end of its processes")
    assert site.step(run_id) == 0


@pytest.fixture
def lockless(site: Site, tmp_path: Path) -> Site:
    """A site whose commands and runs get no lock from the kernel."""
    if not without_locks.is_supported():
        pytest.skip("system calls cannot be made to fail on this machine")
    python = tmp_path / "python"
    words = [sys.executable, str(without_locks.__file__), "ENOLCK", sys.executable]
    python.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
    python.chmod(0o755)
    site.python = str(python)
    return site


def test_without_locks_a_run_is_submitted_saved_resumed_pruned_watched_and_cancelled(lockless: Site) -> None:
    site = lockless
    spec = site.light(params={"steps": 6, "step_ms": 50}, checkpoint={"every": {"steps": 2}, "keep": 3})
    run_id = site.json("submit", str(spec), "--executor", "local", "--wait")["runs"][0]["id"]
    saved = sorted(path.name for path in (site.runs / run_id / "checkpoints").iterdir())
    assert saved == ["step-2", "step-4", "step-6"]
    watched = site.call("watch", "--once")
    assert "slurmtrain uses hard links instead" in watched.stderr
    assert site.json("prune", run_id)["pruned"] == []
    resumed = site.json("resume", run_id, "params.steps=100000")["runs"][0]
    assert resumed["attempt"] == 2
    until(lambda: site.step(run_id) > 6, "the first step of the second attempt")
    assert "is running" in site.call("resume", run_id, code=2).stderr
    site.call("sync")
    site.call("cancel", run_id)
    assert site.status(run_id)["state"] == "cancelled"
    site.call("registry", "rebuild")
    assert not [path for path in site.runs.rglob("*") if ".held" in path.name]


# --- a runs root that is renamed --------------------------------------------------------------------------------------


def saved_steps(runs: Path, run_id: str) -> list[int]:
    """The steps of the published checkpoints of a run."""
    return sorted(int(path.parent.name[5:]) for path in (runs / run_id / "checkpoints").glob("step-*/MANIFEST.json"))


def test_a_run_trains_on_and_saves_although_the_runs_root_is_renamed(site: Site) -> None:
    spec = site.spec(params={"steps": 100000, "step_ms": 20}, checkpoint={"every": {"steps": 10}}, script="steps.py")
    run_id = site.submit(spec)
    until(lambda: saved_steps(site.runs, run_id), "the first checkpoint")
    before, site.runs = site.runs, site.path / "renamed"
    before.rename(site.runs)
    newest = saved_steps(site.runs, run_id)[-1]
    until(lambda: saved_steps(site.runs, run_id)[-1] > newest + 10, "two checkpoints since the renaming")
    assert "started" not in site.call("sync").stdout
    assert site.status(run_id)["state"] == "running"
    site.call("cancel", run_id)
    run = site.show(run_id)
    assert (run["state"], len(run["attempts"]), run["lost_steps"]) == ("cancelled", 1, 0)
    assert run["checkpoint"]["step"] == run["step"]
    site.json("resume", run_id, f"params.steps={run['step'] + 3}", "--wait")
    run = site.show(run_id)
    assert (run["state"], run["lost_steps"]) == ("completed", 0)
    assert not before.exists()


def test_a_run_that_fails_after_a_renaming_says_so_and_starts_again_where_it_is_and_once(site: Site) -> None:
    spec = site.light(
        params={"steps": 100000, "step_ms": 20}, checkpoint={"every": {"steps": 10}}, requeue={"backoff_s": 0}
    )
    run_id = site.submit(spec)
    until(lambda: saved_steps(site.runs, run_id), "the first checkpoint")
    before, site.runs = site.runs, site.path / "renamed"
    before.rename(site.runs)
    [rank] = [Process.from_dict(each) for each in processes_of_ranks(site.runs / run_id)]
    assert rank.send(signal.SIGKILL)
    site.until_state(run_id, "requeued")
    reason = site.show(run_id)["attempts"][0]["reason"]
    moved = f"its directory was moved from {before / run_id} to {site.runs / run_id} while it was running"
    assert reason.startswith("rank 0 was killed by SIGKILL")
    assert moved in reason
    # Not in place, where the old directory would be made anew.
    assert not before.exists()
    until(lambda: run_id in site.call("sync").stdout or site.status(run_id)["attempt"] == 2, "another start")
    until(lambda: len([*site.runs.glob("*/attempts/*/metrics.jsonl")]) == 2, "a step of the second attempt")
    site.call("cancel", run_id)
    second = site.show(run_id)["attempts"][1]
    assert second["first_step"] >= 10


def processes_of_ranks(run: Path) -> list[dict[str, Any]]:
    """The ranks of a run that its agent has started last."""
    [journal] = run.glob("attempts/*/node-0.jsonl")
    events = [json.loads(line) for line in journal.read_text().splitlines()]
    return list([event for event in events if event["kind"] == "workers"][-1]["processes"].values())
