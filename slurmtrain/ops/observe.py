"""Bringing the registry up to date: what journals say, and which processes are still there.

It starts and ends nothing.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from slurmtrain.errors import CheckpointError
from slurmtrain.model.layout import AttemptDir, RunDir
from slurmtrain.model.state import Attempt, Run
from slurmtrain.ops.workspace import Workspace
from slurmtrain.system.files import locked
from slurmtrain.system.process import Process

if TYPE_CHECKING:
    from slurmtrain.model.journal import Garbage
    from slurmtrain.registry.store import Listed


@dataclass(frozen=True, slots=True)
class Observed:
    """All runs as they are now known, oldest first, and lines of journals that were found to be no records."""

    runs: dict[str, Listed]
    garbage: Sequence[tuple[str, Garbage]] = ()


def observe(workspace: Workspace, only: Collection[str] | None = None, *, thorough: bool = False) -> Observed:
    """Read what is new, and note which runs have ended without a word. ``only``: look at these runs alone.

    A run that has ended, and whose processes are gone, is passed over unless its directories have changed; ``thorough``
    looks at the size of each of its files too.
    """
    from slurmtrain.registry.ingest import directory_times, has_news

    present = workspace.run_ids()
    if not present and not workspace.config.registry.exists():
        return Observed({})
    known = workspace.store.listed()
    wanted = [run_id for run_id in present if only is None or run_id in only]
    open_runs = [
        workspace.root.run(run_id)
        for run_id in wanted
        if run_id not in known
        or not known[run_id].settled
        or known[run_id].scanned != directory_times(workspace.root.run(run_id))
        or (thorough and has_news(workspace.store, workspace.root.run(run_id)))
    ]
    garbage = _read(workspace, open_runs) if open_runs else []
    gone = set(known) - set(present)
    listed = workspace.store.listed() if open_runs else known
    return Observed(
        {run_id: _without_directory(one) if run_id in gone else one for run_id, one in listed.items()}, garbage
    )


def alive(run: Run) -> bool | None:
    """Whether any process of the newest attempt runs; None if that cannot be told from this machine."""
    if run.newest is None:
        return False
    said = [Process.from_plain(process).alive() for process in run.newest.processes]
    return True if any(said) else (None if None in said else False)


def _read(workspace: Workspace, directories: Sequence[RunDir]) -> list[tuple[str, Garbage]]:
    """Ingest, then ingest again what has died since: a process may write its last word just before it is found dead."""
    from slurmtrain.registry.ingest import has_news

    look = _Look(workspace)
    look.ingest([directory for directory in directories if has_news(workspace.store, directory)], dead=False)
    look.ingest(
        [directory for directory in directories if _adopt(workspace, directory, look.run(directory))], dead=False
    )
    dead = [directory for directory in directories if _is_dead(look.run(directory))]
    look.ingest([directory for directory in dead if has_news(workspace.store, directory)], dead=True)
    silent = [directory for directory in dead if _note_gone(workspace, directory, look.run(directory))]
    look.ingest(silent, dead=True)
    look.settle(dead)
    return look.garbage


class _Look:
    """The runs of one look, each loaded once."""

    def __init__(self, workspace: Workspace) -> None:
        self._workspace = workspace
        self._runs: dict[str, Run | None] = {}
        self.garbage: list[tuple[str, Garbage]] = []

    def run(self, directory: RunDir) -> Run | None:
        if directory.id not in self._runs:
            self._runs[directory.id] = self._workspace.store.load(directory.id)
        return self._runs[directory.id]

    def ingest(self, directories: Sequence[RunDir], *, dead: bool) -> None:
        from slurmtrain.registry.ingest import ingest

        if not directories:
            return
        with self._workspace.store.begin() as writing:
            for directory in directories:
                ingested = ingest(writing, directory, dead=dead)
                self._runs[directory.id] = ingested.run
                self.garbage += [(directory.id, bad) for bad in ingested.garbage]

    def settle(self, dead: Sequence[RunDir]) -> None:
        """Note which runs need no further look: ended, processes gone, directories unchanged for a while."""
        from slurmtrain.registry.ingest import directory_times, is_quiet

        now = time.time_ns()
        over = [directory for directory in dead if (run := self.run(directory)) is not None and run.ended]
        times = {directory.id: directory_times(directory) for directory in over}
        quiet = [run_id for run_id, at in times.items() if is_quiet(at, now)]
        if quiet:
            with self._workspace.store.begin() as writing:
                for run_id in quiet:
                    writing.settle(run_id, times[run_id])


def _is_dead(run: Run | None) -> bool:
    return run is not None and run.newest is not None and run.newest.handed_over and alive(run) is False


def _adopt(workspace: Workspace, directory: RunDir, run: Run | None) -> bool:
    """Finish the bookkeeping of a submission that was killed while it handed its job over."""
    if run is None or run.newest is None or run.newest.handed_over or run.newest.ended:
        return False
    from slurmtrain.local.launch import find

    attempt = run.newest
    if attempt.submitted_from not in (None, socket.gethostname()):
        return False  # its processes are to be looked for on that machine
    with contextlib.ExitStack() as stack:
        if not stack.enter_context(locked(directory.lock, wait=False)):
            return False  # the submission is still at it
        process, starting = find(directory.attempt(attempt.job_id, attempt.restart))
        if process is None and starting:
            return False
        journal = stack.enter_context(workspace.journal(directory, "adopt"))
        named = {"job_id": attempt.job_id, "restart": attempt.restart}
        if process is not None:
            journal.write("submitted", **named, process=process.plain(), adopted=True)
        elif not _has_agents(directory.attempt(attempt.job_id, attempt.restart)):
            journal.write("unstarted", **named, reason="its submission was killed before the job began")
    return True


def _has_agents(attempt: AttemptDir) -> bool:
    return any(attempt.path.glob("node-*.jsonl"))


def _note_gone(workspace: Workspace, directory: RunDir, run: Run | None) -> bool:
    """Journal that an attempt's processes are gone, if it did not say itself that it ended."""
    if run is None or run.newest is None or run.newest.ended:
        return False
    attempt = run.newest
    place = directory.attempt(attempt.job_id, attempt.restart)
    with contextlib.suppress(OSError), workspace.journal(directory, "observe") as journal:
        journal.write(
            "observed",
            job_id=attempt.job_id,
            restart=attempt.restart,
            state="gone",
            reason=_why_gone(attempt, place),
            last_seen=_last_seen(place, attempt),
            checkpoints=_checkpoints(directory),
        )
    return True


