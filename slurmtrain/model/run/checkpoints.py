"""The checkpoints of a run from its events: a pure fold, like :mod:`slurmtrain.model.run.fold`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from slurmtrain.model.run.events.base import AnyEvent
from slurmtrain.model.run.layout import attempt_of
from slurmtrain.model.run.run import PUBLISHED, Attempt, Checkpoint


def checkpoints_of(facts: Sequence[AnyEvent], attempts: Sequence[Attempt]) -> list[Checkpoint]:
    """All checkpoints that were ever saved or found, by step. ``facts``: all of the run, in their order."""
    told = _Told(attempts)
    for event in facts:
        if event.kind in _TELLERS:
            _TELLERS[event.kind](told, event)
    return sorted([*told.here.values(), *told.gone.values()], key=lambda one: one.order)


class _Told:
    """What has been told so far: what is on disk, by path, and what was deleted, by path and time of its save."""

    def __init__(self, attempts: Sequence[Attempt]) -> None:
        self.here: dict[str, Checkpoint] = {}
        self.gone: dict[tuple[str, float], Checkpoint] = {}
        self._attempts = attempts
        self._numbers = {attempt.key: attempt.number for attempt in attempts}

    def put(self, checkpoint: Checkpoint) -> None:
        """It is on disk, in place of any other at its path."""
        self.gone.pop((checkpoint.path, checkpoint.saved_at), None)
        self.here[checkpoint.path] = replace(checkpoint, pruned_at=None)

    def take(self, path: str, at: float) -> None:
        """What is at this path was deleted."""
        checkpoint = self.here.pop(path, None)
        if checkpoint is not None:
            self.gone[path, checkpoint.saved_at] = replace(checkpoint, pruned_at=at)

    def named(self, event: AnyEvent, data: Mapping[str, Any]) -> Checkpoint:
        """The checkpoint that these fields describe: as it is known, even as a deleted one, or else a new one."""
        described = self.described(event, data)
        here = self.here.get(described.path)
        if here is not None and here.saved_at == described.saved_at:
            return here
        return self.gone.get((described.path, described.saved_at), described)

    def described(self, event: AnyEvent, data: Mapping[str, Any]) -> Checkpoint:
        """A new checkpoint with these fields."""
        saved_at = float(data.get("saved_at", event.time))
        return Checkpoint(
            step=data.get("step"),
            path=str(data["path"]),
            bytes=int(data.get("bytes", 0)),
            saved_at=saved_at,
            seconds=data.get("seconds"),
            stall_s=data.get("stall_s"),
            why="found" if event.kind == "found" else str(data.get("why") or ""),
            metrics=data.get("metrics") or {},
            attempt=self._attempt(event, data, saved_at),
        )

    def _attempt(self, event: AnyEvent, data: Mapping[str, Any], saved_at: float) -> int | None:
        """The number of the attempt that saved it: the one that says so, or else the one that ran then."""
        key = data.get("attempt") or (attempt_of(event.source) if event.kind == "saved" else None)
        ran = (a.number for a in reversed(self._attempts) if a.started_at is not None and a.started_at <= saved_at)
        return self._numbers[key] if key in self._numbers else next(ran, None)


def _told_saved(told: _Told, event: AnyEvent) -> None:
    told.put(told.described(event, event.data))


def _told_found(told: _Told, event: AnyEvent) -> None:
    told.put(told.named(event, event.data))


def _told_restored(told: _Told, event: AnyEvent) -> None:
    checkpoint = told.named(event, event.data)
    # Sizes alone make a checkpoint good enough to go on from, but nothing is known of what is in its files.
    hashed = event.data.get("hashed", True)
    told.put(_looked_at(checkpoint, event, good=True) if hashed else replace(checkpoint, complete=True))


def _told_observed(told: _Told, event: AnyEvent) -> None:
    """A kill between deleting a checkpoint, or publishing one, and saying so: the disk is right."""
    if "checkpoints" not in event.data:
        return
    there = {str(found["path"]): found for found in event.data["checkpoints"]}
    for path in [path for path in told.here if path.startswith(PUBLISHED) and path not in there]:
        told.take(path, event.time)
    for path, found in there.items():
        # Of one whose manifest cannot be read, there is nothing to learn.
        if "saved_at" in found or path not in told.here:
            told.put(told.named(event, found))


def _told_rejected(told: _Told, event: AnyEvent) -> None:
    checkpoint = told.here.pop(str(event.data["path"]), None)
    if checkpoint is not None:
        path = str(event.data.get("aside") or checkpoint.path)
        told.put(_looked_at(replace(checkpoint, path=path), event, good=False))


def _told_verified(told: _Told, event: AnyEvent) -> None:
    checkpoint = told.here.get(str(event.data["path"]))
    if checkpoint is None:
        return
    looked_at = _looked_at(checkpoint, event, good=event.data.get("reason") is None)
    # One that was set aside is not gone on from, though its files should turn out to be good.
    aside = not checkpoint.complete and not checkpoint.path.startswith(PUBLISHED)
    told.put(replace(looked_at, complete=False) if aside else looked_at)


def _told_pruned(told: _Told, event: AnyEvent) -> None:
    told.take(str(event.data["path"]), event.time)


def _looked_at(checkpoint: Checkpoint, event: AnyEvent, *, good: bool) -> Checkpoint:
    return replace(checkpoint, complete=good, verified=good, verified_at=event.time)


_TELLERS: Mapping[str, Callable[[_Told, AnyEvent], None]] = {
    "saved": _told_saved,
    "found": _told_found,
    "restored": _told_restored,
    "observed": _told_observed,
    "rejected": _told_rejected,
    "verified": _told_verified,
    "pruned": _told_pruned,
}
