"""Bringing the registry up to date: what journals say, which processes are alive, and what Slurm knows.

It starts and ends nothing. It reads every run that is not settled, that is: ended, with all processes dead and its
directories unchanged for two seconds. A settled run is read again only if the modification time of one of its
directories changes or, with ``thorough``, the size of a file; where there are thousands of settled runs, most commands
look only at the ones that ended last. ``gone`` is journaled only after the journals were read once more after the
processes were found dead, because a process may write its end event just before it exits.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

from slurmtrain.errors import RegistryDamaged, RegistryUnusable, RunUnreadable
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.system.journal_files import folder_times, is_quiet

if TYPE_CHECKING:
    from pathlib import Path

    from slurmtrain.model.query.conditions import Condition
    from slurmtrain.model.query.measures import Measure
    from slurmtrain.model.run.journal_lines import Garbage
    from slurmtrain.model.run.layout import RunDir
    from slurmtrain.model.run.run import Live, Run
    from slurmtrain.registry.ingest import ShowRuns
    from slurmtrain.registry.queries import IndexRow
    from slurmtrain.registry.rows import Listed
    from slurmtrain.registry.store import Store
    from slurmtrain.registry.transaction import Transaction

# Each command looks at the directories of so many settled runs, the ones that ended last; where there are more, one
# command in so many seconds looks at the others' directories.
_FEW = 1000
_CHECK_EVERY_S = 600.0
# The size of each of their files, which takes a minute on a shared file system, is looked at less often.
_CHECK_FILES_EVERY_S = 3600.0


class ListedRuns(Mapping[str, "Listed"]):
    """All runs by id, oldest first. The state of a run is read on first use.

    Most commands use a few of thousands of runs: :meth:`fetch` reads only these. ``index`` has the fields for choosing
    among all of them, :meth:`named` and :meth:`worth_listing` choose without it.
    """

    def __init__(
        self,
        store: Store | None,
        complete: Callable[[Mapping[str, Listed]], Mapping[str, Listed]] = lambda rows: rows,
        ids: Collection[str] | None = None,
    ) -> None:
        """The runs that a registry knows.

        Args:
            store: The registry; None: there are no runs.
            complete: Adds to rows what the registry does not store.
            ids: All ids, if they are known already.
        """
        self._store = store
        self._complete = complete
        self._ids = ids
        self._rows: dict[str, Listed] = {}

    @cached_property
    def index(self) -> Mapping[str, IndexRow]:
        """What choosing among all runs needs, by id, oldest first."""
        return {} if self._store is None else self._store.index()

    def index_of(self, run_ids: Collection[str]) -> Mapping[str, IndexRow]:
        """What choosing among these runs needs, without unknown ones."""
        if self._store is None or "index" in vars(self):
            return {run_id: self.index[run_id] for run_id in run_ids if run_id in self.index}
        return self._store.index(run_ids)

    def named(self, names: Collection[str]) -> Mapping[str, IndexRow]:
        """The runs that have one of these ids, names or sweeps, or an id that begins so, and the newest of all."""
        from slurmtrain.registry import queries

        return {} if self._store is None else self._store.ask(lambda db: queries.named(db, names))

    def worth_listing(self, newest: int, *, folds: bool = False) -> list[str]:
        """The ids of the runs that have not ended and of the ``newest`` that are not put away, oldest first.

        ``folds``: a sweep counts as one of the newest, and its newest run stands for it.
        """
        if self._store is None:
            return []
        # Imported here: it imports SQLAlchemy.
        from slurmtrain.registry import queries

        return self._store.ask(lambda db: queries.worth_listing(db, newest, folds=folds))

    def ended_since(self, at: float) -> list[str]:
        """The ids of the runs that have ended since ``at``, in seconds since 1970."""
        from slurmtrain.registry import queries

        return [] if self._store is None else self._store.ask(lambda db: queries.ended_since(db, at))

    def state_counts(self) -> dict[str, int]:
        """How many runs there are in each state."""
        from slurmtrain.registry import queries

        return {} if self._store is None else self._store.ask(queries.state_counts)

    def candidates(self, conditions: Sequence[Condition], *, put_away: bool) -> list[str]:
        """The ids of the runs that may meet all conditions, oldest first.

        Args:
            conditions: The conditions.
            put_away: Whether archived and deleted runs that have ended are among them.
        """
        from slurmtrain.registry import narrowing

        if self._store is None:
            return []
        return self._store.ask(lambda db: narrowing.candidates(db, conditions, put_away=put_away))

    def behind(self) -> list[str]:
        """The ids of the runs that trackers may have only in part, oldest first."""
        from slurmtrain.registry import queries

        return [] if self._store is None else self._store.ask(queries.behind)

    def best_candidates(self, measure: Measure, *, larger: bool, limit: int) -> tuple[list[str], int]:
        """The ids of the runs with the best values of a measure, and how many runs have none.

        Args:
            measure: A measure that the registry has.
            larger: Whether larger values are better.
            limit: How many runs, at most.
        """
        from slurmtrain.registry import narrowing

        if self._store is None:
            return [], 0
        return self._store.ask(lambda db: narrowing.best_candidates(db, measure, larger=larger, limit=limit))

    def fetch(self, run_ids: Iterable[str]) -> dict[str, Listed]:
        """These runs in this order, without unknown ones."""
        ids = list(run_ids)
        missing = [run_id for run_id in ids if run_id not in self._rows]
        if missing and self._store is not None:
            self._rows.update(
                self._complete(
                    self._store.listed(None if len(missing) > _FEW and len(missing) == len(self) else missing)
                )
            )
        return {run_id: self._rows[run_id] for run_id in ids if run_id in self._rows}

    def __getitem__(self, run_id: str) -> Listed:
        if run_id not in self._rows:
            # Who has iterated over all runs is about to use all of them.
            self.fetch(self.index if "index" in vars(self) else [run_id])
        return self._rows[run_id]

    def __iter__(self) -> Iterator[str]:
        return iter(self.index)

    def __len__(self) -> int:
        if self._ids is None:
            self._ids = () if self._store is None else self._store.ids()
        return len(self._ids)

    def __contains__(self, run_id: object) -> bool:
        return run_id in self._rows or run_id in self.index


@dataclass(frozen=True, slots=True)
class Observed:
    """All runs as known now.

    ``garbage``: journal lines that are not records, or only in part. ``problems``: failed queries. ``unreadable``: why
    runs cannot be read, by id, for the runs that were looked at.
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
        # A command that only looks leaves nothing behind.
        return Observed(ListedRuns(None))
    census = _take_census(workspace, only, thorough=thorough)
    garbage: list[tuple[str, Garbage]] = []
    if len(census.new) > _FEW:
        # As for a new registry: in one transaction, without what a look at each run needs.
        from slurmtrain.registry import queries
        from slurmtrain.registry.ingest import ingest_all

        new = census.new

        def ingest_new(transaction: Transaction) -> list[tuple[str, Garbage]]:
            # Another command may have read some since.
            unread = sorted(new - transaction.ask(lambda db: queries.offsets(db, new)).keys())
            return ingest_all(transaction, [workspace.root.run(run_id) for run_id in unread])

        garbage = workspace.store.write(ingest_new)
        census = _take_census(workspace, only, thorough=thorough)
    gone = _remove_gone(workspace, census, only or (), ask_slurm=ask_slurm)
    look = _Look(workspace, census.rows)
    if suspects := _suspects(workspace, census, thorough=thorough):
        _read_suspects(look, suspects, ask_slurm=ask_slurm)

    def complete(listed: Mapping[str, Listed]) -> Mapping[str, Listed]:
        directories = census.present if only is None else workspace.present(listed)
        return {
            run_id: _complete(row, look.live.get(run_id), look.unnoted.get(run_id), run_id in directories)
            for run_id, row in listed.items()
        }

    runs = ListedRuns(workspace.store, complete, None if only is not None or census.absent else census.present)
    if census.is_whole and not (gone or look.has_written):
        # It was read for the census, and nothing has changed since.
        runs.index = census.rows
    if only is not None:
        runs.fetch(only)
    return Observed(runs, [*garbage, *look.garbage], look.problems, look.unreadable)


