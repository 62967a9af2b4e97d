"""Builds a run from all its events.

A :class:`RunBuilder` depends on the set of events, not on the order of reading, so reading journals in another order,
or again from the start, gives the same run. Its state can be stored as JSON, so that the next reading only adds new
events. It makes no decisions: :func:`slurmtrain.model.interruption.policy.with_next_start` decides who starts the
run again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from slurmtrain.model.experiment.kinds import remembering
from slurmtrain.model.run.accounting import Interval, accounted, goodput, timelines
from slurmtrain.model.run.attempt_facts import NEVER, AttemptFacts, Order, SaveLog, as_order, is_summarised
from slurmtrain.model.run.attempts import group_by_attempt, never_started, number_attempts, read_attempt
from slurmtrain.model.run.checkpoints import CheckpointHistory, concerns_checkpoints
from slurmtrain.model.run.events import agent_events, command_events, rank_events
from slurmtrain.model.run.events.base import AnyEvent, select
from slurmtrain.model.run.journal_lines import Progress, read_event
from slurmtrain.model.run.layout import attempt_of, split_attempt
from slurmtrain.model.run.outcome import began_at, describe_next_start, is_over, reason_given_up
from slurmtrain.model.run.run import APART, ENDED, Attempt, Checkpoint, Run, replace

Events = Callable[[], Iterable[AnyEvent]]
# Events that say how many steps there will be.
_WITH_TOTALS = rank_events.TrainingStarted | rank_events.ScriptProgressed


def fold(run_id: str, events: Iterable[AnyEvent], progress: Mapping[str, Progress]) -> Run:
    """The run ``run_id`` from its ``events``, in any order; ``progress`` is as for :meth:`RunBuilder.build`."""
    builder = RunBuilder(run_id)
    builder.add(events)
    return builder.build(progress)


class _History(NamedTuple):
    """What a run and its timelines are built from.

    ``events``: in order. ``facts``: about each attempt, by its key; ``started``: about attempts that have begun, which
    are the ``attempts``, in order. ``guesses``: of the output of attempts. ``reported``: the progress of the others.
    """

    events: Sequence[AnyEvent]
    facts: Mapping[str, AttemptFacts]
    guesses: Mapping[str, rank_events.OutputUnderstood]
    reported: Mapping[str, Progress]
    attempts: Sequence[Attempt]
    started: Mapping[str, AttemptFacts]
    checkpoints: Sequence[Checkpoint]


class RunBuilder:
    """Collects the events of a run, each once and in any order, and builds the run from them."""

    def __init__(self, run_id: str) -> None:
        self.run_id = run_id
        self._events: list[AnyEvent] = []
        self._saves: dict[str, SaveLog] = {}
        self._checkpoints = CheckpointHistory()
        # The history of checkpoints depends on the order of events: _followed is the last event applied to it,
        # _unfollowed are events still to apply, and _all_events is for replaying it if one of them comes earlier.
        self._followed: Order = NEVER
        self._unfollowed: list[AnyEvent] = []
        self._added: list[AnyEvent] = []
        self._all_events: Events = lambda: self._added

    @property
    def events(self) -> Sequence[AnyEvent]:
        """The events that are kept individually: all except events about saves."""
        return self._events

    def add(self, events: Iterable[AnyEvent]) -> None:
        """Add events that have not been added before."""
        for event in events:
            if concerns_checkpoints(event):
                self._unfollowed.append(event)
                self._added.append(event)
            if not is_summarised(event):
                # CheckpointHistory keeps the list of checkpoints.
                if isinstance(event.payload, command_events.JobObserved) and event.payload.checkpoints is not None:
                    event = dataclasses.replace(event, payload=dataclasses.replace(event.payload, checkpoints=None))
                self._events.append(event)
            elif folder := attempt_of(event.source):
                self._saves.setdefault(folder, SaveLog()).add(event)

    def build(self, progress: Mapping[str, Progress]) -> Run:
        """The run that all added events describe.

        ``progress``: of each attempt according to its metrics, by the name of its directory.
        """
        history = self._history(progress)
        events, facts, checkpoints = history.events, history.facts, history.checkpoints
        cancels = select(events, command_events.CancelRequested)
        created = next(iter(select(events, command_events.RunCreated)), None)
        origin = created.payload if created else command_events.RunCreated()
        attempts = _with_resources(
            accounted(history.attempts, history.started, history.reported, checkpoints), origin, events
        )
        newest = attempts[-1] if attempts else None
        # A metric that the newest attempt has not logged yet keeps its earlier value.
        logged = [progress[attempt.key].metrics for attempt in attempts if attempt.key in progress]
        mlflow = select(events, command_events.MlflowRunLinked)
        totals = [event.payload.total_steps for event in events if isinstance(event.payload, _WITH_TOTALS)]
        guess = _newest_guess(attempts, history.guesses, progress)
        unstarted = select(events, command_events.Unstarted)
        settings = _newest_settings(origin, events, attempts)
        # A row has at least one key, and the text.
        written = [row for row in settings.written or () if len(row) > 1]
        run = Run(
            id=self.run_id,
            name=origin.name or self.run_id,
            state="created",
            reason=unstarted[-1].payload.reason if unstarted else "",
            executor=origin.executor,
            plan_hash=origin.plan_hash,
            submitted_at=created.time if created else None,
            started_at=min((a.started_at for a in attempts if a.started_at is not None), default=None),
            ended_at=cancels[-1].time if cancels else None,
            step=next((a.last_step for a in reversed(attempts) if a.last_step is not None), guess.step),
            total_steps=totals[-1] if totals else guess.total,
            metrics={name: value for metrics in logged for name, value in metrics.items()},
            metrics_from="output" if guess.is_shown else None,
            lost_steps=_lost_steps(attempts),
            mlflow_run_id=mlflow[-1].payload.mlflow_run_id if mlflow else None,
            git=origin.git,
            attempts=attempts,
            checkpoints=checkpoints,
            # A cancel before the newest attempt began was about an earlier one: a person has resumed the run since.
            cancelled=any(each.time >= (began_at(newest) if newest else 0.0) for each in cancels),
            end_reason=cancels[-1].payload.reason or "" if cancels else "",
            save_problem=newest.save_problem if newest else "",
            goodput=goodput(attempts),
            job_over=_is_job_over(newest, facts),
            given_up=reason_given_up(facts.get(newest.key, AttemptFacts()).events) if newest else "",
            params=remembering(settings.params or {}, written),
            written=written,
            command=settings.command,
            resources=settings.resources or {},
            tracked=settings.tracked,
            sweep=origin.sweep,
            parents=origin.parents or (),
        )
        return with_state(_with_marks(run, events))

    def timelines(self, progress: Mapping[str, Progress]) -> dict[str, list[Interval]]:
        """When each attempt spent its time on what, by the name of its directory.

        ``progress``: as for :meth:`build`.
        """
        history = self._history(progress)
        return timelines(history.attempts, history.started, history.reported, history.checkpoints)

    def _history(self, progress: Mapping[str, Progress]) -> _History:
        # Before anything is read from the history of checkpoints: events may have come in any order.
        self._follow_checkpoints()
        events = sorted(self._events, key=lambda event: event.order)
        facts = group_by_attempt(events, self._saves)
        guesses = _understood_outputs(facts)
        # Guesses are shown, but no attempt is judged by them.
        reported = {key: each for key, each in progress.items() if key not in guesses}
        cancelled_at = [cancel.time for cancel in select(events, command_events.CancelRequested)]
        started = {key: group for key, group in facts.items() if not never_started(group)}
        alone = {
            key: read_attempt(key, group, reported.get(key, Progress()), cancelled_at) for key, group in started.items()
        }
        attempts = number_attempts(alone, started)
        return _History(events, facts, guesses, reported, attempts, started, self._checkpoints.checkpoints(attempts))

    def to_dict(self) -> dict[str, Any]:
        """The builder's state as JSON."""
        # Events that are not followed yet would be lost: only their effect is stored.
        self._follow_checkpoints()
        return {
            "events": [
                {"t": event.time, "kind": event.kind, "source": event.source, "offset": event.offset,
                 "record": event.payload.to_json()}
                for event in self._events
            ],
            "saves": {key: log.to_dict() for key, log in self._saves.items()},
            "checkpoints": self._checkpoints.to_dict(),
            "followed": self._followed,
        }  # fmt: skip

    @classmethod
    def from_dict(cls, run_id: str, record: Mapping[str, Any], all_events: Events) -> RunBuilder:
        """Read the result of :meth:`to_dict`.

        Args:
            run_id: The run.
            record: The stored state.
            all_events: Returns every event of the run, including events about to be added. It is called only if an
                event about a checkpoint comes before ones already applied: a file system may show writes late.
        """
        builder = cls(run_id)
        for each in record["events"]:
            line = {**each["record"], "t": each["t"], "kind": each["kind"]}
            event = read_event(line, each["source"], each["offset"])
            # An event that this version cannot read any more was only kept by an earlier one.
            if event is not None:
                builder._events.append(event)
        builder._saves = {key: SaveLog.from_dict(log) for key, log in record["saves"].items()}
        builder._checkpoints = CheckpointHistory.from_dict(record["checkpoints"])
        builder._followed = as_order(record["followed"])
        builder._all_events = all_events
        return builder

    def _follow_checkpoints(self) -> None:
        """Bring the history of checkpoints up to date; replay it if an event belongs before ones already applied."""
        events = sorted(self._unfollowed, key=lambda event: event.order)
        if not events:
            return
        # A file system may show a write late. What was applied since depends on it, so that all is applied again.
        if events[0].order <= self._followed:
            self._checkpoints = CheckpointHistory()
            events = sorted(filter(concerns_checkpoints, self._all_events()), key=lambda event: event.order)
        for event in events:
            self._checkpoints.apply(event)
        self._followed = events[-1].order
        self._unfollowed = []


