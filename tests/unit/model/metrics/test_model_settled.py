"""What trackers are sent of a run that is rolled back again and again: each point once, and what survives."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from slurmtrain.model.metrics.columns import block_of
from slurmtrain.model.metrics.curves import AttemptStart, Restart, SurvivingLine, curves_of
from slurmtrain.model.metrics.settled import (
    Attempted,
    Decided,
    Fate,
    LoggedLine,
    Place,
    Settlement,
    covered_until,
    start_over,
)
from slurmtrain.model.run.journal_lines import Point
from slurmtrain.model.run.run import Checkpoint

_LINE = 10
_AT_ONCE = 3


@dataclass
class Training:
    """A run as its files show it. A line takes ten bytes."""

    starts: list[AttemptStart] = field(default_factory=list)
    points: dict[int, list[Point]] = field(default_factory=dict)
    checkpoints: list[Checkpoint] = field(default_factory=list)
    step: int = 0
    now: float = 1000.0
    ended: bool = False

    @property
    def attempt(self) -> int:
        return len(self.starts)

    def attempts(self) -> list[Attempted]:
        def lines(number: int) -> Iterable[LoggedLine]:
            return [LoggedLine(i * _LINE, (i + 1) * _LINE, point) for i, point in enumerate(self.points[number])]

        return [
            Attempted(start, lambda offset, of=start.number: [line for line in lines(of) if line.offset >= offset])
            for start in self.starts
        ]

    def train(self, steps: int, validates: bool) -> None:
        for _ in range(steps):
            self.step, self.now = self.step + 1, self.now + 1
            self.points[self.attempt].append(Point(self.step, self.now, {"loss": self.now}))
        if validates and steps:
            self.points[self.attempt].append(Point(self.step, self.now, {"val": self.now}))

    def save(self) -> None:
        self.now += 1
        kept = [each for each in self.checkpoints if each.step != self.step]
        self.checkpoints = [
            *kept, Checkpoint(self.step, f"checkpoints/step-{self.step}", 1, self.now, 1.0, attempt=self.attempt),
        ]  # fmt: skip

    def resume(self, back: int, *, restart: bool, journaled: bool) -> None:
        """From the newest checkpoint, or from an older one: ``back`` before it."""
        self.now += 1
        steps = sorted({0, *(each.step or 0 for each in self.checkpoints)})
        self.step = steps[max(0, len(steps) - 1 - back)]
        # What is newer belongs to a training that led nowhere.
        self.checkpoints = [each for each in self.checkpoints if (each.step or 0) <= self.step]
        resumed_from = self.step if journaled else None
        if restart and self.starts:
            start = self.starts[-1]
            before = [Restart(each.at, None) for each in start.restarts]
            self.starts[-1] = start._replace(restarts=[*before, Restart(self.now, resumed_from)])
        else:
            self.starts.append(AttemptStart(self.attempt + 1, resumed_from))
            self.points[self.attempt] = []
        self.ended = False

    def surviving(self) -> dict[str, dict[int, float]]:
        line = SurvivingLine()
        for start in self.starts:
            line.add_attempt(start, [block_of(self.points[start.number])])
        curves = {name: curve.kept for name, curve in curves_of(line).items() if len(curve.kept)}
        return {name: dict(zip(kept.steps, kept.values, strict=True)) for name, kept in curves.items()}

    def logged(self) -> list[tuple[str, int, float]]:
        return sorted(
            (name, point.step, value)
            for points in self.points.values()
            for point in points
            for name, value in point.metrics.items()
        )


@dataclass
class Remote:
    """A tracker's copy of a run, and how far it is; one that truncates takes points that may not survive."""

    truncates: bool
    place: Place = field(default_factory=Place)
    final: list[tuple[str, int, float]] = field(default_factory=list)
    replayed: list[tuple[str, int, float]] = field(default_factory=list)
    begun_anew: int = 0

    def sync(self, training: Training, lines: float = math.inf) -> None:
        """Send what is settled, or only the first ``lines``: the command is killed then."""
        settled = self._settle(training, self.place)
        place = start_over(settled, truncates=self.truncates)
        if place == Place() and self.place != place:
            self.final, self.replayed, self.begun_anew = [], [], self.begun_anew + 1
            settled = self._settle(training, place)
        if self.truncates:
            self.final = [each for each in self.final if place.step is not None and each[1] <= place.step]
        self.place = place
        for batch in settled.batches(_AT_ONCE):
            self.place = self.place.before(batch)
            for line in batch:
                lines -= 1
                if lines < 0:
                    return
                self._log(line)
            self.place = self.place.after(batch)

    def _log(self, line: Decided) -> None:
        for fate, point in line.parts.items():
            sent = self.final if fate is Fate.FINAL else self.replayed
            for name, value in point.metrics.items():
                # As MLflow does, which identifies points by all that they consist of.
                if self.truncates or (name, point.step, value) not in sent:
                    sent.append((name, point.step, value))

    def _settle(self, training: Training, place: Place) -> Settlement:
        if training.ended:
            return Settlement(training.attempts(), place, lambda attempt, time: math.inf)
        open_from = None if self.truncates else covered_until(training.checkpoints)
        return Settlement(training.attempts(), place, open_from)

    def curves(self) -> dict[str, dict[int, float]]:
        curves: dict[str, dict[int, float]] = {}
        for name, step, value in self.final:
            assert step not in curves.setdefault(name, {}), "a step is there twice"
            curves[name][step] = value
        return curves


actions = st.one_of(
    st.tuples(st.just("train"), st.integers(0, 6), st.booleans()),
    st.tuples(st.just("save")),
    st.tuples(st.just("resume"), st.sampled_from([0, 0, 0, 1, 3]), st.booleans()),
    st.tuples(st.just("end")),
    st.tuples(st.just("sync"), st.sampled_from([math.inf, math.inf, 1, 4, 5, 9])),
)


def play(training: Training, remotes: list[Remote], action: tuple, *, journaled: bool) -> None:
    match action:
        case ("train", steps, validates) if not training.ended:
            training.train(steps, validates)
        case ("save",) if not training.ended:
            training.save()
        case ("resume", back, restart):
            training.resume(back, restart=restart and not training.ended, journaled=journaled)
        case ("end",):
            training.ended = True
        case ("sync", lines):
            for remote in remotes:
                remote.sync(training, lines)


@given(st.lists(actions, max_size=30), st.booleans())
@settings(max_examples=4 * settings.default.max_examples)
def test_trackers_have_what_survives_all_rollbacks_between_syncs(played: list[tuple], journaled: bool) -> None:
    training, remotes = Training(), [Remote(truncates=True), Remote(truncates=False)]
    training.resume(0, restart=False, journaled=journaled)
    for action in played:
        play(training, remotes, action, journaled=journaled)
    training.ended = True
    for remote in remotes:
        remote.sync(training)
        assert remote.curves() == training.surviving()


@given(st.lists(actions, max_size=30))
def test_points_are_sent_once_and_none_is_left_out_as_long_as_runs_resume_from_their_newest_checkpoint(
    played: list[tuple],
) -> None:
    training, remote = Training(), Remote(truncates=False)
    training.resume(0, restart=False, journaled=True)
    for action in played:
        match action:
            case ("resume", _, restart):
                play(training, [remote], ("resume", 0, restart), journaled=True)
            case ("end",):  # a run that has ended may have to be begun anew
                continue
            case _:
                play(training, [remote], action, journaled=True)
    training.ended = True
    remote.sync(training)
    assert remote.begun_anew == 0
    assert sorted(remote.final + remote.replayed) == training.logged()