def observe_run(workspace: Workspace, run_id: str, *, ask_slurm: bool) -> Run:
    """Observe one known run, and return it with its attempts.

    Args:
        workspace: Where the run is.
        run_id: Its id.
        ask_slurm: Ask Slurm, if it may know more about the run.

    Raises:
        RunUnreadable: Its journals cannot be read, or it was deleted meanwhile.
    """
    observe(workspace, [run_id], ask_slurm=ask_slurm)
    run = workspace.store.load(run_id)
    if run is None:
        raise RunUnreadable(f"run {run_id} no longer exists")
    check_readable(run)
    return run


def check_readable(run: Run) -> None:
    """Raise RunUnreadable if nothing may be done with a run, since its journals cannot be read."""
    if run.unreadable:
        raise RunUnreadable(f"run {run.id} is unreadable: {run.reason}; fix that, and try again")


def _complete(listed: Listed, live: Live | None, unnoted: str | None, has_directory: bool) -> Listed:
    """A run, completed with what the registry does not store. ``unnoted``: why its end could not be journaled."""
    if unnoted is not None:
        return replace(listed, row={**listed.row, "reason": unnoted})
    if not has_directory:
        reason = f"its directory was deleted ({listed.reason or listed.state})"
        return replace(listed, row={**listed.row, "reason": reason})
    return listed if live is None else replace(listed, live=live)


