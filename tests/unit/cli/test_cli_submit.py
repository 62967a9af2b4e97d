"""``submit`` on a terminal and off it: questions, warnings, what is printed when something fails."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
import termios
from pathlib import Path

import pytest
from helpers.fakeslurm import PARTITIONS, SlurmCommands
from helpers.preloaded import Called, shared

SPEC = "name: x\ncommand: python -c pass\ntracking: {mlflow: {enabled: false}}\n"


class Caller:
    """Calls ``submit`` where Slurm's commands are fakes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.slurm = SlurmCommands(path / "bin")
        for name, reply in (("scontrol", PARTITIONS), ("sbatch", "Submitted batch job 8\n"), ("srun", "")):
            self.slurm.replies(name, reply)
        (path / "x.yaml").write_text(SPEC)
        self.environ = {**os.environ, "PATH": self.slurm.on_path(), "SLURMTRAIN_RUNS": str(path / "runs")}
        self.command = [sys.executable, "-m", "slurmtrain", "submit", "x.yaml", "--executor", "slurm"]

    def call(self, *arguments: str) -> Called:
        """Off a terminal."""
        return shared().call(*self.command[3:], *arguments, cwd=self.path, env=self.environ)

    def call_on_a_terminal(self, answer: str) -> tuple[int, str]:
        """On a terminal where somebody types ``answer``; the exit code and what the terminal shows."""
        leader, follower = pty.openpty()
        # Wide enough for any directory: lines are not wrapped.
        termios.tcsetwinsize(follower, (24, 1000))
        process = subprocess.Popen(
            self.command,
            cwd=self.path,
            env={**self.environ, "TERM": "xterm", "COLUMNS": "", "LINES": ""},
            stdin=follower,
            stdout=subprocess.DEVNULL,
            stderr=follower,
        )
        os.close(follower)
        os.write(leader, f"{answer}\n".encode())
        shown = b""
        try:
            while chunk := os.read(leader, 4096):
                shown += chunk
        except OSError:
            pass  # the end of a terminal without processes
        os.close(leader)
        return process.wait(timeout=120), shown.decode()

    def runs(self) -> int:
        return len(list((self.path / "runs").glob("*/plan.json")))


@pytest.fixture
def caller(tmp_path: Path) -> Caller:
    return Caller(tmp_path)


def test_the_same_plan_within_a_minute_is_asked_about_on_a_terminal_and_noted_off_it(caller: Caller) -> None:
    first = caller.call()
    assert (first.code, "idempotency" in first.stderr) == (0, False)
    code, shown = caller.call_on_a_terminal("n")
    assert f"as run {first.stdout.strip()}, which has not ended; submit it again? [y/N]" in shown
    assert "nothing was submitted" in shown
    assert (code, caller.runs()) == (1, 1)
    code, _ = caller.call_on_a_terminal("y")
    assert (code, caller.runs()) == (0, 2)
    noted = caller.call("--json")
    assert "--idempotency-key keeps a repeated command from submitting twice" in noted.stderr
    assert (noted.code, len(json.loads(noted.stdout)["runs"]), caller.runs()) == (0, 1, 3)


def test_what_exists_after_a_failure_is_printed_and_nothing_else(caller: Caller) -> None:
    caller.slurm.replies("sbatch", code=-9)
    failed = caller.call("--json")
    [run] = json.loads(failed.stdout)["runs"]
    assert failed.code == 1
    assert f"perhaps submitted: {run['id']} ('slurmtrain sync' finds out" in failed.stderr
    caller.slurm.fails("sbatch", "sbatch: error: Batch job submission failed: Invalid account")
    refused = caller.call("--json")
    assert (refused.code, refused.stdout) == (2, "")
    assert refused.stderr.rstrip().endswith("nothing was created")
    assert caller.runs() == 1
