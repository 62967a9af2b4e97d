"""Showing a run on a tracking server while it trains: starting and ending the process that does it, on node 0.

The process is part of the adapter for the server, which nothing that runs inside a job imports: its name is all that is
known of it here. It prints the run's id on the server, and ranks start without that if it is too late.
"""

from __future__ import annotations

import contextlib
import json
import select
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

from slurmtrain.model.run.layout import SubmissionDir
from slurmtrain.runtime.checkpoint.writer_process import IGNORED
from slurmtrain.runtime.job.environment import environment_of_helper
from slurmtrain.system.process import block_signals

_PROCESS = "slurmtrain.tracking.to_mlflow.live.live_sender"
# How long the job may go on, once the ranks have ended, while what that has settled is sent.
_LAST_S = 5.0
_LAST_IN_GRACE_S = 1.0
# How long ranks that could start wait for the run's id on the server.
_BEGIN_S = 5.0
_POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class LiveOrders:
    """What to send where.

    ``uri``: of the server. ``directory``: of the run. ``plan``: the path of the plan of this submission. ``live``: send
    also points that may still be rolled back.
    """

    uri: str
    directory: str
    plan: str
    live: bool

    def to_line(self) -> bytes:
        """The line on standard input."""
        return json.dumps(asdict(self)).encode() + b"\n"

    @classmethod
    def from_line(cls, line: bytes) -> LiveOrders:
        """The orders in a line that :meth:`to_line` has made."""
        return cls(**json.loads(line))


class LiveMetrics:
    """The process that sends metrics."""

    def __init__(self, orders: LiveOrders) -> None:
        """Start it. Raises OSError."""
        # Like the agent, it ignores signals to all processes of the job: the last metrics come after them.
        with block_signals(IGNORED):
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", _PROCESS],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                bufsize=0,
                env=environment_of_helper(),
            )
        self._run: str | None = None
        self._wait_until: float | None = None
        with contextlib.suppress(BrokenPipeError):
            assert self._process.stdin is not None
            self._process.stdin.write(orders.to_line())
            self._process.stdin.flush()

    def wait_for_run(self, *, give_up: Callable[[], bool]) -> str | None:
        """The id of the run on the server; None if that is not known after a moment, in which ranks do not start.

        Args:
            give_up: Called repeatedly; True ends the wait.
        """
        assert self._process.stdout is not None
        if self._wait_until is None:
            self._wait_until = time.monotonic() + _BEGIN_S
        while self._run is None:
            left_s = self._wait_until - time.monotonic()
            if select.select([self._process.stdout], [], [], max(0.0, min(left_s, _POLL_S)))[0]:
                # An empty line: the server does not answer; no line: the process has ended.
                self._run = self._process.stdout.readline().decode().strip() or None
                if self._run is None:
                    break
            elif left_s <= 0 or give_up():
                break
        return self._run

    def end(self, *, in_grace: bool) -> None:
        """Let it send what is settled now, for a moment. ``in_grace``: the job is about to be ended."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_LAST_IN_GRACE_S if in_grace else _LAST_S)
        self._process.kill()
        self._process.wait()


def send_live(submission: SubmissionDir, uri: str, *, live: bool) -> LiveMetrics | None:
    """Show a run on its tracking server; None if it has none, or that fails.

    Args:
        submission: The submission that this node belongs to.
        uri: The server; empty: there is none.
        live: Send also points that may still be rolled back.
    """
    if not uri:
        return None
    try:
        return LiveMetrics(LiveOrders(uri, str(submission.run.path), str(submission.plan), live))
    except OSError as error:
        print(f"slurmtrain: metrics are not sent from this node: {error}", file=sys.stderr, flush=True)
        return None