@dataclass(frozen=True, slots=True)
class _Census:
    """The runs that an observation is about.

    ``rows``: runs known to the registry that may have changed, or are absent. ``present``: runs with a directory,
    ``absent``: known runs without one, ``new``: unknown ones with one. ``is_whole``: whether ``rows`` has all known
    runs.
    """

    rows: Mapping[str, IndexRow]
    present: Set[str]
    absent: Set[str]
    new: Set[str]
    is_whole: bool = False


def _take_census(workspace: Workspace, only: Collection[str] | None, *, thorough: bool) -> _Census:
    """Compare the registry with the runs root; of many runs that have settled, choose some to look at.

    The registry is read first: a run that another command creates meanwhile is not taken for one that is gone.
    """
    store = workspace.store
    if only is not None:
        rows = store.index(only)
        present = workspace.present(only)
        return _Census(rows, present, rows.keys() - present, present - rows.keys())
    registered = store.ids()
    present = workspace.present()
    absent = registered - present
    # Sets of many runs take milliseconds to compare.
    new = present - registered if absent or len(registered) != len(present) else frozenset()
    if thorough or len(registered) <= _FEW or _is_check_due(workspace.root.settled_check, _CHECK_EVERY_S):
        return _Census(store.index(), present, absent, new, is_whole=True)
    from slurmtrain.registry import queries

    rows = {**store.index(absent), **store.ask(lambda db: queries.ended_last(db, _FEW)), **store.ask(queries.unsettled)}
    return _Census(rows, present, absent, new)


def is_file_check_due(workspace: Workspace) -> bool:
    """Whether to look at the files of all settled runs, as a ``thorough`` observation does: of thousands, rarely."""
    if not workspace.has_registry or len(workspace.store.ids()) <= _FEW:
        return True
    return _is_check_due(workspace.root.settled_files_check, _CHECK_FILES_EVERY_S)


