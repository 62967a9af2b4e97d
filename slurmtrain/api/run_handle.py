"""A run as an object: what was known of it when it was last read, and what can be done with it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar, overload

from slurmtrain.api import Call, TimeLimit, calling, issue_warnings, our_errors
from slurmtrain.api.notebook import RunList, run_table
from slurmtrain.config import Config
from slurmtrain.errors import NotAvailable, RunNotFound, SlurmtrainError, UserError, WaitTimedOut
from slurmtrain.model.metrics.curves import Curve, Points
from slurmtrain.model.run.layout import RunDir
from slurmtrain.model.run.run import ENDED, Attempt, Checkpoint, Run
from slurmtrain.ops.logs import Choice, Line, read_logs
from slurmtrain.ops.shared.observe import Observed, check_readable, observe
from slurmtrain.ops.shared.views import RunRecord
from slurmtrain.ops.shared.workspace import Workspace

if TYPE_CHECKING:
    import pandas as pd

    from slurmtrain.model.query.folding import Objective
    from slurmtrain.ops.why import Explanation

T = TypeVar("T")

Overrides = Mapping[str, Any] | Sequence[str]
"""``{"params.lr": 0.1}``, or ``["params.lr=0.1"]`` as on the command line."""


class Fact(Generic[T]):
    """A field of a run, under the name that it has in JSON."""

    def __init__(self, doc: str) -> None:
        """``doc``: its text in ``help()``."""
        self.__doc__ = doc

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, run: None, owner: type) -> Self: ...
    @overload
    def __get__(self, run: RunHandle, owner: type) -> T: ...
    def __get__(self, run: RunHandle | None, owner: type) -> T | Self:
        if run is None:
            return self
        value: T = run._record[self._name]
        return value

    # Without this method, an assignment would put a value into the instance, where it hides the record's.
    def __set__(self, run: RunHandle, value: object) -> None:
        raise AttributeError(f"{self._name} of a run cannot be set")


@dataclass(frozen=True, slots=True)
class AttemptInfo:
    """One start of a run on nodes. Steps are counted as finished."""

    number: int
    """Counted from 1."""
    job_id: str | None
    """Its job; several attempts have the same one if Slurm requeued it."""
    restart: int
    """How often the job had been requeued before."""
    state: str
    """``pending``, ``running``, or how it ended: one of the states of runs."""
    cause: str | None
    """Why it ended, such as ``completed``, ``preempted`` or ``oom``; None until it ends."""
    reason: str
    """What is known about that, as a sentence; may be empty."""
    nodes: tuple[str, ...]
    """Its hosts, in the order of their ranks."""
    submitted_at: datetime | None
    started_at: datetime | None
    ended_at: datetime | None
    first_step: int | None
    """The step that it resumed from."""
    last_step: int | None
    """The last step that it finished."""
    lost_steps: int | None
    """How many of its steps were trained again afterwards; None: not known yet."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Where its time went, in seconds: ``queue``, ``train``, ``lost`` and others (docs/goodput.md)."""

    @classmethod
    def from_record(cls, attempt: Attempt) -> Self:
        """An ``attempt`` of the record of its run."""
        own = {"job_id": attempt.job_id or None, "nodes": tuple(attempt.nodes), "seconds": dict(attempt.spent)}
        return cls(**{**_values(cls, attempt), **own})


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """A checkpoint that is on disk."""

    step: int | None
    """None: its format does not say."""
    path: Path
    bytes: int
    saved_at: datetime | None
    complete: bool
    """Whether a run can resume from it."""
    verified: bool
    """Whether its files matched their manifest when they were last checked."""
    why: str
    """Why it was saved: ``interval``, ``steps``, ``asked``, ``stop``, ``end``; ``found``: by the user's script."""
    metrics: Mapping[str, float | None]
    """The newest values when it was saved."""
    attempt: int | None
    """The number of the attempt that saved it."""

    @classmethod
    def from_record(cls, checkpoint: Checkpoint, directory: RunDir) -> Self:
        """A ``checkpoint`` of the record of the run in this ``directory``."""
        own = {"path": directory.path / checkpoint.path, "metrics": dict(checkpoint.metrics)}
        return cls(**{**_values(cls, checkpoint), **own})


def moment(seconds: float | None) -> datetime | None:
    """A time given in ``seconds`` since 1970, in UTC; None if no calendar has it."""
    try:
        return None if seconds is None else datetime.fromtimestamp(seconds, UTC)
    except (ValueError, OverflowError, OSError):
        return None


