"""A run's history, from the files in its directory: for the agent, which has no registry."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

from slurmtrain.errors import RunUnreadable
from slurmtrain.model.run.events.agent import AgentStarted
from slurmtrain.model.run.events.base import AnyEvent
from slurmtrain.model.run.journal import events_of
from slurmtrain.model.run.layout import AttemptDir, RunDir
from slurmtrain.model.run.progress import Progress
from slurmtrain.model.run.run import Run
from slurmtrain.system.journal_files import JournalFile, journal_files, last_points, read_pieces
from slurmtrain.system.owned_files import Check, check_owned
from slurmtrain.system.process import Process

# Among ranks, only rank 0 journals what the state of a run depends on, and there may be thousands of others.
_OTHER_RANK = re.compile(r"attempts/[^/]+/rank-(?!0\.).*\.jsonl")
_TAIL_BYTES = 65_536


def read_run(run: RunDir) -> Run:
    """The run as its journals have it now, before the policy is asked. What cannot be read is skipped."""
    # Late, here and below: most agents end without having read a run.
    from slurmtrain.model.run.fold import RunBuilder

    builder, progress = RunBuilder(run.id), {}
    with contextlib.suppress(RunUnreadable):
        for file in journal_files(run, []):
            if file.metrics_of is not None:
                progress[file.metrics_of] = _last(Path(file.path))
            elif not _OTHER_RANK.fullmatch(file.name):
                with contextlib.suppress(RunUnreadable):
                    builder.add(_events(file))
    return builder.build(progress)


def read_run_of(run: RunDir, check: Check, most_bytes: int) -> Run:
    """A run of another account as its journals have it now.

    Args:
        run: Its directory.
        check: Who may own its files or write to them.
        most_bytes: What its journals may take; a run of one's own has no such limit.

    Raises:
        RunUnreadable: They take more, or are empty, or any of them cannot be read.
    """
    from slurmtrain.model.run.fold import RunBuilder

    files = [file for file in journal_files(run, check=check) if not _OTHER_RANK.fullmatch(file.name)]
    if sum(file.size for file in files if file.metrics_of is None) > most_bytes:
        raise RunUnreadable(f"its journals take more than {most_bytes} bytes")
    builder, progress = RunBuilder(run.id), {}
    for file in files:
        if file.metrics_of is not None:
            progress[file.metrics_of] = _last(Path(file.path), check)
        else:
            builder.add(_events(file, check))
    if not builder.events:
        raise RunUnreadable("there is no event in its journals")
    return builder.build(progress)


def read_events(path: Path, source: str) -> list[AnyEvent]:
    """The events of the journal at ``path``, called ``source``; empty if there is no such file yet."""
    with contextlib.suppress(OSError, RunUnreadable):
        return _events(JournalFile(source, str(path), path.stat().st_size))
    return []


def agent_of_node_0(attempt: AttemptDir) -> Process | None:
    """The agent of node 0 of an ``attempt``, once it has journaled that it is there."""
    path = attempt.node_journal(0)
    for event in read_events(path, path.name):
        if isinstance(event.payload, AgentStarted) and event.payload.process is not None:
            with contextlib.suppress(KeyError, TypeError, ValueError):
                return Process.from_dict(event.payload.process)
    return None


def last_step(attempt: AttemptDir) -> int | None:
    """The last step in an attempt's metrics; None if there are none."""
    return _last(attempt.metrics).last_step


def _events(file: JournalFile, check: Check = check_owned) -> list[AnyEvent]:
    return [event for piece in read_pieces(file, check=check) for event in events_of(piece.reading, file.name)[0]]


def _last(metrics: Path, check: Check = check_owned) -> Progress:
    """Progress according to the end of a metrics file, which may be long."""
    return Progress().advance(last_points(metrics, _TAIL_BYTES, check=check))
