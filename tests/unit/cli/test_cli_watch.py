"""``slurmtrain watch`` as a person, systemd and cron see it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.preloaded import Called, shared

from slurmtrain.ops.watch import watch_lock


def environment(cwd: Path) -> dict[str, str]:
    return {**os.environ, "SLURMTRAIN_RUNS": str(cwd / "runs"), "XDG_CONFIG_HOME": str(cwd / "config")}


def call(*arguments: str, cwd: Path) -> Called:
    return shared().call("watch", *arguments, cwd=cwd, env=environment(cwd))


def test_a_single_round_with_nothing_to_do_says_nothing(tmp_path: Path) -> None:
    completed = call("--once", cwd=tmp_path)
    assert (completed.code, completed.stdout, completed.stderr) == (0, "", "")


def test_a_single_round_in_which_something_went_wrong_exits_with_1(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "registry.db").write_text("this is no database\n" * 100)
    (tmp_path / "runs" / "0123456789" / "journal").mkdir(parents=True)
    completed = call("--once", "--json", cwd=tmp_path)
    assert (completed.code, completed.stderr) == (1, "")
    events = [json.loads(line) for line in completed.stdout.splitlines()]
    assert {(event["schema"], event["kind"], event["run"]) for event in events} == {(1, "problem", None)}
    assert any("registry.db" in event["message"] for event in events)


@pytest.mark.parametrize("options", [(), ("--once",)])
def test_a_second_one_says_who_watches_and_exits_with_0(tmp_path: Path, options: tuple[str, ...]) -> None:
    (tmp_path / "runs").mkdir()
    with watch_lock(tmp_path / "runs" / ".watch.lock", 60):
        completed = call(*options, cwd=tmp_path)
    assert (completed.code, completed.stdout) == (0, "")
    assert f": process {os.getpid()} on " in completed.stderr


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_it_watches_until_it_is_asked_to_stop(tmp_path: Path, number: signal.Signals, code: int) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "slurmtrain", "watch", "--json"],
        cwd=tmp_path,
        env=environment(tmp_path),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        first = json.loads(process.stdout.readline())
        assert (first["kind"], first["message"]) == ("watching", f"watching {tmp_path / 'runs'} every 60 s")
        process.send_signal(number)
        rest, errors = process.communicate(timeout=120)
    finally:
        process.kill()
    assert [json.loads(line)["message"] for line in rest.splitlines()] == [
        f"stopped by {number.name}; the runs continue"
    ]
    assert (process.returncode, errors) == (code, "")


def test_a_runs_root_that_cannot_be_written_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("")
    completed = call(cwd=tmp_path)
    assert completed.code == 2
    assert f"cannot read the runs root {tmp_path / 'runs'}: not a directory" in completed.stderr