def _values(cls: type[AttemptInfo | CheckpointInfo], record: Attempt | Checkpoint) -> dict[str, Any]:
    """What a record has of the fields of a class that shows it, with times as datetimes."""
    names = [each.name for each in fields(cls) if hasattr(record, each.name)]
    # Only its name tells a time from a length of time: both are floats in a record.
    return {name: moment(getattr(record, name)) if name.endswith("_at") else getattr(record, name) for name in names}


class RunHandle:
    """One run, as it was when it was last read; :meth:`refresh` and every method that changes it read it again.

    Get one from :class:`slurmtrain.Registry`. Methods raise :class:`slurmtrain.errors.SlurmtrainError`.
    """

    def __init__(self, config: Config, record: RunRecord) -> None:
        """``config``: where it is; ``record``: what is known of it."""
        self._config = config
        self._record = record
        self._details: Run | None = None

    def __repr__(self) -> str:
        steps = "" if self.step is None else f", step {self.step}" + f"/{self.total_steps}" * bool(self.total_steps)
        return f"<run {self.id} {self.name}: {self.state}{steps}>"

    def _repr_html_(self) -> str:
        return run_table(self._record)

    id = Fact[str]("Its id.")
    name = Fact[str]("Its name, which other runs may have too.")
    state = Fact[str](
        "``created``, ``pending``, ``running``, ``requeued``, ``completed``, ``failed``, ``cancelled`` or ``lost``.\n\n"
        "``unreadable``: its files cannot be read now."
    )

    @property
    def ended(self) -> bool:
        """Whether it is over; :meth:`resume` may start it again."""
        return self.state in ENDED

    reason = Fact[str]("Why it is in this state, as a sentence; may be empty.")
    executor = Fact[str | None]("``slurm`` or ``local``; None: not known yet.")
    job_id = Fact[str | None]("The job of the newest attempt.")
    attempt = Fact[int]("The number of the newest attempt; 0 before the first.")
    cause = Fact[str | None](
        "Why the newest attempt ended, such as ``completed``, ``preempted`` or ``oom``; None: it has not."
    )
    nodes = Fact[list[str]]("The hosts of the newest attempt, in the order of their ranks.")
    step = Fact[int | None]("How many steps are finished; None: not known.")
    total_steps = Fact[int | None]("How many it is to do in all; None: not known.")

    metrics_from = Fact[str | None]("``output``: step and metrics are guessed from its output; None: it reports them.")

    @property
    def latest(self) -> dict[str, float]:
        """The newest value of each metric; :meth:`metrics` has all of them."""
        return self._record.listed.metrics

    params = Fact[dict[str, Any]]("The spec's ``params`` in its newest attempt.")
    resources = Fact[dict[str, Any]]("The spec's ``resources`` in its newest attempt.")
    command = Fact[str | None]("The spec's ``command`` in its newest attempt.")
    sweep = Fact[str | None]("The id of its sweep; None for a single run.")
    tags = Fact[list[str]]("Its tags.")
    note = Fact[str]("Its note.")
    lost_steps = Fact[int | None]("How many steps were trained again after interruptions; None: not known yet.")
    goodput = Fact[float | None]("The share, 0 to 1, of its node time spent on training that was kept.")

    @property
    def submitted_at(self) -> datetime | None:
        """When it was submitted."""
        return moment(self._record.listed.row["submitted_at"])

    @property
    def started_at(self) -> datetime | None:
        """When it first started on nodes."""
        return moment(self._record.listed.row["started_at"])

    @property
    def ended_at(self) -> datetime | None:
        """When it ended."""
        return moment(self._record.listed.row["ended_at"])

    @property
    def directory(self) -> Path:
        """Its directory, with its checkpoints, logs and journals."""
        return self._record.directory.path

    @property
    def checkpoint(self) -> CheckpointInfo | None:
        """The newest checkpoint from which it can resume."""
        newest = self._record.listed.checkpoint
        return None if newest is None else CheckpointInfo.from_record(newest, self._record.directory)

    @property
    def measures(self) -> dict[str, Any]:
        """How fast it was and how much it needed, as ``show --json`` prints it (docs/measures.md); None: not known."""
        from slurmtrain.ops.shared.run_measures import measures_json

        return measures_json(self._record.directory, self._load())

    @property
    def attempts(self) -> list[AttemptInfo]:
        """All attempts, oldest first."""
        return [AttemptInfo.from_record(attempt) for attempt in self._load().attempts]

    @property
    def checkpoints(self) -> list[CheckpointInfo]:
        """All checkpoints on disk, by step; a script that saves by itself may have more."""
        return [CheckpointInfo.from_record(each, self._record.directory) for each in self._load().on_disk]

    def to_dict(self) -> dict[str, Any]:
        """All fields, as ``status --json`` prints them (docs/reference/json.md): a row of a table of runs."""
        return dict(self._record)

    def refresh(self) -> Self:
        """Read it again; returns itself.

        Raises:
            RunNotFound: Its directory was deleted.
        """
        with calling(self._config, again=True) as call:
            self._read(call)
        return self

    def curves(self, names: str | Sequence[str] | None = None, *, superseded: bool = False) -> dict[str, Curve]:
        """The points of its metrics, in columns, by metric: what :meth:`metrics` has, without pandas.

        ``curve.kept.steps`` and ``curve.kept.values`` are what an undisturbed run would have logged.

        Args:
            names: Metrics; None: all.
            superseded: Fill in ``curve.superseded`` too: what was trained again after a rollback.

        Raises:
            UserError: It has not logged one of these metrics.
            RunUnreadable: A file cannot be read.
        """
        from slurmtrain.history import read_history
        from slurmtrain.ops.plot import describe_unknown

        chosen = [names] if isinstance(names, str) else names
        with calling(self._config, again=True) as call:
            self._read(call)
            # Not _load(), which would open a second workspace.
            run = self._load_now(call.workspace)
            check_readable(run)
            history = read_history(run, self._record.directory, chosen, keep_superseded=superseded)
            call.notes += history.problems
        for name in chosen or ():
            # The metrics files decide, not the registry: they may have grown since it was read.
            if name not in history.curves:
                raise UserError(f"run {self.id}: {describe_unknown(name, list(run.metrics))}")
        return dict(history.curves)

    def metrics(self, names: str | Sequence[str] | None = None, *, superseded: bool = False) -> pd.DataFrame:
        """The points of its metrics, each a row.

        The columns are ``metric``, ``step``, ``attempt``, ``time``, ``value`` and ``superseded``. Steps that were
        trained again after a rollback are there once, with the value that counts.
        ``run.metrics().pivot(index="step", columns="metric", values="value")`` has a column for each metric.

        Args:
            names: Metrics; None: all.
            superseded: Also what was trained again, in rows whose ``superseded`` is true.

        Raises:
            NotAvailable: pandas is not installed.
            UserError: It has not logged one of these metrics.
            RunUnreadable: A file cannot be read.
        """
        return frame_of(self.curves(names, superseded=superseded))

    def logs(
        self,
        *,
        lines: int | None = None,
        rank: int | None = None,
        attempt: int | None = None,
        grep: str | None = None,
    ) -> list[Line]:
        """The output of its ranks, line by line: each with ``text``, ``origin`` and ``attempt``.

        Args:
            lines: Only this many, from the end of each log.
            rank: Only this rank.
            attempt: This attempt; None: the newest.
            grep: Only lines that match this regular expression.

        Raises:
            UserError: ``grep`` is no regular expression.
            RunNotFound: There is no such attempt or rank, or its files were deleted.
        """
        choice = _choice(lines, rank, attempt, grep)
        with calling(self._config, again=True) as call:
            return [_as_text(line) for line in read_logs(call.workspace, self.id, choice)]

    def follow_logs(
        self, *, lines: int | None = None, rank: int | None = None, grep: str | None = None
    ) -> Iterator[Line]:
        """The output of its ranks, as it comes, until it has ended: of the newest attempt, and of later ones.

        Args:
            lines: Begin with this many, from the end of each log; None: with all.
            rank: Only this rank.
            grep: Only lines that match this regular expression.

        Raises:
            UserError: ``grep`` is no regular expression.
            RunNotFound: There is no such rank, or its files were deleted.
        """
        return self._follow(_choice(lines, rank, None, grep))

    def why(self, attempt: int | None = None) -> Explanation:
        """Why it is in its state, as ``slurmtrain why`` says it.

        The result has a ``headline``, ``details``, ``advice`` and ``to_dict()``; printed, it is all of that.

        Args:
            attempt: Why this attempt ended as it did; None: the run as it is now.

        Raises:
            RunNotFound: There is no such attempt, or its directory was deleted.
        """
        from slurmtrain.ops.why import PATIENCE_S, explain

        with calling(self._config, again=True) as call:
            call.workspace.patience_s = PATIENCE_S
            observed = observe(call.workspace, [self.id])
            call.note_all(observed)
            self._take(call.workspace, observed)
            return explain(call.workspace, observed.runs, self.id, attempt)

    def wait(self, timeout: float | None = None) -> Self:
        """Wait until it has ended, restarting it when it is interrupted, as ``slurmtrain wait`` does; returns itself.

        How it ended is in :attr:`state`.

        Args:
            timeout: The longest wait, in seconds; None: as long as it takes.

        Raises:
            WaitTimedOut: It has not ended by then; it continues.
        """
        wait_for(self._config, [self], timeout)
        return self

    def cost(self) -> dict[str, Any]:
        """Its cost so far, and the part of its interruptions: ``cost`` of the JSON (docs/cost.md)."""
        from slurmtrain.ops.shared.run_costs import cost_of_run

        with calling(self._config, again=True) as call:
            return cost_of_run(call.workspace, self._load(), self._record.idleness)

    def cancel(self, *, force: bool = False) -> Self:
        """End it: let it save and exit, and kill what does not exit; returns itself.

        Args:
            force: Kill at once.

        Raises:
            SlurmtrainError: It could not be ended.
        """
        from slurmtrain.ops.cancel import cancel

        with calling(self._config) as call:
            run = cancel(call.workspace, [self.id], force=force)[self.id]
            if not run.ended:
                raise SlurmtrainError(f"run {self.id} is still {run.state}: {run.reason or 'it has not ended in time'}")
            self._read(call)
        return self

    def resume(
        self,
        overrides: Overrides = (),
        *,
        from_start: bool = False,
        step: int | None = None,
        code_of_now: bool = False,
    ) -> Self:
        """Start its next attempt, from its newest complete checkpoint; returns itself.

        Args:
            overrides: Keys of the spec to change in this attempt and later ones.
            from_start: Put its checkpoints aside, and begin again.
            step: Go on from the checkpoint of this step, and put later ones aside; None: from the newest.
            code_of_now: Execute the code as it is now, not as it was when the run was submitted.

        Raises:
            RunBusy: It has not ended.
            NoCheckpoint: It has none that it can continue from; if it never saved, it begins again.
            SlurmtrainError: An override is wrong, or the job could not be started.
        """
        from slurmtrain.ops.resume import resume

        with calling(self._config) as call:
            _, notes = resume(
                call.workspace,
                self.id,
                assignments(overrides),
                from_start=from_start,
                step=step,
                code_of_now=code_of_now,
            )
            call.notes += notes
            self._read(call)
        return self

    def tag(self, *tags: str) -> Self:
        """Add these ``tags``; returns itself. Raises UserError if a text cannot be a tag."""
        from slurmtrain.ops.marks import add_tag

        with calling(self._config) as call:
            for tag in tags:
                add_tag(call.workspace, [self.id], tag)
            self._read(call)
        return self

    def untag(self, *tags: str) -> Self:
        """Remove these ``tags``; returns itself. Raises UserError if it does not have one of them."""
        from slurmtrain.ops.marks import remove_tag

        with calling(self._config) as call:
            for tag in tags:
                remove_tag(call.workspace, [self.id], tag)
            self._read(call)
        return self

    def _follow(self, choice: Choice) -> Iterator[Line]:
        # No call: it would keep the process's umask private while the caller's own program runs between two lines.
        workspace = Workspace(self._config, looks_again=True, warn=lambda note: issue_warnings([note]))
        with our_errors():
            try:
                yield from map(_as_text, read_logs(workspace, self.id, choice, follow=True))
            # Python comes here too when the caller drops the iterator halfway: it closes the generator.
            finally:
                workspace.close()

    def _objective(self) -> Objective | None:
        """Its objective, as its search or its spec says; None if they do not."""
        from slurmtrain.ops.query.select import objectives_of

        with calling(self._config, again=True) as call:
            return objectives_of(call.workspace, {self.id: self.id}).get(self.id)

    def _load(self) -> Run:
        """It with its attempts and checkpoints, read when they are first asked for."""
        if self._details is None:
            with calling(self._config, again=True) as call:
                self._details = self._load_now(call.workspace)
        return self._details

    def _load_now(self, workspace: Workspace) -> Run:
        run = workspace.store.load(self.id)
        if run is None:
            raise RunNotFound(f"run {self.id} is gone: its directory was deleted")
        return run

    def _read(self, call: Call) -> None:
        observed = observe(call.workspace, [self.id])
        call.note_all(observed)
        self._take(call.workspace, observed)

    def _take(self, workspace: Workspace, observed: Observed) -> None:
        """Keep what was observed of it in place of what was known."""
        listed = observed.runs.fetch([self.id])
        if not listed:
            raise RunNotFound(f"run {self.id} is gone: its directory was deleted")
        # The attempts and checkpoints were of the old record; they are read again when somebody asks for them.
        self._record, self._details = RunRecord(workspace, listed[self.id]), None


