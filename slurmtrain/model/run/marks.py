"""What people note on a run: tags, a note, whether it is archived or deleted."""

from __future__ import annotations

import re
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

# Characters of a tag.
TAG_LIMIT = 64
# No quotes are needed for it in a shell, nor in a condition.
_TAG = re.compile(r"\w[\w.+/:-]*")


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
    _frees: int = 0

    def apply(self, event: AnyEvent) -> None:
        """Take an event into account that is newer than all before; most kinds change nothing."""
        payload = event.payload
        if isinstance(payload, TagsChanged):
            self.tags = (self.tags | set(payload.add)) - set(payload.remove)
        elif isinstance(payload, NoteWritten):
            self.note = payload.text
        elif isinstance(payload, RunArchived):
            self.archived = payload.archived
        elif isinstance(payload, DeletionRequested):
            self.deleted_at, self.freed, self._frees = event.time, None, payload.bytes
        elif isinstance(payload, FilesDeleted):
            self.freed = self._frees


def tag_problem(tag: str) -> str:
    """Why a text cannot be a tag, for a message; empty if it can."""
    if not 0 < len(tag) <= TAG_LIMIT:
        return f"a tag has 1 to {TAG_LIMIT} characters"
    if not _TAG.fullmatch(tag) or not tag.isprintable():
        return "it is a word of letters, digits, '.', '_', '-', '+', '/' and ':', which begins with a letter or digit"
    return ""


def read_marks(events: Iterable[AnyEvent]) -> Marks:
    """The marks of a run from its ``events``, the oldest first."""
    marks = Marks()
    for event in events:
        marks.apply(event)
    return marks