def _is_check_due(mark: Path, every_s: float) -> bool:
    """Whether all runs that have settled are to be looked at again; notes in the file ``mark`` that it is done."""
    try:
        # abs(): a mark from before the clock was set back must not put the check off for long.
        if abs(time.time() - mark.stat().st_mtime) < every_s:
            return False
    except OSError:
        pass  # there is none yet
    with contextlib.suppress(OSError):
        # Noted before the look: if this command is killed, the look is left out once, which costs nothing but time.
        handle = os.open(mark, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        os.utime(handle)
        os.close(handle)
    return True


def _remove_gone(workspace: Workspace, census: _Census, only: Collection[str], *, ask_slurm: bool) -> list[str]:
    """Take runs whose directories were deleted out of the registry, unless they may have a job; returns them.

    Args:
        workspace: Where the runs were.
        census: All runs.
        only: Runs that the command is at work on: if nothing of one runs, it has ended.
        ask_slurm: Ask Slurm whether there are jobs.
    """
    rows = census.rows
    gone = [run_id for run_id in census.absent if run_id in rows and rows[run_id].ended]
    open_runs = census.absent - set(gone)
    if open_runs:
        from slurmtrain.errors import SlurmDown
        from slurmtrain.ops.shared import local_jobs

        for run_id, run in workspace.store.load_all(open_runs).items():
            # What cannot be asked counts as running: its row is all that still names its job.
            may_run = True
            if run.executor != "slurm":
                may_run = local_jobs.alive(run) is None or bool(
                    local_jobs.processes_of(workspace.root.run(run_id), run)
                )
            elif ask_slurm:
                from slurmtrain.ops.shared.slurm_jobs import live_jobs

                # If Slurm does not answer, there may be a job.
                with contextlib.suppress(SlurmDown):
                    may_run = bool(live_jobs(workspace, run_id, run))
            if not may_run:
                gone.append(run_id)
    if gone:
        over, now = [run_id for run_id in gone if run_id in only and not rows[run_id].ended], time.time()

        def change(transaction: Transaction) -> None:
            transaction.remove([run_id for run_id in gone if run_id not in only])
            transaction.set_cancelled(over, now)

        workspace.store.write(change)
    return gone


def _suspects(workspace: Workspace, census: _Census, *, thorough: bool) -> list[RunDir]:
    """The runs that may have something new."""
    root, path = workspace.root, str(workspace.root.path)
    changed = set(census.new)
    unchanged: list[str] = []
    for run_id in sorted(census.rows.keys() & census.present):
        row = census.rows[run_id]
        if row.settled and folder_times(f"{path}/{run_id}") == row.scanned:
            unchanged.append(run_id)
        else:
            changed.add(run_id)
    suspects = [root.run(run_id) for run_id in sorted(changed)]
    return [*suspects, *workspace.store.unread([root.run(run_id) for run_id in unchanged])] if thorough else suspects


def _read_suspects(look: _Look, directories: Sequence[RunDir], *, ask_slurm: bool) -> None:
    """Ingest what is new, and look for the processes and jobs of runs that have not settled."""
    on_slurm: list[RunDir] = []
    # In batches, each forgotten afterwards: thousands of runs with their attempts take much memory.
    for first in range(0, len(directories), _FEW):
        batch = directories[first : first + _FEW]
        look.ingest(look.unread(batch), dead=False)
        if local := look.runs_of(batch, "local"):
            from slurmtrain.ops.shared import local_jobs

            look.ingest([d for d, run in local.items() if local_jobs.adopt(look.workspace, d, run)], dead=False)
            dead = [d for d, run in look.runs(local).items() if local_jobs.is_dead(run)]
            # Once more: a process may write its end event just before it is found dead.
            look.ingest(look.workspace.store.unread(dead), dead=True)
            silent = {d: run for d, run in look.runs(dead).items() if run.newest is not None and not run.newest.ended}
            gone = {d.id: local_jobs.note_gone(look.workspace, d, run) for d, run in silent.items()}
            look.unnoted.update({run_id: why for run_id, why in gone.items() if why})
            look.ingest([d for d in silent if not gone[d.id]], dead=True)
            look.settle(dead)
        runs = look.runs_of(batch, "slurm")
        _read_over(look, runs)
        # Of many runs, only the ones that Slurm may know more about stay in memory: it is asked once about all.
        on_slurm += [d for d, run in runs.items() if not run.attempts or not all(each.settled for each in run.attempts)]
        look.forget(batch, on_slurm)
    if on_slurm and ask_slurm:
        from slurmtrain.ops.shared.slurm_jobs import look_at_slurm

        runs = look.runs(on_slurm)
        answer = look_at_slurm(look.workspace, runs)
        look.live.update(answer.live)
        look.problems += answer.problems
        look.ingest(answer.changed, dead=False)
        _read_over(look, look.runs(runs))


def _read_over(look: _Look, runs: Mapping[RunDir, Run]) -> None:
    """Ingest runs once more that are over according to Slurm, or to all their nodes.

    Only then are they settled: nodes may still write while Slurm ends the job.
    """
    over = [d for d, run in runs.items() if run.newest is not None and run.newest.settled]
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
        self.unnoted: dict[str, str] = {}
        self.has_written = False
        self._runs: dict[str, Run] = {}

    def unread(self, directories: Sequence[RunDir]) -> list[RunDir]:
        """The runs among these that have not been read yet, or not to the end."""
        # One that could not be read may be readable now, although nothing has been added to it.
        read = {d for d in directories if d.id in self._index and not self._index[d.id].unreadable}
        unread = self.workspace.store.unread([d for d in directories if d in read])
        return [*(d for d in directories if d not in read), *unread]

    def runs(self, directories: Iterable[RunDir]) -> dict[RunDir, Run]:
        """The runs among these that are known and can be read, as last read."""
        by_id = {directory.id: directory for directory in directories}
        missing = [run_id for run_id in by_id if run_id not in self._runs]
        if missing:
            self._runs.update(self.workspace.store.load_all(missing))
        loaded = {run_id: self._runs[run_id] for run_id in by_id if run_id in self._runs}
        return {by_id[run_id]: run for run_id, run in loaded.items() if not run.unreadable}

    def forget(self, directories: Iterable[RunDir], except_for: Collection[RunDir]) -> None:
        """Keep these runs in memory no longer, ``except_for`` some."""
        kept = {directory.id for directory in except_for}
        for directory in directories:
            if directory.id not in kept:
                self._runs.pop(directory.id, None)

    def runs_of(self, directories: Iterable[RunDir], executor: str) -> dict[RunDir, Run]:
        return {directory: run for directory, run in self.runs(directories).items() if run.executor == executor}

    def ingest(self, directories: Sequence[RunDir], *, dead: bool) -> None:
        """Read what is new in these runs, in one transaction."""
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


def rebuild(workspace: Workspace, show: ShowRuns = lambda _done, _total: None) -> Observed:
    """Read everything again; other commands see the old registry until the new one is complete.

    A damaged file is renamed to ``registry.db.damaged``, and one that is not a registry to ``registry.db.old``. A
    schema on a server is emptied if it is a registry of another version or runs root.

    Args:
        workspace: Where the runs are.
        show: Called with the number of runs read, and the total.
    """
    from slurmtrain.registry.store import Store

    address = workspace.config.registry
    try:
        # Unlike the workspace's own, which goes on in memory: here that would be a failure.
        workspace.store = Store(address)
        workspace.store.check()
        garbage = _replace_all(workspace, show)
    except RegistryUnusable as error:
        from slurmtrain.registry.store import put_registry_aside

        kept = put_registry_aside(address, "damaged" if isinstance(error, RegistryDamaged) else "old")
        if kept is not None and workspace.note is not None:
            workspace.note(f"{address} could not be used ({error.__cause__ or error}): it was kept as {kept}")
        workspace.store = Store(address)
        garbage = _replace_all(workspace, show)
    return replace(observe(workspace), garbage=garbage)


def _replace_all(workspace: Workspace, show: ShowRuns) -> list[tuple[str, Garbage]]:
    """Replace what the registry holds; returns what could not be read, with the ids of the runs."""
    from slurmtrain.registry.ingest import ingest_all

    runs = [workspace.root.run(run_id) for run_id in workspace.run_ids()]
    # In one transaction: others see the old rows until it ends, and a kill leaves them.
    with workspace.store.begin() as transaction:
        transaction.clear()
        return ingest_all(transaction, runs, show)