def handles_of(config: Config, call: Call, run_ids: Sequence[str]) -> RunList:
    """These runs, as they are now.

    Args:
        config: Where they are.
        call: The call that returns them.
        run_ids: Their ids.
    """
    # Most were submitted a moment ago, by this very call: Slurm has hardly anything to add.
    observed = observe(call.workspace, run_ids, ask_slurm=False)
    call.note_all(observed)
    listed = observed.runs.fetch(run_ids)
    return RunList(RunHandle(config, RunRecord(call.workspace, each)) for each in listed.values())


def wait_for(config: Config, runs: Sequence[RunHandle], timeout: float | None) -> None:
    """Wait until these runs have ended, and read them again.

    Args:
        config: Where they are.
        runs: The runs.
        timeout: The longest wait, in seconds; None: as long as it takes.

    Raises:
        WaitTimedOut: Some have not ended by then.
    """
    from slurmtrain.ops.watch import wait

    if not runs:
        return
    limit = TimeLimit(timeout)
    with calling(config, again=True) as call:
        _, synced = wait(call.workspace, [run.id for run in runs], lambda _: None, limit)
        call.note_all(synced.observed)
        call.notes += [*synced.notes, *synced.problems]
        for run in runs:
            run._take(call.workspace, synced.observed)
    waiting = [run for run in runs if not run.ended]
    # Only the limit is an error: the wait also ends when a run could not be read for a while.
    if limit.is_over and waiting:
        listed = ", ".join(f"{run.id} ({run.state})" for run in waiting)
        raise WaitTimedOut(f"not ended after {timeout:g} s: {listed}; they continue, and you can wait for them again")