def _understood_outputs(facts: Mapping[str, AttemptFacts]) -> dict[str, rank_events.OutputUnderstood]:
    """What is guessed last of the output of attempts that report no progress themselves, by their keys."""
    guesses = {key: select(each.events, rank_events.OutputUnderstood) for key, each in facts.items()}
    return {
        key: events[-1].payload
        for key, events in guesses.items()
        if events and not select(facts[key].events, rank_events.SessionStarted)
    }


class _Guess(NamedTuple):
    """Step and total that the newest attempt's output seems to say. ``is_shown``: what the run shows is guessed."""

    step: int | None = None
    total: int | None = None
    is_shown: bool = False


def _newest_guess(
    attempts: Sequence[Attempt],
    guesses: Mapping[str, rank_events.OutputUnderstood],
    progress: Mapping[str, Progress],
) -> _Guess:
    newest = next((each for each in reversed(attempts) if each.key in guesses or each.last_step is not None), None)
    if newest is None or newest.key not in guesses:
        return _Guess()
    guess = guesses[newest.key]
    # A number of lines is no step.
    step = None if guess.counted else progress.get(newest.key, Progress()).last_step
    return _Guess(step, guess.total_steps, is_shown=True)


def _lost_steps(attempts: Sequence[Attempt]) -> int | None:
    """The steps that all attempts have lost; None if no step is known, or how many one of them has lost is not."""
    trained = [each for each in attempts if each.last_step is not None]
    # A sum without an unknown number would look like a known one.
    if not trained or any(each.ended and each.lost_steps is None for each in trained):
        return None
    return sum(each.lost_steps or 0 for each in attempts)


