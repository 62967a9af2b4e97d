"""Full disks, damaged files, killed commands, several commands at once: nothing is lost, nothing is done twice."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.mlflow_server import mlflow_server
from helpers.site import PATIENCE_S, Site, until

LONG = {"steps": 100_000, "step_ms": 10}
TWO = {"nodes": 1, "procs_per_node": 2}
# How long two terminals disturb each other: twenty times as long finds rarer things.
STRESS_S = float(os.environ.get("TEST_STRESS_S", "15"))


# --- checkpoints ----------------------------------------------------------------------------------------------------


def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(site: Site) -> None:
    spec = site.light(params={"steps": 20}, resources=TWO, checkpoint={"every": {"steps": 5}})
    run_id = site.submit(spec, "--wait")
    newest = site.runs / run_id / "checkpoints" / "step-20" / "__1_0.distcp"
    content = bytearray(newest.read_bytes())
    content[len(content) // 2] ^= 1
    newest.write_bytes(content)

    [resumed] = site.json("resume", run_id, "params.steps=22", "--wait")["runs"]
    # Steps 16 to 20 are trained a second time: the checkpoint that had them is lost.
    assert (resumed["state"], resumed["step"], resumed["lost_steps"]) == ("completed", 22, 5)
    run = site.show(run_id)
    assert run["attempts"][1]["first_step"] == 15
    assert {c["step"]: c["complete"] for c in run["checkpoints"]}[15] is True


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A filesystem of two megabytes."""
    place = tmp_path / "small"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m,mode=700", "tmpfs", str(place)], capture_output=True
    )
    if mounted.returncode != 0:
        pytest.skip(f"needs the right to mount a small filesystem: {mounted.stderr.decode().strip()}")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)


def test_a_full_disk_leaves_the_old_checkpoint_valid_and_training_continues(site: Site, small_disk: Path) -> None:
    """The checkpoints lie on a disk that is full from the fifth step on and has room again before the last."""
    spec = site.light(params={"steps": 400, "step_ms": 10}, checkpoint={"every": {"steps": 5}, "keep": 2})
    run_id = site.submit(spec)
    checkpoints = site.runs / run_id / "checkpoints"
    until(lambda: (site.runs / run_id / "plan.json").exists())
    subprocess.run(["mount", "--bind", str(small_disk), str(checkpoints)], check=True)
    try:
        until(lambda: len(list(checkpoints.glob("step-*/MANIFEST.json"))) > 1, "a few checkpoints")
        filler = checkpoints / ".filler"
        with pytest.raises(OSError), filler.open("wb", buffering=0) as file:
            while True:
                file.write(b"x" * 4096)
        journal = site.runs / run_id / "attempts"
        until(
            lambda: any("save_failed" in path.read_text() for path in journal.glob("*/rank-0.jsonl")), "a failed save"
        )
        failed_at = site.step(run_id)
        valid = [json.loads(path.read_text())["step"] for path in checkpoints.glob("step-*/MANIFEST.json")]
        assert valid
        assert max(valid) < failed_at
        until(lambda: site.step(run_id) > failed_at + 5, "more steps")
        filler.unlink()
        site.call("wait", run_id)
        run = site.status(run_id)
        assert (run["state"], run["checkpoint"]["step"]) == ("completed", 400)
        events = "".join(path.read_text() for path in journal.glob("*/rank-0.jsonl"))
        assert "no space left on the device" in events
        assert not [path for path in checkpoints.iterdir() if path.name.startswith(".local")]
    finally:
        subprocess.run(["umount", "--lazy", str(checkpoints)], check=True)


# --- journals and registry ------------------------------------------------------------------------------------------


def facts(site: Site, run_ids: list[str]) -> tuple[Any, list[Any]]:
    status = site.json("status")
    status.pop("as_of")
    runs = [*status["runs"], *(site.show(run_id) for run_id in run_ids)]
    for run in runs:
        # What trackers have is in no run directory: after a rebuild it is sent, and ignored there, once more.
        del run["mirrored"], run["trackers"]
    return status, runs[len(status["runs"]) :]


