"""Commands that an agent runs around its node's ranks: ``setup_node`` before, ``sidecars`` beside, ``teardown`` after.

A variable tells their processes from the ranks', even if they become daemons: they run on while ranks are restarted in
place, and end with the attempt.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from slurmtrain.errors import PathError
from slurmtrain.model.experiment.plan import REDACTED, Plan
from slurmtrain.model.experiment.spec import Spec
from slurmtrain.model.interruption.exit_report import ExitReport
from slurmtrain.model.run.events.agent_events import HelperFailed, NodeEnded
from slurmtrain.model.run.layout import AttemptDir, RunDir
from slurmtrain.model.urls import redact
from slurmtrain.runtime.checkpoint.writer_process import IGNORED
from slurmtrain.runtime.environment import variables
from slurmtrain.runtime.environment.node import Node
from slurmtrain.runtime.environment.process_limits import soft_limit_of_ranks, take_limits
from slurmtrain.runtime.environment.setup_script import (
    TEARDOWN_S,
    describe_failed_line,
    last_line,
    local_script,
    node_script,
)
from slurmtrain.runtime.job.run_reader import read_events, wait_for_node_0
from slurmtrain.system.child_process import HelperProcess
from slurmtrain.system.files import (
    FILE_MODE,
    describe_os_error,
    make_directory,
    read_json,
    write_atomically,
    write_json,
)
from slurmtrain.system.inherited import umask_of_ranks
from slurmtrain.system.interpreter import NOTICES, declared
from slurmtrain.system.journal import Journal

# How long a node is kept for messages about its run's end, at most; in a grace, the rest of it may be short.
_TOLD_S = 15.0
_TOLD_IN_GRACE_S = 5.0
# How long sidecars have to end by themselves.
_SIDECAR_S = 5.0
# How long teardown and sidecars may take if a stop comes while there are no ranks.
STOPPED_S = 5.0
# What teardown gets in any case, however little of the grace is left.
_LEAST_S = 1.0
# How long an agent may take until it has written something.
_BEGIN_S = 10.0
_POLL_S = 0.05
HELPERS: set[int] = set()
"""The processes that this agent has started for its node, and whose exit codes it wants."""
# What a shell sets for itself, and what is of that process alone.
_OF_SHELL = frozenset({"_", "SHLVL", "PWD", "OLDPWD", variables.HELPER})


class Teller:
    """Has people told about a run, by processes that the agent waits for only when the run is over."""

    def __init__(self, directory: RunDir, config: str) -> None:
        """``directory``: the run's. ``config``: the path of the file with the receivers; empty: there are none."""
        self._directory = directory
        self._config = config

    def begin(self) -> HelperProcess | None:
        """Start to send the messages that are due; None if there are no receivers, or the process cannot be started."""
        if not self._config:
            return None
        # A process of its own, as receivers may take long to answer. Nothing that runs inside a job imports it.
        module = next((point.value for point in declared(NOTICES) if point.name == "from_job"), "")
        orders = json.dumps({"directory": str(self._directory.path), "config": self._config}).encode() + b"\n"
        try:
            return HelperProcess(module, orders, variables.environment_of_helper(), IGNORED) if module else None
        except OSError as error:
            print(f"slurmtrain: notifications are not sent: {describe_os_error(error)}", file=sys.stderr, flush=True)
            return None

    def end(self, *, in_grace: bool) -> None:
        """Tell the end of the run. ``in_grace``: the job is about to be ended."""
        if (process := self.begin()) is not None:
            process.end(_TOLD_IN_GRACE_S if in_grace else _TOLD_S)