def _newest_settings(
    origin: command_events.RunCreated, events: Sequence[AnyEvent], attempts: Sequence[Attempt]
) -> command_events.RunCreated | command_events.Submitting:
    """The event that says what the newest attempt runs: from the last submission that states it anew.

    A submission that started nothing changes nothing, and one that states nothing repeats the one before.
    """
    restated = {
        event.payload.submission: event.payload
        for event in select(events, command_events.Submitting)
        if event.payload.command is not None
    }
    numbers = (attempt.submission for attempt in reversed(attempts))
    return next((restated[number] for number in numbers if number in restated), origin)


def _with_resources(
    attempts: Sequence[Attempt], origin: command_events.RunCreated, events: Sequence[AnyEvent]
) -> list[Attempt]:
    """The attempts, in order, with the resources that each was given: a submission that states none repeats them."""
    submissions = (event.payload for event in select(events, command_events.Submitting))
    stated = {each.submission: each.resources for each in submissions if each.resources is not None}
    resources, result = origin.resources, []
    for attempt in attempts:
        resources = stated.get(attempt.submission, resources)
        result.append(replace(attempt, resources=resources))
    return result


def with_state(run: Run) -> Run:
    """The run with the state, reason and end that follow from its attempts; without attempts, ``reason`` says why."""
    newest = run.newest
    if newest is not None:
        state, reason = _state_after(run.attempts, run.cancelled)
        reason = run.end_reason if state == "cancelled" and run.end_reason else reason
        return replace(run, state=state, reason=reason, ended_at=newest.ended_at if state in ENDED else None)
    if run.cancelled:
        return replace(run, state="cancelled", reason=run.end_reason or "cancelled before it started")
    return replace(run, reason=run.reason or "not submitted to the scheduler yet", ended_at=None)