def test_a_rebuilt_registry_gives_the_same_answers(site: Site) -> None:
    completed = site.submit(site.light("one", params={"steps": 8}, tracking={"mlflow": {}}), "--wait")
    crashed = site.submit(
        site.light(
            "two", params={"steps": 9, "crash_rank": 1, "crash_step": 3}, resources=TWO, requeue={"enabled": False}
        ),
        "--wait",
        code=1,
    )
    killed = site.submit(site.light("three", params=LONG, checkpoint={"every": {"steps": 4}}))
    until(lambda: site.step(killed) > 9, "steps")
    site.signal_all(killed, signal.SIGKILL)
    site.call("resume", killed, "params.steps=30", "params.step_ms=0", "--wait")
    torn = next((site.runs / crashed).glob("attempts/*/rank-0.jsonl"))
    with torn.open("ab") as file:
        file.write(b'garbage in the middle\n{"t": 1, "kind": "torn')
    run_ids = [completed, crashed, killed]
    site.call("sync")
    before = facts(site, run_ids)
    assert before[1][0]["mlflow_run_id"]
    assert [bad["line"] for bad in before[1][1]["garbage"]] == ["garbage in the middle"]

    (site.runs / "registry.db").unlink()
    rebuilt = site.call("registry", "rebuild")
    assert "unreadable line" in rebuilt.stderr
    assert facts(site, run_ids) == before
    site.call("registry", "rebuild")
    assert facts(site, run_ids) == before
    (site.runs / "registry.db").unlink()
    assert facts(site, run_ids) == before


def test_without_a_readable_registry_runs_are_submitted_shown_cancelled_and_resumed(site: Site) -> None:
    broken = site.runs / "registry.db"
    site.runs.mkdir()
    broken.write_text("these are my notes " * 100)

    def call(*arguments: str) -> str:
        completed = site.call(*arguments)
        [warning] = [line for line in completed.stderr.splitlines() if line.startswith("warning: ")]
        assert f"{broken} is not a readable database" in warning
        assert "'slurmtrain registry rebuild'" in warning
        return completed.stdout

    [run] = json.loads(call("submit", str(site.light(params=LONG)), "--executor", "local", "--json"))["runs"]
    run_id = run["id"]
    until(lambda: site.step(run_id) > 0, "a step")
    assert run_id in call("status", run_id)
    call("checkpoint", run_id)
    call("cancel", run_id)
    assert "cancelled" in call("show", run_id)
    call("logs", run_id)
    assert call("resume", run_id).strip() == run_id
    call("cancel", "--force", run_id)
    site.call("registry", "rebuild")
    assert site.status(run_id)["state"] == "cancelled"


# --- MLflow ---------------------------------------------------------------------------------------------------------


def mlflow_runs(site: Site) -> list[dict[str, Any]]:
    """What an MLflow client finds in the store, asked in a process of its own."""
    code = (
        "import json, mlflow, sys\n"
        "client = mlflow.MlflowClient('sqlite:///' + sys.argv[1])\n"
        "ids = [e.experiment_id for e in client.search_experiments()]\n"
        "print(json.dumps([{'id': r.info.run_id, 'status': r.info.status, 'params': r.data.params,\n"
        " 'tags': r.data.tags,\n"
        " 'loss': [(m.step, m.timestamp, m.value) for m in client.get_metric_history(r.info.run_id, 'loss')]}\n"
        " for r in client.search_runs(ids)]))"
    )
    completed = subprocess.run(
        [sys.executable, "-c", code, str(site.runs / "mlflow.db")], capture_output=True, text=True, check=True
    )
    runs: list[dict[str, Any]] = json.loads(completed.stdout.splitlines()[-1])
    return runs


