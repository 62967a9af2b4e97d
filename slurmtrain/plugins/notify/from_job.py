"""The process that sends messages about a run for the agent of node 0, when ranks start and after its end.

Its orders are a line of JSON on standard input: the run's directory, and the configuration file that names receivers,
which is read here: no secret travels. It ends by itself, at the latest after a time that no receiver can extend.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from types import FrameType

from slurmtrain.config import read_receivers
from slurmtrain.errors import SlurmtrainError
from slurmtrain.model.interruption.policy import with_next_start
from slurmtrain.model.run.layout import RunDir, RunsRoot
from slurmtrain.model.run.outcome import final_state
from slurmtrain.model.run.run import ENDED, Run, replace
from slurmtrain.plugins.notify.delivery import OLDEST_S, Mailbox
from slurmtrain.plugins.notify.messages import notices_of
from slurmtrain.runtime.checkpoint.writer_process import begin_helper
from slurmtrain.runtime.job import run_reader

_LIMIT_S = 15


def _read_run(directory: RunDir) -> Run:
    run = with_next_start(run_reader.read_run(directory))
    if run.newest is None or run.state in ENDED:
        return run
    # Other nodes may not have journaled their ends yet, but node 0 has decided.
    attempt = directory.attempt(run.newest.job_id, run.newest.restart)
    state = final_state(run_reader.read_events(attempt.node_journal(0)))
    return run if state is None else replace(run, state=state, ended_at=time.time())


def notify(directory: Path, config: Path) -> list[str]:
    """Send the messages about a run that are due; returns the problems of receivers.

    Args:
        directory: The run's.
        config: The file that names them.

    Raises:
        SlurmtrainError, OSError: Something cannot be read or written.
    """
    run = _read_run(RunDir(directory))
    mailbox = Mailbox(read_receivers(config), RunsRoot(directory.parent).notices)
    # From now on, whatever this process cannot bring to somebody is for a later sync.
    mailbox.begin()
    failed: set[str] = set()
    fresh = [notice for notice in notices_of(run) if notice.at >= time.time() - OLDEST_S]
    mailbox.deliver(RunDir(directory), fresh, failed)
    return [problem for problem in mailbox.problems() if any(f"notify.{name} " in problem for name in failed)]


def follow_orders() -> None:
    """Follow the orders on standard input."""
    begin_helper()

    def give_up(_number: int, _frame: FrameType | None) -> None:
        os._exit(1)

    signal.signal(signal.SIGALRM, give_up)
    signal.alarm(_LIMIT_S)
    orders = json.loads(sys.stdin.buffer.readline() or b"{}")
    try:
        problems = notify(Path(orders["directory"]), Path(orders["config"]))
    except (SlurmtrainError, OSError, KeyError) as error:
        problems = [f"the notification failed: {error}"]
    for problem in problems:
        print(f"slurmtrain: {problem}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    follow_orders()
