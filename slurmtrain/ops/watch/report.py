"""What a watch reports about its rounds: each action, and each problem once until it is over. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slurmtrain.model.query.fields import iso
from slurmtrain.model.run.run import ENDED
from slurmtrain.ops.shared.observe import Observed
from slurmtrain.ops.sync import Synced
from slurmtrain.ops.watch.rounds import WatchRound

_END_TEXTS = {"completed": "has completed", "failed": "has failed", "cancelled": "was cancelled", "lost": "is lost"}


@dataclass(frozen=True, slots=True)
class WatchEvent:
    """Something that a watch did or noticed, at a time in seconds since 1970.

    ``kind``: watching, started, released, cancelled, finished, mirrored, problem, over, note or stopped.
    """

    at: float
    kind: str
    message: str
    run: str | None = None
    state: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """The form that ``watch --json`` prints."""
        return {
            "schema": 1,
            "at": iso(self.at),
            "kind": self.kind,
            "run": self.run,
            "state": self.state,
            "message": self.message,
        }


class ReportFilter:
    """Picks what is new in a round. Remembers the runs' states, and the problems that are not over yet."""

    def __init__(self) -> None:
        # None before the first round, which compares with the registry's states before it.
        self._states: Mapping[str, str] | None = None
        # A dict for its order: problems are reported by first appearance.
        self._problems: dict[str, None] = {}
        self._notes: set[str] = set()
        # (kind, run id) of events that may repeat each round, and were reported when they began.
        self._reported: set[tuple[str, str]] = set()

    def new_events(self, outcome: WatchRound, at: float) -> list[WatchEvent]:
        """What is new in a round that ended ``at`` this time."""
        if outcome.synced is None:
            return self._problem_events([outcome.failure], at, complete=False)
        synced = outcome.synced
        events = [*self._run_events(synced, outcome.before, at), *self._note_events(synced, at)]
        problems = [*synced.observed.problems, *_unreadable_runs(synced.observed), *synced.problems]
        # While Slurm is down, it is unknown whether other problems are over.
        return events + self._problem_events(problems, at, complete=not outcome.slurm_down)

    def _run_events(self, synced: Synced, before: Mapping[str, str], at: float) -> list[WatchEvent]:
        runs = synced.observed.runs
        states = {run_id: listed.state for run_id, listed in runs.items()}
        previous = before if self._states is None else self._states
        self._states = states
        ended = {run_id for run_id, state in states.items() if state in ENDED}
        finished = [run_id for run_id in states if run_id in ended and previous.get(run_id, "") not in ENDED]

        def event(kind: str, run_id: str, text: str) -> WatchEvent:
            name = f" ({runs[run_id].name})" if run_id in runs else ""
            return WatchEvent(at, kind, f"run {run_id}{name} {text}", run_id, states.get(run_id))

        cancelled = self._first_and_last("cancelled", synced.cancelled, finished)
        mirrored = self._first_and_last("mirrored", synced.mirrored, finished)
        events = [
            *(event("started", run_id, _describe_start(synced, run_id)) for run_id in synced.started),
            *(event("released", run_id, "was held; its job was released") for run_id in synced.released),
            *(event("cancelled", run_id, "is being cancelled, as requested") for run_id in cancelled),
            *(event("finished", run_id, _describe_end(synced, run_id)) for run_id in finished),
            *(event("mirrored", run_id, "was sent to MLflow") for run_id in mirrored),
        ]
        self._reported = {(kind, run_id) for kind, run_id in self._reported if run_id in states.keys() - ended}
        return events

    def _first_and_last(self, kind: str, run_ids: Sequence[str], finished: Sequence[str]) -> list[str]:
        """The runs for which an event that may repeat each round happened for the first or last time."""
        chosen = [run_id for run_id in run_ids if (kind, run_id) not in self._reported or run_id in finished]
        self._reported.update((kind, run_id) for run_id in run_ids)
        return chosen

    def _note_events(self, synced: Synced, at: float) -> list[WatchEvent]:
        notes = list(dict.fromkeys([*synced.notes, *_unreadable_lines(synced.observed)]))
        new = [WatchEvent(at, "note", note) for note in notes if note not in self._notes]
        self._notes = set(notes)
        return new

    def _problem_events(self, problems: Sequence[str], at: float, *, complete: bool) -> list[WatchEvent]:
        """Problems that are new, and, after a ``complete`` round, problems that are over."""
        new = [WatchEvent(at, "problem", text) for text in dict.fromkeys(problems) if text not in self._problems]
        over = [text for text in self._problems if text not in problems] if complete else []
        self._problems.update(dict.fromkeys(problems))
        for text in over:
            del self._problems[text]
        return [*new, *(WatchEvent(at, "over", f"no longer so: {text}") for text in over)]


def _describe_start(synced: Synced, run_id: str) -> str:
    listed = synced.observed.runs.get(run_id)
    return f"was started again, as attempt {listed.attempt}" if listed and listed.attempt > 1 else "was started"


def _describe_end(synced: Synced, run_id: str) -> str:
    listed = synced.observed.runs[run_id]
    reason = str(listed.row["reason"] or "")
    return _END_TEXTS.get(listed.state, listed.state) + (f": {reason}" if reason else "")


def _unreadable_runs(observed: Observed) -> Iterator[str]:
    """The problem of each run that cannot be read."""
    for run_id, reason in observed.unreadable.items():
        yield f"run {run_id} is unreadable: {reason}"


def _unreadable_lines(observed: Observed) -> Iterator[str]:
    """A note for each journal with lines that are not records."""
    counts: dict[tuple[str, str], int] = {}
    for run_id, bad in observed.garbage:
        counts[run_id, bad.source] = counts.get((run_id, bad.source), 0) + 1
    for (run_id, source), count in counts.items():
        yield f"run {run_id}: {count} unreadable line(s) in {source}"