class NodeHelpers:
    """What one node has run around its ranks, in one attempt."""

    def __init__(self, spec: Spec, attempt: AttemptDir, node: int, journal: Journal) -> None:
        """``spec``: says what to run. ``attempt``, ``node``: whose logs it writes. ``journal``: this node's."""
        self._spec = spec
        self._attempt = attempt
        self._node = node
        self._journal = journal
        self._has_begun = False
        self._sidecars: dict[int, subprocess.Popen[bytes]] = {}
        self._is_to_tear_down = False

    def set_up(self, directory: Path, stopped: Callable[[], bool]) -> ExitReport | None:
        """Run the lines of ``setup_node``, and start the sidecars; returns a report if a line fails.

        What the lines export, the ranks of this node inherit. They are given up once ``stopped`` returns True.
        """
        if self._has_begun:
            return None  # an earlier stage of the attempt has done it
        self._has_begun = self._is_to_tear_down = True
        if self._spec.setup_node:
            problem, exported = self._run("setup_node", self._spec.setup_node, directory, stopped)
            if exported:
                # This process, and so its ranks, get these variables.
                before = shutil.which("python")
                for key in set(os.environ) - exported.keys() - _OF_SHELL:
                    del os.environ[key]
                os.environ.update({key: value for key, value in exported.items() if key not in _OF_SHELL})
                python = shutil.which("python")
                if python and python != before:
                    os.environ[variables.SETUP_PYTHON] = python
            if stopped():
                return None
            if problem:
                self._journal.write(HelperFailed(node=self._node, name="setup_node", why=problem))
                return ExitReport(cause="crash", reason=f"{problem}, on node {self._node}", failed_at=time.time())
        for number, line in enumerate(self._spec.sidecars):
            self._sidecars[number] = self._start(["bash", "-c", line], f"sidecar-{number}", directory)
        return None

    def look(self) -> None:
        """Journal sidecars that have ended by themselves. Call it now and then."""
        for number, process in list(self._sidecars.items()):
            if process.poll() is not None:
                del self._sidecars[number]
                output = last_line(self._attempt.helper_log(f"sidecar-{number}", self._node))
                why = f"sidecar {number} ({redact(self._spec.sidecars[number])}) ended with code {process.returncode}"
                why += f": {output}" if output else ""
                self._journal.write(HelperFailed(node=self._node, name=f"sidecar {number}", why=why))

    def expect_teardown(self) -> None:
        """Something of the attempt may be on this node from now on: whatever follows, its end is torn down."""
        self._is_to_tear_down = True

    def tear_down(self, directory: Path, until: float) -> bool:
        """End the sidecars, and run the lines of ``teardown`` in a ``directory``; returns whether there were any.

        Both end by a time of the monotonic clock. It is done once, and only if there may be something to tear down.
        """
        if not self._is_to_tear_down:
            return False
        self._is_to_tear_down = False
        self.look()
        began = time.monotonic()
        for process in self._sidecars.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
        patience = min(began + _SIDECAR_S, until)
        while time.monotonic() < patience and any(process.poll() is None for process in self._sidecars.values()):
            time.sleep(_POLL_S)
        for process in self._sidecars.values():
            _kill(process)
        end = max(min(until, began + TEARDOWN_S), time.monotonic() + _LEAST_S)
        if self._spec.teardown:
            problem, _ = self._run("teardown", self._spec.teardown, directory, lambda: time.monotonic() > end)
            if time.monotonic() > end:
                problem = f"'teardown' was ended after {time.monotonic() - began:.0f} s"
            if problem:
                self._journal.write(HelperFailed(node=self._node, name="teardown", why=problem))
        return bool(self._spec.teardown)

    def _run(
        self, name: str, lines: Sequence[str], directory: Path, stopped: Callable[[], bool]
    ) -> tuple[str, dict[str, str]]:
        """Run lines of shell; returns why they failed, and their exported variables. Killed once ``stopped``."""
        # Variables can be secrets, which are on no disk.
        with (
            os.fdopen(os.memfd_create("slurmtrain-report"), "rb") as report,
            tempfile.NamedTemporaryFile("w", encoding="utf-8") as script,
        ):
            script.write(node_script(lines))
            script.flush()
            command = ["bash", "-c", 'exec bash "$0" 3>&"$1"', script.name, str(report.fileno())]
            process = self._start(command, name, directory, pass_fds=(report.fileno(),))
            while process.poll() is None and not stopped():
                time.sleep(_POLL_S)
            _kill(process)
            report.seek(0)
            first, *entries = os.fsdecode(report.read()).split("\0")
        # Whoever was killed may have reported a part.
        pairs = (entry.partition("=") for entry in entries if entry and process.returncode >= 0)
        exported = {key: value for key, _, value in pairs}
        if process.returncode == 0:
            return "", exported
        # Its own answer is "CODE LINE".
        code, number = map(int, first.split()) if first else (process.returncode, 0)
        log = self._attempt.helper_log(name, self._node)
        return describe_failed_line(name, lines, (code, number), log), exported

    def _start(
        self, command: Sequence[str], name: str, directory: Path, pass_fds: Sequence[int] = ()
    ) -> subprocess.Popen[bytes]:
        own = {key: value for key, value in self._spec.env.items() if value != REDACTED}
        make_directory(self._attempt.logs, private=True)
        path = self._attempt.helper_log(name, self._node)
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, FILE_MODE), "wb") as log:
            process = subprocess.Popen(
                command,
                cwd=directory,
                env={**os.environ, **own, variables.HELPER: name},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                umask=umask_of_ranks(),
                pass_fds=tuple(pass_fds),
            )
        HELPERS.add(process.pid)
        return process


def wait_for_others(attempt: AttemptDir, nodes: int, stopped: Callable[[], bool]) -> None:
    """Wait until the agents of all nodes but node 0 have ended, within the time of a teardown.

    Args:
        attempt: The attempt.
        nodes: How many nodes it has.
        stopped: Whether it has to end soon.
    """
    began = time.monotonic()
    journals = [attempt.node_journal(node) for node in range(1, nodes)]
    while journals and time.monotonic() < began + (STOPPED_S if stopped() else TEARDOWN_S):
        is_late = time.monotonic() > began + _BEGIN_S
        journals = [
            path
            for path in journals
            if (path.exists() or not is_late)
            and not any(isinstance(event.payload, NodeEnded) for event in read_events(path))
        ]
        time.sleep(_POLL_S)


