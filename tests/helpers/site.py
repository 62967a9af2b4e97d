"""A directory in which to call slurmtrain as a user would, with real runs through submitit's local executor."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil
import yaml

from helpers.preloaded import Preloaded, preloaded

PROJECT = Path(__file__).resolve().parents[2]
SCRIPTS = PROJECT / "tests" / "local" / "scripts"
ONE_PROCESS: dict[str, Any] = {"nodes": 1, "procs_per_node": 1, "time": "00:10:00"}
# The variables that the interpreter, the dynamic linker and the C library read when a process starts.
_READ_AT_START = ("PYTHON", "LD_", "LC_", "LANG", "MALLOC_", "GLIBC_")
# By interpreter, variables and user.
_servers: dict[str, Preloaded] = {}
# How long until() pauses after a check, as a multiple of the check's duration: checks take CPU time from the run.
REST = 3
# Seconds between two questions about a run of which nothing new is written.
SELDOM_S = 3.0
# How long to wait for an expected event: generous, since machines are shared; passing tests never wait this long.
PATIENCE_S = 120.0


def end_servers() -> None:
    """End what forks commands, whose user is about to be removed."""
    for server in _servers.values():
        server.end()
    _servers.clear()


class Site:
    """A directory with a runs root, in which to call slurmtrain as a user would."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.runs = path / "runs"
        self.python = sys.executable
        self.scripts = SCRIPTS
        self.identity: dict[str, Any] = {}
        """The calling user, as an argument of subprocess.run(); by default the user who runs the tests."""

    def call(
        self,
        *arguments: str,
        code: int | None = 0,
        env: dict[str, str] | None = None,
        cwd: Path | None = None,
        patience_s: float = PATIENCE_S * 2,
    ) -> subprocess.CompletedProcess[str]:
        """Run a slurmtrain command to its end, expecting this exit code (None: any)."""
        environ = {**self.environment(), **(env or {})}
        server = self._server(environ)
        if server is not None:
            forked = server.call(*arguments, cwd=cwd or self.path, env=environ, limit_s=patience_s)
            completed = subprocess.CompletedProcess(arguments, forked.code, forked.stdout, forked.stderr)
        else:
            completed = subprocess.run(
                [self.python, "-m", "slurmtrain", *arguments],
                cwd=cwd or self.path,
                env=environ,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=patience_s,
                **self.identity,
            )
        assert "Traceback" not in completed.stderr, completed.stderr
        assert code is None or completed.returncode == code, (
            f"{arguments}: {completed.returncode}\n{completed.stdout}\n{completed.stderr}"
        )
        return completed

    def _server(self, environ: Mapping[str, str]) -> Preloaded | None:
        """What forks commands with this environment, each of which costs a tenth of a start of Python then.

        None: it serves one command at a time, and cannot change what an interpreter reads at its start.
        """
        if threading.current_thread() is not threading.main_thread():
            return None
        at_start = {name: value for name, value in environ.items() if name.startswith(_READ_AT_START)}
        key = json.dumps([self.python, at_start, self.identity], sort_keys=True)
        if at_start != {name: value for name, value in self.environment().items() if name.startswith(_READ_AT_START)}:
            return None
        if key not in _servers:
            _servers[key] = preloaded(self.python, environ, self.identity)
        return _servers[key]

    def environment(self) -> dict[str, str]:
        """This site's runs root, and this interpreter as the ``python`` of commands."""
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("SLURMTRAIN_", "MLFLOW_"))}
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        own = {"SLURMTRAIN_RUNS": str(self.runs), "XDG_CONFIG_HOME": str(self.path / "no-config"), "PATH": path}
        return {**inherited, **own}

    def json(self, *arguments: str, **more: Any) -> dict[str, Any]:
        """The JSON object that a command prints."""
        answer: dict[str, Any] = json.loads(self.call(*arguments, "--json", **more).stdout)
        return answer

    def spec(self, name: str = "tiny", *, script: str = "train.py", **keys: Any) -> Path:
        """Write a spec for one of the test scripts."""
        data = {
            "name": name,
            "command": f"python {self.scripts / script}",
            "resources": {"nodes": 1, "procs_per_node": 2},
            "tracking": {"mlflow": {"enabled": False}},
            **keys,
        }
        path = self.path / f"{name}.yaml"
        path.write_text(yaml.safe_dump(data))
        return path

    def light(self, name: str = "light", **keys: Any) -> Path:
        """A spec for one process that trains like ``spec``'s script, but starts in half the time."""
        return self.spec(name, script="steps.py", **{"resources": ONE_PROCESS, **keys})

    def steady(self, name: str = "steady", **keys: Any) -> Path:
        """A spec for one process that prints continuously until it is ended, and does not use slurmtrain."""
        return self.spec(name, script="steady.py", **{"resources": ONE_PROCESS, **keys})

    def commanding(self, command: str, name: str = "plain", **keys: Any) -> Path:
        """A spec for one process that runs this command."""
        return self.spec(name, **{"command": command, "resources": ONE_PROCESS, **keys})

    def with_entry_points(self, *path: Path) -> dict[str, str]:
        """Variables of a script that finds the package's entry points, even if they are newer than its installation.

        ``path``: folders that it is to import from besides.
        """
        declared = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]["entry-points"]
        folder = self.path / "installed" / "slurmtrain_here-0.dist-info"
        folder.mkdir(parents=True, exist_ok=True)
        sections = [
            "\n".join([f"[{group}]", *(f"{name} = {target}" for name, target in entries.items())])
            for group, entries in declared.items()
        ]
        (folder / "entry_points.txt").write_text("\n".join(sections))
        (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: slurmtrain-here\nVersion: 0\n")
        return {"PYTHONPATH": os.pathsep.join(map(str, (*path, folder.parent)))}

    def submit(self, spec: Path, *arguments: str, **more: Any) -> str:
        """Submit a spec on this machine; return the run's id."""
        return str(self.json("submit", str(spec), "--executor", "local", *arguments, **more)["runs"][0]["id"])

    def status(self, run_id: str) -> dict[str, Any]:
        """One run as ``status`` prints it."""
        [run] = self.json("status", run_id)["runs"]
        return run

    def show(self, run_id: str) -> dict[str, Any]:
        """One run as ``show`` prints it."""
        shown: dict[str, Any] = self.json("show", run_id)["run"]
        return shown

    def until_state(self, run_id: str, *states: str, patience_s: float = PATIENCE_S) -> dict[str, Any]:
        """Wait until a run is in one of these states, and return it as ``status`` prints it.

        A command takes CPU time from the run: it is called when agents or commands have written something, else seldom.
        """
        known_bytes, ask_at = -1, 0.0

        def look() -> dict[str, Any] | None:
            nonlocal known_bytes, ask_at
            written = known_bytes
            with contextlib.suppress(FileNotFoundError):
                written = self._written(run_id)
            if written == known_bytes and time.monotonic() < ask_at:
                return None
            run = self.status(run_id)
            known_bytes, ask_at = written, time.monotonic() + SELDOM_S
            return run if run["state"] in states else None

        answer: dict[str, Any] = until(look, f"run {run_id} {' or '.join(states)}", patience_s=patience_s)
        return answer

    def _written(self, run_id: str) -> int:
        """How many bytes commands and agents have written about a run. Raises FileNotFoundError if some just vanish."""
        patterns = ("journal/*.jsonl", "attempts/*/node-*.jsonl")
        return sum(path.stat().st_size for pattern in patterns for path in (self.runs / run_id).glob(pattern))

    def step(self, run_id: str) -> int:
        """The last finished step of the newest attempt, from its own file."""
        files = sorted((self.runs / run_id).glob("attempts/*/metrics.jsonl"), key=lambda path: path.stat().st_mtime)
        if not files:
            return 0
        lines = files[-1].read_text().split("\n")[:-1]
        return int(json.loads(lines[-1])["step"]) if lines else 0

    def printed(self, run_id: str) -> list[str]:
        """What the workers of all attempts have printed so far, from their log files."""
        files = sorted((self.runs / run_id).glob("attempts/*/logs/*.log"))
        return [line for path in files for line in path.read_text().splitlines()]

    def wait_for_lines(self, run_id: str, lines: int = 1) -> None:
        """Wait until workers have printed this many lines."""
        until(lambda: len(self.printed(run_id)) >= lines, f"{lines} lines of {run_id}")

    def processes(self, run_id: str) -> list[psutil.Process]:
        """Every process of a run: controller, agents, workers and whatever they started."""
        processes = []
        mark = str(self.runs / run_id)
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if (
                    any(mark in word for word in process.cmdline())
                    or process.environ().get("SLURMTRAIN_RUN_DIR") == mark
                ):
                    processes.append(process)
        return [process for process in processes if process.pid != os.getpid()]

    def signal_all(self, run_id: str, number: signal.Signals) -> None:
        """Send a signal to every process of a run; for SIGKILL, repeat until none is left."""
        while processes := self.processes(run_id):
            for process in processes:
                with contextlib.suppress(psutil.Error):
                    process.send_signal(number)
            if number != signal.SIGKILL:
                return
            psutil.wait_procs(processes, timeout=PATIENCE_S)

    def end_all(self) -> None:
        """Kill whatever still runs here."""
        for run in self.runs.glob("*/plan.json"):
            self.signal_all(run.parent.name, signal.SIGKILL)


def seldom(condition: Callable[[], Any]) -> Callable[[], Any]:
    """A condition that is checked by a command: at most every few seconds, and false in between."""
    check_at = 0.0

    def check() -> Any:
        nonlocal check_at
        if time.monotonic() < check_at:
            return None
        answer = condition()
        check_at = time.monotonic() + SELDOM_S
        return answer

    return check


def until(condition: Callable[[], Any], description: str = "the condition", *, patience_s: float = PATIENCE_S) -> Any:
    """Wait for something to become true, and return it."""
    deadline = time.monotonic() + patience_s
    while (began := time.monotonic()) < deadline:
        if answer := condition():
            return answer
        time.sleep(max(0.01, REST * (time.monotonic() - began)))
    raise AssertionError(f"{description} did not come true in {patience_s:.0f} s")