def assignments(overrides: Overrides) -> list[str]:
    """``overrides`` as the command line has them. Raises SpecError for values that no spec can hold."""
    from slurmtrain.specfile import write_assignments

    return write_assignments(overrides) if isinstance(overrides, Mapping) else list(overrides)


def _choice(lines: int | None, rank: int | None, attempt: int | None, grep: str | None) -> Choice:
    try:
        pattern = None if grep is None else re.compile(grep)
    except re.error as error:
        raise UserError(f"{grep!r} is not a regular expression: {error}") from error
    return Choice(rank=rank, attempt=attempt, newest=lines, pattern=pattern)


def _as_text(line: Line) -> Line:
    """A ``line`` whose bytes that are no text were replaced, so that it can be printed."""
    return replace(line, text=line.text.encode(errors="surrogateescape").decode(errors="replace"))


def frame_of(curves: Mapping[str, Curve]) -> pd.DataFrame:
    """A row for each point of these ``curves``: ``metric``, ``step``, ``attempt``, ``time``, ``value``, ``superseded``.

    Raises NotAvailable without pandas.
    """
    try:
        import numpy as np
        import pandas as pd
    except ImportError as error:
        raise NotAvailable(
            f"a DataFrame needs pandas ({error}): pip install 'slurmtrain[pandas]'; curves() has the same points "
            "without it"
        ) from error
    columns: list[tuple[str, Points, bool]] = []
    for name, curve in curves.items():
        columns += [(name, curve.kept, False), (name, curve.superseded, True)]
    lengths = [len(points) for _, points, _ in columns]

    def joined(field: str, kind: str) -> np.ndarray:
        # The empty array is for a run that has logged nothing: numpy refuses to join no arrays at all.
        return np.concatenate([np.empty(0, kind), *(np.asarray(getattr(points, field)) for _, points, _ in columns)])

    return pd.DataFrame(
        {
            # As objects: numpy's own text would take the room of the longest name in each of millions of rows.
            "metric": np.repeat(np.array([name for name, _, _ in columns], object), lengths),
            "step": joined("steps", "int64"),
            "attempt": joined("attempts", "int64"),
            "time": pd.to_datetime(joined("times", "float64"), unit="s", utc=True),
            "value": joined("values", "float64"),
            "superseded": np.repeat(np.array([superseded for _, _, superseded in columns], bool), lengths),
        }
    )
