"""The runs of one root: finding, submitting, waiting for and reconciling them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from slurmtrain.api import calling, issue_warnings
from slurmtrain.api.notebook import RunComparison, RunList
from slurmtrain.api.run_handle import Overrides, RunHandle, assignments, handles_of, wait_for
from slurmtrain.config import load_config
from slurmtrain.errors import UserError
from slurmtrain.ops.query.select import Question, select_runs
from slurmtrain.ops.shared.find import find
from slurmtrain.ops.shared.observe import observe
from slurmtrain.ops.shared.views import RunRecord
from slurmtrain.system.inherited import current_directory

Texts = str | Sequence[str]
Source = str | os.PathLike[str] | Mapping[str, Any]
"""One text, or several."""


@dataclass(frozen=True, slots=True)
class SyncOutcome:
    """What :meth:`Registry.sync` did, by ids of runs. ``problems``: what could not be done, and is tried again."""

    started: tuple[str, ...]
    released: tuple[str, ...]
    cancelled: tuple[str, ...]
    mirrored: tuple[str, ...]
    problems: tuple[str, ...]


class Registry:
    """The runs of one directory, as the commands of slurmtrain find them.

    Nothing is printed: what fails raises a :class:`slurmtrain.errors.SlurmtrainError`, what should be known is a
    :class:`slurmtrain.errors.SlurmtrainWarning`. Threads may use it at the same time. Slurm is asked at most every
    ``slurm_interval`` by methods that only look.
    """

    def __init__(self, runs: str | os.PathLike[str] | None = None) -> None:
        """Find the runs.

        Args:
            runs: The directory of all runs, as ``--runs``; None: what ``SLURMTRAIN_RUNS`` or the nearest
                ``slurmtrain.yaml`` says, else ``runs`` in the current directory.

        Raises:
            SpecError: The configuration has mistakes.
            PathError: It cannot be read, or be trusted.
        """
        # Read once: a program that changes its directory or its environment later goes on with the same runs.
        directory = None if runs is None else os.fspath(runs)
        self._config = load_config(cwd=current_directory(), environ=os.environ, runs=directory)
        issue_warnings(self._config.notes)

    def __repr__(self) -> str:
        return f"<registry of {self.path}>"

    @property
    def path(self) -> Path:
        """The directory of all runs."""
        return self._config.runs

    def runs(
        self,
        *names: str,
        where: Texts = (),
        state: Texts = (),
        cause: Texts = (),
        since: str | date | None = None,
        tag: Texts = (),
        sweep: str | None = None,
        node: str | None = None,
        sort: Texts | None = None,
        limit: int | None = None,
    ) -> RunList:
        """The runs that all of this holds for, oldest first; docs/queries.md explains conditions.

        Archived and deleted runs are left out unless a condition asks for ``archived`` or ``deleted_at``.

        Args:
            names: Names, for the newest submission of each, one run or all of its sweep; ids, patterns such as
                ``cnn-*``, or ids of sweeps; none: all runs. ``where="name = cnn"`` finds all runs of a name.
            where: Conditions such as ``params.lr < 0.1 and state = completed``.
            state: It is in one of these states.
            cause: Its newest attempt ended for one of these causes.
            since: It was submitted then or later: ``2w``, ``2026-11-22``, or a date or datetime.
            tag: It has all of these tags.
            sweep: The beginning of the id of its sweep.
            node: Its newest attempt is or was on a node that this pattern matches.
            sort: Fields, such as ``-metrics.acc``; a minus: descending.
            limit: At most this many, the first in this order.

        Raises:
            RunNotFound: A name refers to no run.
            QueryError: A condition, or the order, means nothing.
        """
        question = Question(
            names=names,
            where=_tuple_of(where),
            states=_tuple_of(state),
            causes=_tuple_of(cause),
            since=since.isoformat() if isinstance(since, date) else since,
            tags=_tuple_of(tag),
            sweep=sweep,
            node=node,
            sort=None if sort is None else ",".join(_tuple_of(sort)),
            limit=limit,
            for_programs=True,
        )
        with calling(self._config, again=True) as call:
            observed = observe(call.workspace)
            call.note_all(observed)
            selection = select_runs(call.workspace, observed.runs, question)
            call.notes += selection.notes
            records = [record for record in selection.runs if isinstance(record, RunRecord)]
        return RunList(RunHandle(self._config, record) for record in records)

    def compare(
        self, *names: str, where: Texts = (), metrics: Texts = (), by: str | None = None, over: Texts = ()
    ) -> RunComparison:
        """Runs side by side, as ``slurmtrain compare`` shows them: what differs in their settings, and their metrics.

        Args:
            names: Names, ids, patterns, or ids of sweeps; none: all runs.
            where: Conditions, as for :meth:`runs`.
            metrics: The metrics to compare; none: up to three whose names show what is better.
            by: The metric to sort by; None: the first of them whose name shows what is better.
            over: Settings that may differ between repetitions of a run, such as ``params.fold``.

        Raises:
            RunNotFound: A name refers to no run.
            QueryError: A condition means nothing, or no run has such a metric.
            UserError: There are fewer than two runs.
        """
        from slurmtrain.ops.query.compare import put_side_by_side

        question = Question(
            names=names, namesakes=len(names) == 1, where=_tuple_of(where), over=_tuple_of(over), for_programs=True
        )
        with calling(self._config, again=True) as call:
            observed = observe(call.workspace)
            call.note_all(observed)
            answer = put_side_by_side(call.workspace, observed.runs, question, _tuple_of(metrics), by)
            call.notes += answer.notes
        return RunComparison(answer)

    def run(self, name: str) -> RunHandle:
        """The run of this ``name``: its id, the beginning of its id, its name, or ``@last``.

        A name means its newest submission; if that is a sweep, the newest run of it that trains, that has not ended or
        that has, in this order, and a warning says so.

        Raises:
            RunNotFound: There is none, or it is not clear which is meant.
        """
        with calling(self._config, again=True) as call:
            [run_id], observed = find(call.workspace, [name])
            call.note_all(observed)
            record = RunRecord(call.workspace, observed.runs[run_id])
        return RunHandle(self._config, record)

    def submit(
        self,
        spec: Source | Sequence[Source],
        overrides: Overrides = (),
        *,
        sweep: Mapping[str, Any] | Sequence[str] = (),
        after: str | RunHandle | Sequence[str | RunHandle] = (),
        from_: str | RunHandle | None = None,
        weights_only: bool = False,
        executor: str | None = None,
        key: str | None = None,
    ) -> RunList:
        """Submit the runs of a spec: one, or all of a sweep, in its order.

        Args:
            spec: A YAML file, or its contents as data; then it has a ``name``. With several, the runs of each start
                after the specs that its ``after`` names.
            overrides: Keys of the spec to change, such as ``{"params.lr": 0.1}``.
            sweep: Keys to vary, such as ``{"params.lr": [0.03, 0.1]}``: a run for each value. The other keys of the
                section ``sweep``, such as ``zip``, are possible here too.
            after: Runs that must have completed first, also names and ``afterany:NAME``, in addition to the spec's.
            from_: Another run, whose newest checkpoint the runs begin with, or ``RUN:STEP`` or ``RUN:best``.
            weights_only: Take only the weights of that checkpoint, and begin at step 0.
            executor: ``slurm`` or ``local``; None: as configured, else slurm if sbatch is found.
            key: An idempotency key: if something was submitted with it before, those runs are returned.

        Raises:
            SpecError: The spec has mistakes; all of them are named.
            NoCheckpoint: The run to begin from has no such checkpoint.
            SubmitFailed: Something failed after runs were created; ``error.run_ids`` names them.
            SlurmtrainError: Nothing was submitted.
        """
        from slurmtrain.ops.submit import load_all, merge_specs, submit_specs
        from slurmtrain.ops.submit.chained_runs import start_overrides
        from slurmtrain.ops.submit.entrances import find_recent

        with calling(self._config) as call:
            sources = [spec] if isinstance(spec, str | os.PathLike | Mapping) else spec
            keys = assignments(overrides)
            if from_ is not None:
                keys += start_overrides(from_ if isinstance(from_, str) else from_.id, weights_only=weights_only)
            elif weights_only:
                raise UserError("weights_only needs from_: the run to take the weights from")
            others = [after] if isinstance(after, str | RunHandle) else after
            # All specs are read before anything is created, so that a mistake in the last one leaves nothing behind.
            loaded = load_all(
                [each if isinstance(each, Mapping) else Path(os.fspath(each)) for each in sources],
                keys,
                assignments(sweep),
                [each.id if isinstance(each, RunHandle) else each for each in others],
                max_runs=call.workspace.config.sweep_max_runs,
            )
            # The command line asks a person here; a program gets its runs, and a warning.
            if key is None and (recent := find_recent(call.workspace, merge_specs(loaded))) is not None:
                call.notes.append(f"{recent}; key=... keeps a repeated call from submitting twice")
            chosen = self._config.choose_executor(executor)
            submitted = submit_specs(call.workspace, loaded, executor=chosen, key=key)
            call.notes += submitted.notes
            return handles_of(self._config, call, submitted.run_ids)

    def rerun(
        self, name: str, overrides: Overrides = (), *, executor: str | None = None, code_of_now: bool = False
    ) -> RunList:
        """Submit a run, or all runs of a sweep, again, as ``slurmtrain rerun`` does; returns the new runs.

        Args:
            name: The run, as for :meth:`run`, or the id of a sweep.
            overrides: Keys of the spec to change, such as ``{"seed": 8}``.
            executor: ``slurm`` or ``local``; None: as the old runs.
            code_of_now: Execute the code as it is now, not as it was when they were submitted.

        Raises:
            RunNotFound: There is no such run.
            SubmitFailed: Something failed after runs were created; ``error.run_ids`` names them.
            SlurmtrainError: Nothing was submitted.
        """
        from slurmtrain.ops.rerun import rerun

        with calling(self._config) as call:
            submitted = rerun(call.workspace, name, assignments(overrides), executor=executor, code_of_now=code_of_now)
            call.notes += submitted.notes
            return handles_of(self._config, call, submitted.run_ids)

    def wait(self, runs: Sequence[RunHandle], timeout: float | None = None) -> RunList:
        """Wait until all these runs have ended, restarting interrupted ones, and return them.

        Args:
            runs: The runs.
            timeout: The longest wait, in seconds; None: as long as it takes.

        Raises:
            WaitTimedOut: Some have not ended by then; they continue.
        """
        wait_for(self._config, runs, timeout)
        return RunList(runs)

    def sync(self) -> SyncOutcome:
        """Do what ``slurmtrain sync`` does: complete what was left undone, restart runs, send what is new to trackers.

        Raises:
            SlurmtrainError: The runs cannot be read.
        """
        from slurmtrain.ops.sync import sync

        # Not again=True: what is restarted must not depend on an answer of Slurm's that is left from other commands.
        with calling(self._config) as call:
            synced = sync(call.workspace)
            call.note_all(synced.observed)
            call.notes += synced.notes
            return SyncOutcome(
                tuple(synced.started),
                tuple(synced.released),
                tuple(synced.cancelled),
                tuple(synced.mirrored),
                tuple(synced.problems),
            )


def _tuple_of(texts: Texts) -> tuple[str, ...]:
    return (texts,) if isinstance(texts, str) else tuple(texts)
