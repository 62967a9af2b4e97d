"""Sending runs to the trackers named by their plans or the configuration: what is settled, each point once."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import TYPE_CHECKING, Any

from slurmtrain.errors import LockHeld, SlurmtrainError, TrackingError
from slurmtrain.model.experiment.plan import Plan
from slurmtrain.model.metrics.settled import Decided, Fate, Place, Settlement, all_final, covered_until, start_over
from slurmtrain.model.run.layout import RunsRoot
from slurmtrain.model.run.run import Run
from slurmtrain.ops.shared.next_attempts import current_plan
from slurmtrain.ops.shared.observe import observe
from slurmtrain.ops.shared.trackers import Target, link, targets_of
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.registry.cells import Sent, write_sent
from slurmtrain.runtime.job.run_reader import LoggedLines, logged_lines
from slurmtrain.system.locks import locked
from slurmtrain.tracking.tracker import (
    NoAnswer,
    Start,
    TrackedPoint,
    TrackedRun,
    Tracker,
    open_tracker,
    preload_tracker,
    writes_files,
)

if TYPE_CHECKING:
    from slurmtrain.registry.rows import Listed

# So many lines are sent before it is noted how far that went.
_LINES_AT_ONCE = 1000


@dataclass(slots=True)
class MirrorOutcome:
    """The results of mirroring: the ids of runs with anything sent, the failures, and what trackers refused."""

    mirrored: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def mirror_runs(
    workspace: Workspace,
    runs: Mapping[str, Listed],
    *,
    first: Collection[str] = (),
    report: Callable[[Sequence[str], int, MirrorOutcome], None] = lambda _left, _total, _outcome: None,
) -> MirrorOutcome:
    """Send what is new in these runs to their trackers, the newest first. A tracker that is down is no failure.

    Another command may send at the same time: the two take turns, run by run.

    Args:
        workspace: Where the runs are.
        runs: The runs by id, as just observed.
        first: The ids of runs that go before all others.
        report: Called before the first run and after each, with the ids of runs that are left, how many there were, and
            the outcome so far.
    """
    outcome = MirrorOutcome()
    if workspace.store.in_memory:  # it is unknown what was sent already
        return outcome
    sent = workspace.store.sent()
    waiting = [run_id for run_id, listed in runs.items() if _is_behind(workspace, listed, sent.get(run_id))]
    # Ids begin with their time of creation.
    waiting.sort(key=lambda run_id: (run_id in first, run_id), reverse=True)
    report(waiting, len(waiting), outcome)
    trackers = Trackers(workspace)
    _preload_trackers(workspace, waiting)
    for number, run_id in enumerate(waiting, 1):
        try:
            with _turn(workspace.root):
                now = workspace.store.sent([run_id]).get(run_id, {})
                # Another command may have sent it meanwhile, or deleted it.
                was_sent = now != sent.get(run_id, {}) and all(
                    each.revision >= runs[run_id].revision for each in now.values()
                )
                if not was_sent and workspace.root.run(run_id).path.exists():
                    _mirror_run(workspace, trackers, run_id, now, outcome)
        except LockHeld as error:
            outcome.problems.append(f"nothing was sent to trackers: {error}")
            break
        report(waiting[number:], len(waiting), outcome)
    outcome.notes += trackers.notes
    return outcome


def _preload_trackers(workspace: Workspace, run_ids: Sequence[str]) -> None:
    """Import what the trackers of the first of these runs need, before anybody has to wait for that."""
    with contextlib.suppress(SlurmtrainError, OSError):
        for run_id in run_ids[:1]:
            if (run := workspace.store.load(run_id)) is not None:
                for target in targets_of(workspace, current_plan(workspace.root.run(run_id), run)):
                    preload_tracker(target.name)


@contextlib.contextmanager
def _turn(root: RunsRoot) -> Iterator[None]:
    """The right to send a run. Raises LockHeld.

    Whoever waits for it holds the second lock, which keeps the one who has just sent from being faster.
    """
    with contextlib.ExitStack() as stack:
        with locked(root.tracking_queue):
            stack.enter_context(locked(root.tracking_lock))
        yield


def _mirror_run(
    workspace: Workspace, trackers: Trackers, run_id: str, sent: Mapping[str, Sent], outcome: MirrorOutcome
) -> None:
    """Send a run, whose trackers have what was ``sent``, and add what came of it to the outcome."""
    try:
        problems = send_run(workspace, trackers, run_id, sent)
    except (SlurmtrainError, OSError) as error:
        outcome.problems.append(f"run {run_id} cannot be mirrored: {error}")
        return
    # A tracker that is down is so for all runs.
    outcome.problems += [problem for problem in problems.values() if problem and problem not in outcome.problems]
    if not all(problems.values()):
        outcome.mirrored.append(run_id)


def _is_behind(workspace: Workspace, listed: Listed, sent: Mapping[str, Sent] | None) -> bool:
    """Whether a tracker lacks something of a run, as far as is known. ``sent``: what its trackers have, by name."""
    if not listed.attempt or listed.unreadable or listed.row["tracked"] is False or not has_begun(listed.row):
        return False
    # Of a run without an entry nothing has been sent.
    return (not sent or any(each.revision != listed.revision for each in sent.values())) and workspace.root.run(
        listed.id
    ).path.exists()


def has_begun(row: Mapping[str, Any]) -> bool:
    """Whether a run can be shown with the time at which it started, which some trackers never change."""
    return row["started_at"] is not None or row["ended_at"] is not None or row["mlflow_run_id"] is not None


class Trackers:
    """The trackers that one sync uses: each is opened once, and not tried again if that fails or nobody answers."""

    def __init__(self, workspace: Workspace) -> None:
        self._root = workspace.root
        self._opened: dict[str, Tracker] = {}
        self._failed: dict[str, TrackingError] = {}
        self.refusals: list[str] = []
        """What the trackers did not take, as sentences without a full stop."""

    def open(self, target: Target) -> Tracker:
        """The tracker of a target. Raises TrackingError."""
        key = target.key
        if key not in self._failed and key not in self._opened:
            try:
                self._opened[key] = open_tracker(target.name, target.settings, self._root)
            except TrackingError as error:
                self._failed[key] = error
        if key in self._failed:
            raise self._failed[key]
        return self._opened[key]

    def give_up(self, target: Target, error: TrackingError) -> None:
        """Do not try the tracker of a target for other runs: each would wait as long as this one."""
        self._failed[target.key] = error

    @property
    def notes(self) -> list[str]:
        """What the trackers did not take, for the user."""
        return [*(note for tracker in self._opened.values() for note in tracker.notes), *self.refusals]


def send_run(workspace: Workspace, trackers: Trackers, run_id: str, before: Mapping[str, Sent]) -> Mapping[str, str]:
    """Send what is new in a run to each of its trackers; returns what went wrong, by tracker, empty if nothing did.

    Args:
        workspace: Where the run is.
        trackers: Opens them.
        run_id: The run.
        before: What its trackers have, by name.

    Raises:
        RunUnreadable: Its metrics cannot be read.
        PathError: It has no plan.
    """
    run = workspace.store.load(run_id)
    assert run is not None
    plan = current_plan(workspace.root.run(run_id), run)
    sender = RunSender(workspace, run_id, plan)
    problems = {}
    targets = targets_of(workspace, plan)
    for target in targets:
        sent = before.get(target.name)
        if run.deleted_at is not None and (writes_files(target.name) or sent is None or not sent.remote_id):
            # It would write again what was deleted, or show it for the first time.
            sender.note(replace(sent or Sent(target.name, ""), revision=sender.revision, problem="", since=None))
            continue
        problems[target.name] = ""
        try:
            trackers.refusals += sender.send(trackers.open(target), target.name, sent)
        except TrackingError as error:
            if isinstance(error, NoAnswer):
                trackers.give_up(target, error)
            problems[target.name] = str(error)
            sender.note_problem(target.name, sent, str(error))
    # Trackers that the plan no longer names count as complete, or this run would be looked at each time.
    for name in before.keys() - {target.name for target in targets}:
        sender.note(replace(before[name], revision=sender.revision))
    return problems


class RunSender:
    """Sends one run. ``revision``: how much of its files was there when they were listed."""

    def __init__(self, workspace: Workspace, run_id: str, plan: Plan) -> None:
        """Look at its files.

        Args:
            workspace: Where the run is.
            run_id: The run.
            plan: Its plan.

        Raises:
            RunUnreadable: Its metrics cannot be read.
        """
        self._workspace = workspace
        self._directory = workspace.root.run(run_id)
        self._plan = plan
        self._noted: dict[str, Sent] = {}
        self._read()

    def _read(self) -> None:
        run_id = self._directory.id
        # Before anything is sent: what is added meanwhile is sent next time.
        self.revision = observe(self._workspace, [run_id], ask_slurm=False).runs[run_id].revision
        run = self._workspace.store.load(run_id)
        assert run is not None
        self._run: Run = run
        self._logged: LoggedLines = logged_lines(run, self._directory)

    def begin(self, tracker: Tracker, name: str) -> str:
        """The id of the run at a tracker, created if there is none, and journaled. Raises TrackingError."""
        sent = self._workspace.store.sent([self._run.id]).get(self._run.id, {}).get(name)
        start = Start(sent.remote_id, sent.step) if sent is not None and sent.uri == tracker.uri else Start(None)
        with _asking(tracker, self._run):
            remote_id = tracker.begin(self._tracked, start).remote_id
        link(self._workspace, self._run, name, remote_id, tracker.uri)
        return remote_id

    def send(self, tracker: Tracker, name: str, before: Sent | None) -> list[str]:
        """Send a tracker all that it lacks, and note how far that went; returns the names newly refused.

        Args:
            tracker: The tracker.
            name: Its name.
            before: The tracker's state.

        Raises:
            TrackingError: It cannot be reached, or takes nothing.
        """
        sent = before if before is not None and before.uri == tracker.uri else Sent(name, tracker.uri)
        # What versions before 8 have sent has steps twice.
        legacy = bool(sent.offsets) and not sent.sending
        place = Place() if legacy else self._place_of(sent)
        start = start_over(self._settle(tracker, place), truncates=tracker.truncates)
        anew = legacy or (start != place and not start.offsets)
        known_as = sent.remote_id or self._run.mlflow_run_id
        elsewhere = tracker.sent_elsewhere(self._directory, known_as) if known_as else None
        if elsewhere is not None and self._settle(tracker, elsewhere).cut is not None:
            # The run was rolled back behind what the tracker was sent from elsewhere.
            start, anew = Place(), True
        with _asking(tracker, self._run):
            begun = tracker.begin(self._tracked, Start(sent.remote_id, start.step, anew, sent.refused))
        if link(self._workspace, self._run, name, begun.remote_id, tracker.uri):
            # The link is an event of its own, which the revision that is noted at the end must include.
            self._read()
        if sent.remote_id not in (None, begun.remote_id):
            # It has begun a new one, such as for other params.
            start = Place()
        sent = self._note_place(replace(sent, remote_id=begun.remote_id), start)
        skipped = None
        if tracker.truncates and begun.step != start.step:
            start, skipped = Place(), begun.step
        with _asking(tracker, self._run):
            sent, notes = self._log(tracker, sent, start, skipped)
            tracker.finish(self._tracked)
        self.note(replace(sent, revision=self.revision, problem="", since=None))
        return notes

    def note(self, sent: Sent) -> None:
        """Note what a tracker has: in the run's directory first, from which a new registry takes it."""
        if not self._noted:
            self._noted.update(self._workspace.store.sent([self._run.id]).get(self._run.id, {}))
        self._noted[sent.tracker] = sent
        write_sent(self._directory, self._noted)
        self._workspace.store.write(lambda transaction: transaction.set_sent(self._run.id, sent))

    def note_problem(self, name: str, before: Sent | None, problem: str) -> None:
        """Note that a tracker does not take anything now.

        Args:
            name: The tracker's name.
            before: The tracker's state so far.
            problem: Why, as a sentence.
        """
        sent = self._noted.get(name) or before or Sent(name, "")
        since = sent.since if sent.problem and sent.since is not None else time.time()
        # No run has this revision, so the next command tries again.
        self.note(replace(sent, revision=-1, problem=problem, since=since))

    @property
    def _tracked(self) -> TrackedRun:
        return TrackedRun(self._run, self._plan, self._directory)

    def _settle(self, tracker: Tracker, place: Place) -> Settlement:
        if self._run.ended:
            return Settlement(self._logged.attempts, place, all_final)
        open_from = covered_until(self._run.checkpoints) if tracker.waits else None
        return Settlement(self._logged.attempts, place, open_from)

    def _log(self, tracker: Tracker, sent: Sent, place: Place, skipped: int | None) -> tuple[Sent, list[str]]:
        """Send what is settled; returns the tracker's new state, and the names that it refused for the first time.

        Args:
            tracker: The tracker.
            sent: The tracker's state.
            place: The place that sending begins at.
            skipped: Points of the surviving line up to this step are there already.
        """
        settled = self._settle(tracker, place)
        notes: list[str] = []
        for batch in settled.batches(_LINES_AT_ONCE):
            # If this is killed while it sends, the next command knows which points may be there already.
            self._note_place(sent, place.before(batch))
            sent = self._log_points(tracker, sent, list(_points(batch, sent.refused, skipped)), notes)
            place = place.after(batch)
        if self._plan.spec.tracking.live and not tracker.truncates:
            undecided = settled.undecided()
            while lines := list(islice(undecided, _LINES_AT_ONCE)):
                sent = self._log_points(tracker, sent, list(_points(lines, sent.refused, None)), notes)
        return self._note_place(sent, place), notes

    def _log_points(self, tracker: Tracker, sent: Sent, points: Sequence[TrackedPoint], notes: list[str]) -> Sent:
        """Send points; returns the tracker's new state, with the names that it refuses; new ones are noted."""
        refused = tracker.log(points) if points else {}
        new = {name: why for name, why in refused.items() if name not in sent.refused}
        notes += [
            f"{tracker.label} does not take the metric {name!r} of run {self._run.id}: {why}"
            for name, why in new.items()
        ]
        return replace(sent, refused=[*sent.refused, *new])

    def _place_of(self, sent: Sent) -> Place:
        """How far a tracker has the lines of the run, by its state."""
        numbers = {name: number for number, name in self._logged.names.items()}
        attempt, offset = sent.sending.get("from", (0, 0))
        return Place(
            {numbers[name]: end for name, end in sent.offsets.items() if name in numbers},
            sent.step,
            float(sent.sending.get("until", 0.0)),
            sent.sending.get("reach", sent.step),
            (int(attempt), int(offset)),
        )

    def _note_place(self, sent: Sent, place: Place) -> Sent:
        """Note that a tracker has the lines of the run up to a place; returns its state."""
        offsets = {self._logged.names[number]: end for number, end in place.offsets.items()}
        sending = {"until": place.until, "reach": place.reach, "from": list(place.sending)}
        sent = replace(sent, offsets=offsets, step=place.step, sending=sending)
        self.note(sent)
        return sent


def _points(batch: Sequence[Decided], refused: Sequence[str], skipped: int | None) -> Iterator[TrackedPoint]:
    """What a tracker is sent of a batch of lines."""
    for line in batch:
        for fate, point in line.parts.items():
            if fate is Fate.FINAL and skipped is not None and point.step <= skipped:
                continue
            metrics = point.metrics
            if refused:
                metrics = {name: value for name, value in metrics.items() if name not in refused}
            yield TrackedPoint(line.attempt, point.step, point.time, metrics, fate)


@contextlib.contextmanager
def _asking(tracker: Tracker, run: Run) -> Iterator[None]:
    """Whatever a tracker of others raises concerns this tracker only."""
    try:
        yield
    except SlurmtrainError:
        raise
    except Exception as error:
        message = (str(error).splitlines() or [""])[0]
        raise TrackingError(f"{tracker.label} did not take run {run.id}: {type(error).__name__}: {message}") from error
