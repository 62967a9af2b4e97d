"""Bringing the registry up to date: what journals say, which processes are still there, and what Slurm knows.

It starts and ends nothing.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from slurmtrain.model.run.layout import RunDir
from slurmtrain.model.run.run import Live, Run
from slurmtrain.ops.shared import local_jobs
from slurmtrain.ops.shared.workspace import Workspace

if TYPE_CHECKING:
    from slurmtrain.model.run.journal import Garbage
    from slurmtrain.registry.store import Listed


@dataclass(frozen=True, slots=True)
class Observed:
    """All runs as they are now known, oldest first.

    ``garbage``: lines of journals that were found to be no records. ``problems``: what could not be asked.
    """

    runs: dict[str, Listed]
    garbage: Sequence[tuple[str, Garbage]] = ()
    problems: Sequence[str] = ()


def observe(
    workspace: Workspace, only: Collection[str] | None = None, *, thorough: bool = False, ask_slurm: bool = True
) -> Observed:
    """Read what is new, and note which runs have ended without a word. ``only``: look at these runs alone.

    A run that has ended, and whose processes are gone, is passed over unless its directories have changed; ``thorough``
    looks at the size of each of its files too. Slurm is asked only if there is a run that it may know more of, and
    never with ``ask_slurm=False``.
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
    look = _Look(workspace)
    if open_runs:
        _read(look, open_runs, ask_slurm=ask_slurm)
    gone = set(known) - set(present)
    listed = workspace.store.listed() if open_runs else known
    runs = {run_id: _without_directory(one) if run_id in gone else one for run_id, one in listed.items()}
    runs.update({run_id: replace(runs[run_id], live=live) for run_id, live in look.live.items()})
    return Observed(runs, look.garbage, look.problems)


def _read(look: _Look, directories: Sequence[RunDir], *, ask_slurm: bool) -> None:
    """Ingest, then ingest again what has died since: a process may write its last word just before it is found dead."""
    look.ingest(look.with_news(directories), dead=False)
    here = look.of_executor(directories, "local")
    look.ingest([d for d, run in here.items() if local_jobs.adopt(look.workspace, d, run)], dead=False)
    dead = [directory for directory in here if local_jobs.is_dead(look.known(directory))]
    look.ingest(look.with_news(dead), dead=True)
    look.ingest([d for d in dead if local_jobs.note_gone(look.workspace, d, look.known(d))], dead=True)
    look.settle(dead)
    there = look.of_executor(directories, "slurm")
    if there:
        _read_slurm(look, there, ask_slurm=ask_slurm)


def _read_slurm(look: _Look, runs: Mapping[RunDir, Run], *, ask_slurm: bool) -> None:
    from slurmtrain.ops.shared.slurm_jobs import look_at_slurm

    if ask_slurm:
        seen = look_at_slurm(look.workspace, runs)
        look.live.update(seen.live)
        look.problems += seen.problems
        look.ingest(seen.changed, dead=False)
    # Its nodes may still write while Slurm ends the job: nothing is settled before Slurm, or all its nodes, said so.
    over = [d for d in runs if (run := look.known(d)).newest is not None and run.newest.settled]
    look.ingest(look.with_news(over), dead=True)
    look.settle(over)


class _Look:
    """The runs of one look, each loaded once, and what was found besides."""

    def __init__(self, workspace: Workspace) -> None:
        self.workspace = workspace
        self.garbage: list[tuple[str, Garbage]] = []
        self.live: dict[str, Live] = {}
        self.problems: list[str] = []
        self._runs: dict[str, Run | None] = {}

    def run(self, directory: RunDir) -> Run | None:
        if directory.id not in self._runs:
            self._runs[directory.id] = self.workspace.store.load(directory.id)
        return self._runs[directory.id]

    def known(self, directory: RunDir) -> Run:
        """A run that has been read."""
        run = self.run(directory)
        assert run is not None
        return run

    def of_executor(self, directories: Sequence[RunDir], executor: str) -> dict[RunDir, Run]:
        found = {directory: self.run(directory) for directory in directories}
        return {d: run for d, run in found.items() if run is not None and run.executor == executor}

    def with_news(self, directories: Sequence[RunDir]) -> list[RunDir]:
        from slurmtrain.registry.ingest import has_news

        return [directory for directory in directories if has_news(self.workspace.store, directory)]

    def ingest(self, directories: Sequence[RunDir], *, dead: bool) -> None:
        from slurmtrain.registry.ingest import ingest

        if not directories:
            return
        with self.workspace.store.begin() as writing:
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
            with self.workspace.store.begin() as writing:
                for run_id in quiet:
                    writing.settle(run_id, times[run_id])


def _without_directory(one: Listed) -> Listed:
    why = one.row["reason"] or one.state
    return replace(one, row={**one.row, "reason": f"its directory was deleted ({why})"})