def test_one_mlflow_run_mirrors_all_attempts_and_mirroring_twice_adds_nothing(site: Site) -> None:
    spec = site.light(params={"steps": 6, "model": {"width": 3}}, tracking={"mlflow": {"experiment": "tests"}})
    run_id = site.submit(spec, "--wait")
    site.call("resume", run_id, "params.steps=11", "--wait")
    [mirrored] = mlflow_runs(site)
    assert mirrored["status"] == "FINISHED"
    assert mirrored["tags"]["slurmtrain.run_id"] == run_id
    assert mirrored["tags"]["slurmtrain.attempts"] == "2"
    assert mirrored["params"] == {"steps": "11", "model.width": "3"}
    assert mirrored["tags"]["slurmtrain.attempt_1.params.steps"] == "6"
    assert [step for step, _, _ in sorted(mirrored["loss"])] == list(range(1, 12))
    lines = [
        json.loads(line)
        for path in sorted((site.runs / run_id).glob("attempts/*/metrics.jsonl"))
        for line in path.read_text().splitlines()
    ]
    logged = {(line["step"], int(line["t"] * 1000), line["metrics"]["loss"]) for line in lines if "metrics" in line}
    assert {tuple(point) for point in mirrored["loss"]} == logged
    assert site.status(run_id)["mlflow_run_id"] == mirrored["id"]

    site.call("sync")
    (site.runs / "registry.db").unlink()
    assert "nothing to do" in site.call("sync").stderr
    for lost in ("registry.db", f"{run_id}/sent.json"):
        (site.runs / lost).unlink()
    assert "1 mirrored" in site.call("sync").stderr
    assert mlflow_runs(site) == [mirrored]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    """An MLflow server of our own on the loopback interface."""
    with mlflow_server(tmp_path, f"sqlite:///{tmp_path / 'server.db'}") as uri:
        yield uri


@pytest.mark.slow
def test_a_script_reaches_its_own_run_on_a_tracking_server(site: Site, server: str) -> None:
    spec = site.path / "own.yaml"
    spec.write_text(
        "command: python -c \"import os; print(os.environ['MLFLOW_TRACKING_URI'], os.environ['MLFLOW_RUN_ID'])\"\n"
        f"tracking: {{mlflow: {{uri: '{server}'}}}}\n"
    )
    run_id = site.submit(spec, "--wait")
    mlflow_id = site.status(run_id)["mlflow_run_id"]
    assert f"{server} {mlflow_id}" in site.call("logs", run_id).stdout
    with urllib.request.urlopen(f"{server}/api/2.0/mlflow/runs/get?run_id={mlflow_id}", timeout=PATIENCE_S) as answer:
        assert json.load(answer)["run"]["info"]["status"] == "FINISHED"


def test_a_tracking_server_that_is_down_fails_no_run_and_is_reported(site: Site) -> None:
    spec = site.light(params={"steps": 2}, tracking={"mlflow": {"uri": "http://127.0.0.1:9"}})
    run_id = site.submit(spec)
    waited = site.call("wait", run_id)
    assert "http://127.0.0.1:9" in waited.stderr
    assert site.status(run_id)["state"] == "completed"
    assert site.call("sync", code=1).stderr.count("warning:") == 1


# --- commands that are killed, or many at once ----------------------------------------------------------------------


def test_a_submission_killed_at_any_moment_is_finished_by_the_next_sync_and_never_doubled(site: Site) -> None:
    spec = site.commanding("true")
    environment = site.environment()
    for delay_ms in range(150, 900, 75):
        process = subprocess.Popen(
            [sys.executable, "-m", "slurmtrain", "submit", str(spec), "--executor", "local"],
            cwd=site.path,
            env=environment,
            stdout=subprocess.DEVNULL,
        )
        threading.Event().wait(delay_ms / 1000)
        process.kill()
        process.wait()
    deadline = time.monotonic() + 2 * PATIENCE_S
    while time.monotonic() < deadline:
        site.call("sync")
        runs = site.json("status")["runs"]
        if all(run["state"] in ("completed", "failed", "lost", "cancelled") for run in runs):
            break
    assert [run["state"] for run in runs] == ["completed"] * len(runs)
    assert [run["attempt"] for run in runs] == [1] * len(runs)
    until(lambda: site.call("sync") and not list(site.runs.glob(".new-*")), "the end of half-made directories")
    for run in runs:
        assert len(list((Path(run["dir"])).glob("attempts/*/node-0.jsonl"))) == 1


