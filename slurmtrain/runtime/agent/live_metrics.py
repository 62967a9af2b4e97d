"""Showing a run on a tracking server while it trains: starting and ending the process that does it, on node 0.

The process is part of the adapter for the server, which nothing that runs inside a job imports: its name is all that is
known of it here. It prints the run's id on the server, and ranks start without that if it is too late.
"""

from __future__ import annotations

import json
import select
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

from slurmtrain.model.run.layout import SubmissionDir
from slurmtrain.runtime.checkpoint.writer_process import IGNORED
from slurmtrain.runtime.environment.variables import environment_of_helper
from slurmtrain.system.child_process import HelperProcess

_PROCESS = "slurmtrain.tracking.to_mlflow.live_sender"
# How long the job may go on, once the ranks have ended, while what that has settled is sent.
_LAST_S = 5.0
_LAST_IN_GRACE_S = 1.0
# How long ranks that could start wait for the run's id on the server.
_BEGIN_S = 15.0
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
        self._process = HelperProcess(_PROCESS, orders.to_line(), environment_of_helper(), IGNORED, answers=True)
        self._run: str | None = None
        self._wait_until: float | None = None

    def wait_for_run(self, *, give_up: Callable[[], bool]) -> str | None:
        """The id of the run on the server; None if it is still unknown after a moment; ranks do not start meanwhile.

        Args:
            give_up: Called repeatedly; True ends the wait.
        """
        if self._wait_until is None:
            self._wait_until = time.monotonic() + _BEGIN_S
        while self._run is None:
            left_s = self._wait_until - time.monotonic()
            if select.select([self._process.answers], [], [], max(0.0, min(left_s, _POLL_S)))[0]:
                # An empty line: the server does not answer; no line: the process has ended.
                self._run = self._process.answers.readline().decode().strip() or None
                if self._run is None:
                    break
            elif left_s <= 0 or give_up():
                break
        return self._run

    def end(self, *, in_grace: bool) -> None:
        """Let it send what is settled now, for a moment. ``in_grace``: the job is about to be ended."""
        self._process.end(_LAST_IN_GRACE_S if in_grace else _LAST_S)


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
