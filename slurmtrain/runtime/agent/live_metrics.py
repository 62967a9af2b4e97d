"""Sending metrics to a tracking server while a run trains: starting and ending the process that does it, on node 0.

The process is part of the adapter for the server, which nothing that runs inside a job imports: its name is all that is
known of it here.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from slurmtrain.model.run.layout import RunDir
from slurmtrain.runtime.checkpoint.writer_process import IGNORED
from slurmtrain.runtime.job.environment import environment_of_helper
from slurmtrain.system.process import block_signals

_PROCESS = "slurmtrain.tracking.to_mlflow.live_sender"
# How long the job may go on, once the ranks have ended, while what that has settled is sent.
_LAST_S = 5.0
_LAST_IN_GRACE_S = 1.0


@dataclass(frozen=True, slots=True)
class LiveOrders:
    """What to send: of the run with this ``directory``. ``live``: also points that may still be rolled back."""

    directory: str
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
                [sys.executable, "-P", "-m", _PROCESS], stdin=subprocess.PIPE, env=environment_of_helper()
            )
        with contextlib.suppress(BrokenPipeError):
            assert self._process.stdin is not None
            self._process.stdin.write(orders.to_line())
            self._process.stdin.flush()

    def end(self, *, in_grace: bool) -> None:
        """Let it send what is settled now, for a moment. ``in_grace``: the job is about to be ended."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_LAST_IN_GRACE_S if in_grace else _LAST_S)
        self._process.kill()
        self._process.wait()


def send_live(run: RunDir, environ: Mapping[str, str], *, live: bool) -> LiveMetrics | None:
    """Send a run's metrics to its server; None if it has none that this node was told of.

    Args:
        run: The directory of the run.
        environ: The environment of the job.
        live: Send also points that may still be rolled back.
    """
    if not environ.get("MLFLOW_RUN_ID") or not environ.get("MLFLOW_TRACKING_URI", "").startswith("http"):
        return None
    try:
        return LiveMetrics(LiveOrders(str(run.path), live))
    except OSError as error:
        print(f"slurmtrain: metrics are not sent from this node: {error}", file=sys.stderr, flush=True)
        return None
