"""Bringing the registry up to date: what journals say, which processes are alive, and what Slurm knows.

It starts and ends nothing. It reads every run that is not settled, that is: ended, with all processes dead and its
directories unchanged for two seconds. A settled run is read again only if the modification time of one of its
directories changes or, with ``thorough``, the size of a file. ``gone`` is journaled only after the journals were read
once more after the processes were found dead, because a process may write its end event just before it exits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from slurmtrain.errors import RunUnreadable
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.system.journal_files import folder_times, is_quiet

if TYPE_CHECKING:
    from slurmtrain.model.run.journal import Garbage
    from slurmtrain.model.run.layout import RunDir
    from slurmtrain.model.run.run import Live, Run
    from slurmtrain.registry.store import IndexRow, Listed
    from slurmtrain.registry.transaction import Transaction


class ListedRuns(Mapping[str, "Listed"]):
    """All runs by id, oldest first. Their rows are read on first use, all in one statement.

    Most commands use a few of thousands of runs: :meth:`fetch` reads only those. ``index`` has what choosing among them
    needs.
    """

    def __init__(self, index: Mapping[str, IndexRow], read: Callable[[Collection[str] | None], Mapping[str, Listed]]):
        """``read`` returns the rows of the given runs, or of all."""
        self.index = index
        self._read = read
        self._rows: dict[str, Listed] = {}

    def fetch(self, run_ids: Iterable[str]) -> dict[str, Listed]:
        """These runs in this order, without unknown ones."""
        ids = [run_id for run_id in run_ids if run_id in self.index]
        missing = [run_id for run_id in ids if run_id not in self._rows]
        if missing:
            self._rows.update(self._read(missing if len(missing) < len(self.index) else None))
        return {run_id: self._rows[run_id] for run_id in ids if run_id in self._rows}

    def __getitem__(self, run_id: str) -> Listed:
        if run_id not in self._rows:
            self.fetch(self.index)
        return self._rows[run_id]

    def __iter__(self) -> Iterator[str]:
        return iter(self.index)

    def __len__(self) -> int:
        return len(self.index)

    def __contains__(self, run_id: object) -> bool:
        return run_id in self.index


@dataclass(frozen=True, slots=True)
class Observed:
    """All runs as known now.

    ``garbage``: journal lines that are not records, or only in part. ``problems``: what could not be asked.
    ``unreadable``: why runs cannot be read, by id, of those that were looked at.
    """

    runs: ListedRuns
    garbage: Sequence[tuple[str, Garbage]] = ()
    problems: Sequence[str] = ()
    unreadable: Mapping[str, str] = field(default_factory=dict)

    def warnings(self) -> Iterator[str]:
        """What a user should know about the observation; ``show --json`` has the unreadable lines of journals."""
        yield from self.problems
        yield from (f"run {run_id} is unreadable: {reason}" for run_id, reason in self.unreadable.items())
        counts: dict[tuple[str, str], list[int]] = {}
        for run_id, bad in self.garbage:
            counts.setdefault((run_id, bad.source), []).append(bad.offset)
        for (run_id, source), offsets in counts.items():
            lines = f"{len(offsets)} unreadable line(s) in {source}, first at byte {offsets[0]}"
            yield f"run {run_id}: {lines}; the rest was read"


def observe(
    workspace: Workspace, only: Collection[str] | None = None, *, thorough: bool = False, ask_slurm: bool = True
) -> Observed:
    """Read what is new, and journal which runs have ended without an end event.

    Args:
        workspace: Where the runs are.
        only: Look only at these runs; the others are listed as last known.
        thorough: For settled runs, check the size of each file too; otherwise they are skipped unless their directories
            have changed.
        ask_slurm: Ask Slurm, if it may know more about any run.
    """
    if not workspace.has_registry and not workspace.run_ids():
        return Observed(ListedRuns({}, lambda _: {}))
    index = workspace.store.index()
    # After the index, so that a run which another command creates meanwhile is not taken for one that is gone.
    present = workspace.run_ids()
    gone = _gone(workspace, index, index.keys() - set(present), only or (), ask_slurm=ask_slurm)
    look = _Look(workspace, index)
    suspects = _suspects(workspace, index, present if only is None else [r for r in present if r in only], thorough)
    if suspects:
        _read(look, suspects, ask_slurm=ask_slurm)
    if look.has_written or gone:
        index = workspace.store.index()
    directories = frozenset(present)

    def read(run_ids: Collection[str] | None) -> dict[str, Listed]:
        rows = workspace.store.listed(run_ids)
        return {run_id: _complete(row, look.live.get(run_id), run_id in directories) for run_id, row in rows.items()}

    runs = ListedRuns(index, read)
    if only is not None:
        runs.fetch(only)
    return Observed(runs, look.garbage, look.problems, look.unreadable)


def observe_run(workspace: Workspace, run_id: str, *, ask_slurm: bool) -> Run:
    """Observe one known run, and return it with its attempts.

    Args:
        workspace: Where the run is.
        run_id: Its id.
        ask_slurm: Ask Slurm, if it may know more about the run.

    Raises:
        RunUnreadable: Its journals cannot be read.
    """
    observe(workspace, [run_id], ask_slurm=ask_slurm)
    run = workspace.store.load(run_id)
    assert run is not None
    check_readable(run)
    return run


def check_readable(run: Run) -> None:
    """Raise RunUnreadable if nothing may be done with a run, since its journals cannot be read."""
    if run.unreadable:
        raise RunUnreadable(f"run {run.id} is unreadable: {run.reason}; put that right, and try again")


def _complete(listed: Listed, live: Live | None, has_directory: bool) -> Listed:
    """A run, completed with what the registry does not store."""
    if not has_directory:
        reason = f"its directory was deleted ({listed.reason or listed.state})"
        return replace(listed, row={**listed.row, "reason": reason})
    return listed if live is None else replace(listed, live=live)


def _gone(
    workspace: Workspace,
    index: Mapping[str, IndexRow],
    absent: Set[str],
    only: Collection[str],
    *,
    ask_slurm: bool,
) -> list[str]:
    """Take runs whose directories were deleted out of the registry, unless they may have a job; returns them.

    Args:
        workspace: Where the runs were.
        index: All runs.
        absent: Those without a directory.
        only: Runs that the command is at work on: if nothing of one runs, it has ended.
        ask_slurm: Ask Slurm whether there are jobs.
    """
    gone = [run_id for run_id in absent if index[run_id].ended]
    open_runs = set(absent) - set(gone)
    if open_runs:
        loaded = workspace.store.load_all(open_runs)
        gone += [run_id for run_id, run in loaded.items() if not _may_run(workspace, run, ask_slurm=ask_slurm)]
    if gone:
        over, now = [run_id for run_id in gone if run_id in only and not index[run_id].ended], time.time()

        def change(transaction: Transaction) -> None:
            transaction.remove([run_id for run_id in gone if run_id not in only])
            transaction.set_cancelled(over, now)

        workspace.store.write(change)
    return gone


def _may_run(workspace: Workspace, run: Run, *, ask_slurm: bool) -> bool:
    """Whether a run without a directory may have a process or a job; unknown: yes."""
    from slurmtrain.errors import SlurmDown
    from slurmtrain.ops.shared import local_jobs

    if run.executor != "slurm":
        return local_jobs.alive(run) is None or bool(local_jobs.processes_of(workspace.root.run(run.id), run))
    if not ask_slurm:
        return True
    from slurmtrain.ops.shared.slurm_jobs import live_jobs

    try:
        return bool(live_jobs(workspace, run.id, run))
    except SlurmDown:
        return True


def _suspects(
    workspace: Workspace, index: Mapping[str, IndexRow], run_ids: Sequence[str], thorough: bool
) -> list[RunDir]:
    """The runs that may have something new."""
    root, path = workspace.root, str(workspace.root.path)
    changed: list[str] = []
    unchanged: list[str] = []
    for run_id in run_ids:
        row = index.get(run_id)
        is_over = row is not None and row.settled and folder_times(f"{path}/{run_id}") == row.scanned
        (unchanged if is_over else changed).append(run_id)
    suspects = [root.run(run_id) for run_id in changed]
    return [*suspects, *workspace.store.unread([root.run(run_id) for run_id in unchanged])] if thorough else suspects


def _read(look: _Look, directories: Sequence[RunDir], *, ask_slurm: bool) -> None:
    """Ingest, then once more for runs found dead: a process may write its end event just before it is found dead."""
    from slurmtrain.ops.shared import local_jobs

    workspace = look.workspace
    look.ingest(look.unread(directories), dead=False)
    local = look.runs_of(directories, "local")
    look.ingest([d for d, run in local.items() if local_jobs.adopt(workspace, d, run)], dead=False)
    dead = [d for d, run in look.runs(local).items() if local_jobs.is_dead(run)]
    look.ingest(workspace.store.unread(dead), dead=True)
    look.ingest([d for d, run in look.runs(dead).items() if local_jobs.note_gone(workspace, d, run)], dead=True)
    look.settle(dead)
    on_slurm = look.runs_of(directories, "slurm")
    if on_slurm:
        _read_slurm(look, on_slurm, ask_slurm=ask_slurm)


def _read_slurm(look: _Look, runs: Mapping[RunDir, Run], *, ask_slurm: bool) -> None:
    from slurmtrain.ops.shared.slurm_jobs import look_at_slurm

    if ask_slurm:
        answer = look_at_slurm(look.workspace, runs)
        look.live.update(answer.live)
        look.problems += answer.problems
        look.ingest(answer.changed, dead=False)
    # Nodes may still write while Slurm ends the job: a run is settled only once Slurm, or all its nodes, said so.
    over = [d for d, run in look.runs(runs).items() if run.newest is not None and run.newest.settled]
    look.ingest(look.workspace.store.unread(over), dead=True)
    look.settle(over)


class _Look:
    """The runs of one observation, each loaded once, and what else was noticed."""

    def __init__(self, workspace: Workspace, index: Mapping[str, IndexRow]) -> None:
        self.workspace = workspace
        self._index = index
        self.garbage: list[tuple[str, Garbage]] = []
        self.live: dict[str, Live] = {}
        self.problems: list[str] = []
        self.unreadable: dict[str, str] = {}
        self.has_written = False
        self._runs: dict[str, Run] = {}

    def unread(self, directories: Sequence[RunDir]) -> list[RunDir]:
        """Those of these runs that have not been read yet, or not to the end."""
        # One that could not be read may be readable now, although nothing has been added to it.
        read = {d for d in directories if d.id in self._index and not self._index[d.id].unreadable}
        unread = self.workspace.store.unread([d for d in directories if d in read])
        return [*(d for d in directories if d not in read), *unread]

    def runs(self, directories: Iterable[RunDir]) -> dict[RunDir, Run]:
        """Those of these runs that are known and can be read, as last read."""
        by_id = {directory.id: directory for directory in directories}
        missing = [run_id for run_id in by_id if run_id not in self._runs]
        if missing:
            self._runs.update(self.workspace.store.load_all(missing))
        loaded = {run_id: self._runs[run_id] for run_id in by_id if run_id in self._runs}
        return {by_id[run_id]: run for run_id, run in loaded.items() if not run.unreadable}

    def runs_of(self, directories: Iterable[RunDir], executor: str) -> dict[RunDir, Run]:
        return {directory: run for directory, run in self.runs(directories).items() if run.executor == executor}

    def ingest(self, directories: Sequence[RunDir], *, dead: bool) -> None:
        """Read what is new in these runs, in one transaction: the registry gets all of it or nothing."""
        if not directories:
            return
        from slurmtrain.registry.ingest import ingest

        self.has_written = True
        ingested = self.workspace.store.write(lambda transaction: ingest(transaction, directories, dead=dead))
        self._runs.update(ingested.runs)
        self.garbage += ingested.garbage
        self.unreadable.update(ingested.unreadable)
        for run_id in ingested.unreadable:
            self._runs.pop(run_id, None)

    def settle(self, dead: Sequence[RunDir]) -> None:
        """Mark the runs that need not be read again: ended, processes gone, directories unchanged for a while."""
        now = time.time_ns()
        times = {d.id: folder_times(d.path) for d, run in self.runs(dead).items() if run.ended}
        quiet = {run_id: at for run_id, at in times.items() if at and is_quiet(at, now)}
        if quiet:
            self.has_written = True
            self.workspace.store.write(lambda transaction: transaction.settle(quiet))
