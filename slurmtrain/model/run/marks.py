"""What people note on a run: tags, a note, whether it is archived or deleted."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from slurmtrain.model.run.events.base import AnyEvent
from slurmtrain.model.run.events.command import (
    DeletionRequested,
    FilesDeleted,
    NoteWritten,
    RunArchived,
    TagsChanged,
)


@dataclass(slots=True)
class Marks:
    """The marks of a run. ``deleted_at``: when its deletion was last requested, in seconds since 1970.

    ``freed``: how many bytes that freed; None: it was not requested, or is not complete.
    """

    tags: set[str] = field(default_factory=set)
    note: str = ""
    archived: bool = False
    deleted_at: float | None = None
    freed: int | None = None

    def apply(self, event: AnyEvent) -> None:
        """Take an event into account, which is newer than those before; most kinds change nothing."""
        payload = event.payload
        if isinstance(payload, TagsChanged):
            self.tags = (self.tags | set(payload.add)) - set(payload.remove)
        elif isinstance(payload, NoteWritten):
            self.note = payload.text
        elif isinstance(payload, RunArchived):
            self.archived = payload.archived
        elif isinstance(payload, DeletionRequested):
            self.deleted_at, self.freed = event.time, None
        elif isinstance(payload, FilesDeleted):
            self.freed = payload.bytes


def read_marks(events: Iterable[AnyEvent]) -> Marks:
    """The marks of a run from its ``events``, the oldest first."""
    marks = Marks()
    for event in events:
        marks.apply(event)
    return marks
