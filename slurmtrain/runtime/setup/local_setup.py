"""The spec's ``setup`` of a local run, which node 0's agent runs when it is the run's turn.

Under Slurm the batch script runs these lines, and agents inherit their changes. The agents of a local run are there
before: node 0's runs the same shell, keeps the resulting variables, limits and umask in memory (memfd_create(2)), and
says in the attempt's directory where the other agents find them: below /proc, where only the same user can read them. A
failure is said in that file, since node 0's agent soon ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from slurmtrain.errors import LaunchError, PathError
from slurmtrain.model.run.layout import AttemptDir, SubmissionDir
from slurmtrain.model.spec.plan import Plan
from slurmtrain.runtime.environment import variables
from slurmtrain.runtime.environment.file_limit import soft_limit_of_ranks, take_limits
from slurmtrain.runtime.environment.node import Node
from slurmtrain.runtime.job.run_reader import agent_of_node_0
from slurmtrain.runtime.setup.helpers import HELPERS
from slurmtrain.runtime.setup.script import local_script
from slurmtrain.system.files import describe_os_error, read_json, write_atomically, write_json

_POLL_S = 0.05


# What a shell sets for itself, and what is of that process alone.
_OF_SHELL = frozenset({"_", "SHLVL", "PWD", "OLDPWD", variables.HELPER})
# Where the other nodes find what has changed: open until this process ends.
_kept: list[int] = []


def run_setup(plan: Plan, attempt: AttemptDir, node: Node, stopped: Callable[[], bool]) -> None:
    """Run the lines of ``setup`` on node 0, and apply their exported variables, and their limits, on each node.

    A line that fails leaves the variable by which agents know that (:func:`~.script.take_setup_failure`).

    Args:
        plan: Whose setup it is.
        attempt: The attempt.
        node: This node.
        stopped: Whether to give up.

    Raises:
        LaunchError: The agent of node 0 has ended meanwhile.
        PathError: A file cannot be written or read.
    """
    change = _wait_for_node_0(attempt, stopped) if node.index else _run(plan, attempt, node, stopped)
    for name in change.get("removed", ()):
        os.environ.pop(name, None)
    os.environ.update(change.get("changed", {}))
    take_limits({int(number): (soft, hard) for number, (soft, hard) in change.get("limits", {}).items()})


def _run(plan: Plan, attempt: AttemptDir, node: Node, stopped: Callable[[], bool]) -> dict[str, Any]:
    """Run the lines; returns their changes, which the other agents find too. Empty once ``stopped``."""
    submission = attempt.run.submission(node.submission)
    try:
        write_atomically(submission.setup, local_script(plan, submission, node.job_id).encode(), private=True)
        before = dict(os.environ)
        handle = os.memfd_create("slurmtrain-setup")
        process = _start(submission, handle)
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


def _start(submission: SubmissionDir, handle: int) -> subprocess.Popen[bytes]:
    """Start the shell of setup, with the user's limit of open files, not an agent's."""
    soft = soft_limit_of_ranks()
    limit = "unlimited" if soft == resource.RLIM_INFINITY else str(soft)
    reporter = [sys.executable, "-m", "slurmtrain.runtime.setup.report", str(handle)]
    process = subprocess.Popen(
        ["bash", "-c", 'ulimit -Sn "$1"; exec bash "${@:2}"', "bash", limit, str(submission.setup), *reporter],
        env={**os.environ, variables.HELPER: "setup"},
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        pass_fds=(handle,),
    )
    HELPERS.add(process.pid)
    return process


def _wait_for_node_0(attempt: AttemptDir, stopped: Callable[[], bool]) -> dict[str, Any]:
    """What setup has changed, once node 0 says so; empty once ``stopped``. Raises LaunchError or PathError."""
    node_0 = None
    while not stopped():
        node_0 = node_0 or agent_of_node_0(attempt)
        # Looked at before its file, so that its last word counts.
        is_gone = node_0 is not None and node_0.alive() is False
        answer = read_json(attempt.setup, types={"place": "str", "failed": "str | None"})
        if answer is not None:
            # Also after a failure: what the lines before it have exported, this node tears down.
            with contextlib.suppress(OSError, ValueError):
                change: dict[str, Any] = json.loads(Path(answer["place"]).read_bytes())
                return change
            if answer.get("failed"):
                return {"changed": {variables.SETUP_FAILED: answer["failed"]}}
        if is_gone:
            raise LaunchError("the agent of node 0 has ended before 'setup' had run")
        time.sleep(_POLL_S)
    return {}