def test_a_cancel_that_is_killed_is_finished_by_the_next_sync(site: Site) -> None:
    run_id = site.submit(site.light(params=LONG, resources=TWO))
    until(lambda: site.step(run_id) >= 1, "the first step")
    # As a cancel leaves it that dies between noting the wish and sending a signal.
    from slurmtrain.model.run.events.command_events import CancelRequested
    from slurmtrain.system.journal import command_journal

    with command_journal(site.runs / run_id / "journal", "cancel") as journal:
        journal.write(CancelRequested())
    site.call("sync")
    assert site.status(run_id)["state"] == "cancelled"
    assert not site.processes(run_id)


class Terminal(threading.Thread):
    """A person who types one command after the other for a while."""

    def __init__(self, site: Site, specs: list[Path], seed: int, submitted: list[str]) -> None:
        super().__init__()
        self.site, self.specs, self.dice = site, specs, random.Random(seed)
        self.submitted = submitted
        self.own_runs: list[str] = []
        self.cancelled: set[str] = set()
        self.problems: list[str] = []
        self.end = time.monotonic() + STRESS_S

    def run(self) -> None:
        words = [self.submit, self.submit, self.cancel, self.show, *(self.call,) * 3]
        while time.monotonic() < self.end:
            try:
                self.dice.choice(words)()
            except AssertionError as error:
                self.problems.append(str(error))

    def submit(self) -> None:
        run_id = self.site.submit(self.dice.choice(self.specs))
        self.own_runs.append(run_id)
        self.submitted.append(run_id)

    def cancel(self) -> None:
        if self.own_runs:
            self.cancelled.add(self.own_runs[-1])
            self.site.call("cancel", self.own_runs[-1])

    def show(self) -> None:
        if self.submitted:
            self.site.show(self.dice.choice(self.submitted))

    def call(self) -> None:
        self.site.call(*self.dice.choice([("sync",), ("status",), ("registry", "rebuild")]))


@pytest.mark.slow
def test_two_terminals_at_once_for_a_while_lose_no_run_and_do_nothing_twice(site: Site) -> None:
    quick, slow = site.path / "quick.yaml", site.path / "slow.yaml"
    untracked = "\ntracking: {mlflow: {enabled: false}}\n"
    quick.write_text("command: python -c pass" + untracked)
    slow.write_text("command: python -c 'import threading; threading.Event().wait(600)'" + untracked)
    submitted: list[str] = []
    terminals = [Terminal(site, [quick, quick, slow], seed, submitted) for seed in (1, 2)]
    for terminal in terminals:
        terminal.start()
    for terminal in terminals:
        terminal.join()
    cancelled = {run_id for terminal in terminals for run_id in terminal.cancelled}
    for run in site.json("status")["runs"]:
        if run["state"] in ("pending", "running"):
            cancelled.add(run["id"])
            site.call("cancel", run["id"])
    runs = {run["id"]: run for run in site.json("status")["runs"]}

    assert [problem for terminal in terminals for problem in terminal.problems] == []
    assert sorted(runs) == sorted(submitted)
    for run_id, run in runs.items():
        # Who cancels at once may be quicker than the start of the run's agent.
        assert run["attempt"] == (0 if run["reason"] == "cancelled before it started" else 1), run
        assert run["state"] == "completed" or (run["state"] == "cancelled" and run_id in cancelled), run
    # One that says that it has completed is about to end.
    until(lambda: not [one for run_id in runs for one in site.processes(run_id)], "the end of all processes")


def test_an_unwritable_runs_root_is_refused_with_nothing_created(site: Site, tmp_path: Path) -> None:
    file = tmp_path / "a-file"
    file.write_text("")
    refused = site.call("submit", str(site.spec()), "--executor", "local", "--runs", str(file / "runs"), code=2)
    assert str(file) in refused.stderr
    if os.geteuid() != 0:
        locked = tmp_path / "locked"
        locked.mkdir(mode=0o500)
        site.call("submit", str(site.spec()), "--executor", "local", "--runs", str(locked), code=2)
        assert list(locked.iterdir()) == []