def _why_gone(attempt: Attempt, place: AttemptDir) -> str:
    if attempt.hosts:
        return "its processes are gone without a last word: killed, or the machine went down"
    with contextlib.suppress(OSError):
        lines = place.controller_log.read_text(errors="replace").strip().splitlines()
        if lines:
            return f"its job ended before it began: {lines[-1]}"
    return "its job ended before it began"


def _last_seen(place: AttemptDir, attempt: Attempt) -> float:
    """When the attempt last wrote anything, in seconds since 1970."""
    times = [attempt.started_at or attempt.submitted_at or 0.0]
    for path in place.path.rglob("*"):
        with contextlib.suppress(OSError):
            times.append(path.stat().st_mtime)
    return min(max(times), time.time())


def _checkpoints(directory: RunDir) -> list[dict[str, object]]:
    """What was published, perhaps without a journal's line, since the kill came in between."""
    from slurmtrain.runtime.checkpointfiles import published, read_manifest

    found = []
    for path in published(directory.checkpoints):
        with contextlib.suppress(CheckpointError):
            found.append(read_manifest(path).describe(path))
    return found


def _without_directory(one: Listed) -> Listed:
    why = one.row["reason"] or one.state
    return replace(one, row={**one.row, "reason": f"its directory was deleted ({why})"})