def _kill(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


# --- setup of a local run, in a shell of node 0's agent ---------------------------------------------------------------

# Under Slurm the batch script runs these lines, and agents inherit their changes. The agents of a local run are there
# before: node 0's runs the same shell, keeps the resulting variables, limits and umask in memory (memfd_create(2)), and
# says in the attempt's directory where the other agents find them: below /proc, where only the same user can read
# them. A failure is said in that file, since node 0's agent soon ends.

# Where the other nodes find what has changed: open until this process ends.
_kept: list[int] = []


def run_setup(plan: Plan, attempt: AttemptDir, node: Node, stopped: Callable[[], bool]) -> None:
    """Run the lines of ``setup`` on node 0, and apply their exported variables, and their limits, on each node.

    A line that fails leaves the variable by which agents know that (:func:`.setup_script.take_setup_failure`).

    Args:
        plan: Whose setup it is.
        attempt: The attempt.
        node: This node.
        stopped: Whether to give up.

    Raises:
        LaunchError: The agent of node 0 has ended meanwhile.
        PathError: A file cannot be written or read.
    """
    if node.index:
        change = wait_for_node_0(attempt, lambda: _read_changes(attempt), stopped, "'setup' had run") or {}
    else:
        change = _run_setup_lines(plan, attempt, node, stopped)
    for name in change.get("removed", ()):
        os.environ.pop(name, None)
    os.environ.update(change.get("changed", {}))
    take_limits({int(number): (soft, hard) for number, (soft, hard) in change.get("limits", {}).items()})


def _run_setup_lines(plan: Plan, attempt: AttemptDir, node: Node, stopped: Callable[[], bool]) -> dict[str, Any]:
    """Run the lines; returns their changes, which the other agents find too. Empty once ``stopped``."""
    submission = attempt.run.submission(node.submission)
    try:
        write_atomically(submission.setup, local_script(plan, submission, node.job_id).encode(), private=True)
        before = dict(os.environ)
        handle = os.memfd_create("slurmtrain-setup")
        # With the user's limit of open files, not an agent's.
        soft = soft_limit_of_ranks()
        limit = "unlimited" if soft == resource.RLIM_INFINITY else str(soft)
        reporter = [sys.executable, "-m", "slurmtrain.runtime.task", "report", str(handle)]
        process = subprocess.Popen(
            ["bash", "-c", 'ulimit -Sn "$1"; exec bash "${@:2}"', "bash", limit, str(submission.setup), *reporter],
            env={**os.environ, variables.HELPER: "setup"},
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            pass_fds=(handle,),
        )
        HELPERS.add(process.pid)
        while process.poll() is None and not stopped():
            time.sleep(_POLL_S)
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return {}
        report = Path(f"/proc/self/fd/{handle}").read_bytes()
        if process.returncode or not report:
            code = process.returncode if process.returncode >= 0 else 128 - process.returncode
            after = {**before, variables.SETUP_FAILED: f"{code} 0 {attempt.path}"}
            change = changes(before, after)
        else:
            change = json.loads(report)
            change = {**changes(before, change["environ"]), "limits": change["limits"]}
        os.ftruncate(handle, 0)
        os.pwrite(handle, json.dumps(change).encode(), 0)
        _kept.append(handle)
        failure = change["changed"].get(variables.SETUP_FAILED)
        write_json(attempt.setup, {"place": f"/proc/{os.getpid()}/fd/{handle}", "failed": failure})
    except OSError as error:
        raise PathError(f"'setup' cannot be run: {describe_os_error(error)}") from error
    return change


def changes(before: Mapping[str, str], after: Mapping[str, str]) -> dict[str, Any]:
    """How an environment differs from the one ``before``: what has ``changed``, and which variables are ``removed``.

    Args:
        before: An environment.
        after: What a shell has made of it.
    """
    changed = {name: value for name, value in after.items() if before.get(name) != value and name not in _OF_SHELL}
    return {"changed": changed, "removed": sorted(before.keys() - after.keys() - _OF_SHELL)}


def _read_changes(attempt: AttemptDir) -> dict[str, Any] | None:
    """What setup has changed on node 0; None as long as that does not say so. Raises PathError."""
    answer = read_json(attempt.setup, types={"place": "str", "failed": "str | None"})
    if answer is None:
        return None
    # Also after a failure: what the lines before it have exported, this node tears down.
    with contextlib.suppress(OSError, ValueError):
        change: dict[str, Any] = json.loads(Path(answer["place"]).read_bytes())
        return change
    return {"changed": {variables.SETUP_FAILED: answer["failed"]}} if answer.get("failed") else None
