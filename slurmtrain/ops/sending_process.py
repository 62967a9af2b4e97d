"""The process that sends what is new to trackers while ``ui`` shows a page.

Its orders are a line of JSON on standard input, and its answers lines on standard output. It ends when its standard
input does, after the run that it is sending: whatever ends the command that has started it ends this process, too.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from slurmtrain.config import load_config
from slurmtrain.errors import SlurmtrainError
from slurmtrain.ops.shared.mirroring import MirrorOutcome, mirror_runs
from slurmtrain.ops.shared.observe import observe
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.system.child_process import HelperProcess
from slurmtrain.system.files import describe_os_error_at
from slurmtrain.system.inherited import current_directory

# How often a page that is open gets new points, in seconds.
EVERY_S = 15.0
_NICE = 10
# Of what it says, at a time.
_CHUNK = 1 << 16


@dataclass(frozen=True, slots=True)
class SendingStatus:
    """What the process says after each run.

    ``urgent_left``: how many of the runs that come first are still to be sent. ``sent`` of ``total`` runs were sent in
    this round; ``over``: it has ended. ``problems``: its problems so far.
    """

    urgent_left: int
    sent: int = 0
    total: int = 0
    over: bool = False
    problems: list[str] = field(default_factory=list)


class SendingProcess:
    """Sends what is new in all runs, again and again, as long as this process does not end it."""

    def __init__(self, workspace: Workspace, urgent: Sequence[str]) -> None:
        """Start it.

        Args:
            workspace: Where the runs are.
            urgent: The ids of runs that it sends before all others.
        """
        config = workspace.config
        orders = {"runs": str(config.shared_root or config.runs), "urgent": list(urgent)}
        # Ctrl-C is for the command that the user has typed, which ends this process then.
        blocked = (signal.SIGINT,)
        line = f"{json.dumps(orders)}\n".encode()
        self._process = HelperProcess("slurmtrain.ops.sending_process", line, os.environ, blocked, answers=True)
        self._unread = b""
        self.status = SendingStatus(len(urgent))
        """What it has said last."""
        self.ended = False
        """Whether it has ended by itself, which it never should."""

    def read(self) -> None:
        """Read what it has said meanwhile."""
        while not self.ended and select.select([self._process.answers], [], [], 0)[0]:
            chunk = os.read(self._process.answers.fileno(), _CHUNK)
            self.ended = not chunk
            *lines, self._unread = (self._unread + chunk).split(b"\n")
            if lines:
                self.status = SendingStatus(**json.loads(lines[-1]))

    def end(self) -> None:
        """End it. What it was sending then, the next command sends."""
        self._process.end(0)


def send_forever() -> None:
    """Execute the orders on standard input."""
    orders = json.loads(sys.stdin.buffer.readline())
    # MLflow, and plugins of it, may print something.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    urgent, nice = set(orders["urgent"]), _NICE

    def say(status: SendingStatus) -> None:
        nonlocal nice
        print(json.dumps(asdict(status)), file=answers, flush=True)
        if _wait(0):
            raise SystemExit
        if not status.urgent_left:
            # From now on, the page and its server come first.
            os.nice(nice)
            nice = 0

    def report(left: Sequence[str], total: int, so_far: MirrorOutcome) -> None:
        say(SendingStatus(len(urgent.intersection(left)), total - len(left), total, False, so_far.problems))

    pause_s = 0.0
    while not _wait(pause_s):
        outcome = MirrorOutcome()
        # A new workspace: the registry may have been rebuilt meanwhile.
        workspace = Workspace(load_config(cwd=current_directory(), environ=os.environ, runs=orders["runs"]))
        try:
            runs = observe(workspace, ask_slurm=False).runs
            outcome = mirror_runs(workspace, runs.fetch(runs.behind()), first=urgent, report=report)
        except (SlurmtrainError, OSError) as error:
            outcome.problems.append(describe_os_error_at(error) if isinstance(error, OSError) else str(error))
        finally:
            workspace.close()
        say(SendingStatus(0, len(outcome.mirrored), len(outcome.mirrored), True, [*outcome.problems, *outcome.notes]))
        # From the end: a slow store gets a pause, too.
        pause_s = EVERY_S


def _wait(seconds: float) -> bool:
    """Wait so long; returns whether the orders have ended."""
    return bool(select.select([sys.stdin.buffer], [], [], seconds)[0])


if __name__ == "__main__":
    # Whoever has started it may have been killed.
    with contextlib.suppress(BrokenPipeError):
        send_forever()