def _state_after(attempts: Sequence[Attempt], is_cancelled: bool) -> tuple[str, str]:
    """State and reason of the newest attempt, or ``requeued`` if it has ended and the run will start again."""
    newest, before = attempts[-1], next(reversed(attempts[:-1]), None)
    if newest.restarted_by is not None:
        if newest.restarted_by == "sync" and is_cancelled:
            return "cancelled", f"cancelled; before that, {newest.reason}"
        at = newest.again_at
        after = f", {at - (newest.ended_at or 0.0):.0f} s after it ended" if at is not None else ""
        problem = newest.requeue_problem
        return "requeued", describe_next_start(newest.reason, newest.excluded, newest.restarted_by, problem, after)
    if newest.state == "requeued" and before is not None and before.job_id == newest.job_id and before.cause:
        # The job is in the queue again: if its agent could not requeue it, Slurm did, but it excludes no nodes.
        problem = before.requeue_problem if before.excluded else ""
        return newest.state, describe_next_start(before.reason, before.excluded, "slurm", problem)
    # What is wrong with a training that exits with 0.
    return newest.state, newest.reason or str(newest.evidence.get(APART) or "")


def _with_marks(run: Run, events: Iterable[AnyEvent]) -> Run:
    """The run with what people have noted on it. ``events``: the oldest first."""
    tags: set[str] = set()
    noted: dict[str, Any] = {}
    frees = 0
    for event in events:
        payload = event.payload
        if isinstance(payload, command_events.TagsChanged):
            tags = (tags | set(payload.add)) - set(payload.remove)
        elif isinstance(payload, command_events.NoteWritten):
            noted["note"] = payload.text
        elif isinstance(payload, command_events.RunArchived):
            noted["archived"] = payload.archived
        elif isinstance(payload, command_events.DeletionRequested):
            # Until "deleted" follows, it is unknown what is gone.
            noted["deleted_at"], noted["freed"], frees = event.time, None, payload.bytes
        elif isinstance(payload, command_events.FilesDeleted):
            noted["freed"] = frees
    return replace(run, tags=sorted(tags), **noted)


def _is_job_over(newest: Attempt | None, facts: Mapping[str, AttemptFacts]) -> bool:
    """Whether the newest attempt's job ended for good, or never trains the run again.

    A command may have ended a later start of it that never began, and the agents of one may have found the run closed.
    """
    if newest is None:
        return False
    is_replaced = any(
        isinstance(event.payload, command_events.JobReplaced | agent_events.SurplusStart)
        for key, group in facts.items()
        if (start := split_attempt(key)) and start[0] == newest.job_id and start[1] > newest.restart
        for event in group.events
    )
    return is_replaced or is_over(facts.get(newest.key, AttemptFacts()).events)
