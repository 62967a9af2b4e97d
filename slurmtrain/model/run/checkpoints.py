"""The checkpoints of a run, built from the events about them in order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from slurmtrain.model.run.events.base import AnyEvent, Event
from slurmtrain.model.run.events.checkpoint_events import (
    CheckpointFound,
    CheckpointPruned,
    CheckpointRecord,
    CheckpointRejected,
    CheckpointRestored,
    CheckpointSaved,
    CheckpointVerified,
)
from slurmtrain.model.run.events.command_events import JobObserved
from slurmtrain.model.run.layout import attempt_of
from slurmtrain.model.run.run import PUBLISHED, Attempt, Checkpoint, replace

# A checkpoint is identified by its path and when it was saved: a run that starts over saves to the same paths.
_Key = tuple[str, float]
_FIELDS = [each.name for each in fields(Checkpoint) if each.name != "attempt"]


def concerns_checkpoints(event: AnyEvent) -> bool:
    """Whether :class:`CheckpointHistory` needs this event."""
    payload = event.payload
    if isinstance(payload, JobObserved):
        return payload.checkpoints is not None
    return isinstance(payload, CheckpointRecord | CheckpointRejected | CheckpointVerified | CheckpointPruned)


class CheckpointHistory:
    """All checkpoints that were ever saved or found: by path if they are on disk, and the deleted ones."""

    def __init__(self) -> None:
        self._on_disk: dict[str, Checkpoint] = {}
        self._deleted: dict[_Key, Checkpoint] = {}
        # The directory of the attempt that saved each; attempts are numbered only once all of them are known.
        self._savers: dict[_Key, str] = {}

    def apply(self, event: AnyEvent) -> None:
        """Apply the next event. Events must be applied in their order."""
        payload = event.payload
        if isinstance(payload, CheckpointSaved):
            self._put(self._describe(payload, event))
        elif isinstance(payload, CheckpointRestored):
            # Correct sizes make a checkpoint good enough to resume from, but do not verify the contents of its files.
            good = replace(self._find(payload, event), complete=True)
            self._put(_looked_at(good, event, good=True) if payload.hashed else good)
        elif isinstance(payload, CheckpointRecord):
            self._put(self._find(payload, event))
        elif isinstance(payload, JobObserved):
            self._apply_observed(payload, event)
        elif isinstance(payload, CheckpointRejected):
            checkpoint = self._on_disk.pop(payload.path, None)
            if checkpoint is not None:
                moved = replace(checkpoint, path=payload.aside or checkpoint.path)
                self._savers[moved.path, moved.saved_at] = self._savers.get((checkpoint.path, checkpoint.saved_at), "")
                self._put(_looked_at(moved, event, good=False))
        elif isinstance(payload, CheckpointVerified):
            checkpoint = self._on_disk.get(payload.path)
            if checkpoint is not None:
                # One that was moved aside is not resumed from, even if its files turn out to be good.
                is_aside = not checkpoint.complete and not checkpoint.path.startswith(PUBLISHED)
                looked_at = _looked_at(checkpoint, event, good=payload.reason is None)
                self._put(replace(looked_at, complete=False) if is_aside else looked_at)
        elif isinstance(payload, CheckpointPruned):
            self._delete(payload.path, event.time)

    def checkpoints(self, attempts: Sequence[Attempt]) -> list[Checkpoint]:
        """All checkpoints by step, each with the number of the attempt that saved it."""
        numbers = {attempt.key: attempt.number for attempt in attempts}
        numbered = [
            replace(checkpoint, attempt=self._attempt(checkpoint, numbers, attempts))
            for checkpoint in (*self._on_disk.values(), *self._deleted.values())
        ]
        return sorted(numbered, key=lambda checkpoint: checkpoint.order)

    def _attempt(self, checkpoint: Checkpoint, numbers: Mapping[str, int], attempts: Sequence[Attempt]) -> int | None:
        """The number of the attempt that saved it: the recorded one, or else the one that was running at that time."""
        # An attempt without any event of its own has no number.
        saver = self._savers.get((checkpoint.path, checkpoint.saved_at))
        if saver is not None and saver in numbers:
            return numbers[saver]
        started = (a for a in reversed(attempts) if a.started_at is not None)
        return next((a.number for a in started if a.started_at <= checkpoint.saved_at), None)  # type: ignore[operator]

    # --- events -------------------------------------------------------------------------------------------------------

    def _apply_observed(self, observed: JobObserved, event: AnyEvent) -> None:
        """Trust the disk: a process may be killed after deleting or publishing a checkpoint, before journaling it."""
        if observed.checkpoints is None:
            return
        records = {record.path: record for record in observed.checkpoints}
        for path in [path for path in self._on_disk if path.startswith(PUBLISHED) and path not in records]:
            self._delete(path, event.time)
        for path, record in records.items():
            # A checkpoint with an unreadable manifest adds nothing to what is known already.
            if record.saved_at is not None or path not in self._on_disk:
                self._put(self._find(record, event))

    # --- what is on disk ----------------------------------------------------------------------------------------------

    def _put(self, checkpoint: Checkpoint) -> None:
        """Record that it is on disk, replacing any other at its path."""
        # Whoever noted that it was deleted may have been killed before the deletion.
        self._deleted.pop((checkpoint.path, checkpoint.saved_at), None)
        self._on_disk[checkpoint.path] = replace(checkpoint, pruned_at=None)

    def _delete(self, path: str, at: float) -> None:
        """Record that the checkpoint at this path was deleted."""
        checkpoint = self._on_disk.pop(path, None)
        if checkpoint is not None:
            self._deleted[path, checkpoint.saved_at] = replace(checkpoint, pruned_at=at)

    def _find(self, record: CheckpointRecord, event: AnyEvent) -> Checkpoint:
        """The known checkpoint of this record, even if deleted, or else a new one."""
        saved_at = _saved_at(record, event)
        on_disk = self._on_disk.get(record.path)
        # Runs that start over save to the same paths: only the time tells both checkpoints apart.
        if on_disk is not None and on_disk.saved_at == saved_at:
            return on_disk
        return self._deleted.get((record.path, saved_at)) or self._describe(record, event)

    def _describe(self, record: CheckpointRecord, event: AnyEvent) -> Checkpoint:
        """A new checkpoint from the record."""
        saved_at = _saved_at(record, event)
        saver = record.attempt or (attempt_of(event.source) if isinstance(record, CheckpointSaved) else "")
        self._savers[record.path, saved_at] = saver
        return Checkpoint(
            step=record.step,
            path=record.path,
            bytes=record.bytes,
            saved_at=saved_at,
            seconds=record.seconds,
            stall_s=record.stall_s,
            why="found" if isinstance(record, CheckpointFound) else record.why or "",
            metrics=record.metrics or {},
            format=record.format if isinstance(record, CheckpointFound) else None,
            step_from=record.step_from if isinstance(record, CheckpointFound) else None,
        )

    # --- kept between two readings ------------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """This as JSON: a row for each checkpoint, the newest on disk last."""
        return {
            name: [
                [self._savers.get((each.path, each.saved_at), ""), *(getattr(each, field) for field in _FIELDS)]
                for each in checkpoints.values()
            ]
            for name, checkpoints in (("on_disk", self._on_disk), ("deleted", self._deleted))
        }

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> CheckpointHistory:
        """Read the result of :meth:`to_dict`."""
        history = cls()
        for each in ("on_disk", "deleted"):
            for saver, *values in record[each]:
                checkpoint = Checkpoint(**dict(zip(_FIELDS, values, strict=True)))
                key = (checkpoint.path, checkpoint.saved_at)
                history._savers[key] = saver
                if each == "on_disk":
                    history._on_disk[checkpoint.path] = checkpoint
                else:
                    history._deleted[key] = checkpoint
        return history


def _saved_at(record: CheckpointRecord, event: Event[Any]) -> float:
    return event.time if record.saved_at is None else record.saved_at


def _looked_at(checkpoint: Checkpoint, event: AnyEvent, *, good: bool) -> Checkpoint:
    return replace(checkpoint, complete=good, verified=good, verified_at=event.time)
