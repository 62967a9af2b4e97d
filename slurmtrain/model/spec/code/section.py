"""The section `code` of a spec: which code a run executes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from slurmtrain.model.spec import kinds
from slurmtrain.model.spec.kinds import Conflict, Items, Scalar, declare_key
from slurmtrain.model.spec.units import parse_size, write_size

SNAPSHOT = "snapshot"
NONE = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeSpec:
    """Which code a run executes. `code: none` is short for `code: {mode: none}`."""

    mode: str = declare_key(
        SNAPSHOT,
        kinds.choice(SNAPSHOT, NONE),
        "`snapshot`: the files as they are when the run is submitted, also after a requeue. `none`: whatever is in "
        "`workdir` when an attempt starts. Written out, a snapshot is required; by default there is none where "
        "`workdir` is no project's, which `submit` says.",
    )
    include: tuple[str, ...] = declare_key(
        (),
        Items(kinds.text("pattern"), "list of patterns"),
        "Files that git ignores and the code needs, such as `src/**/*.so`, relative to the repository.",
    )
    exclude: tuple[str, ...] = declare_key(
        (),
        Items(kinds.text("pattern"), "list of patterns"),
        "Files that are no code, in the syntax of .gitignore; a `.slurmtrainignore` says the same for all specs.",
    )
    max_size: int = declare_key(
        100 << 20,
        Scalar("amount with a unit, such as `100MB`", parse_size, write_size),
        "How large a snapshot may be, in units of 1024, before it is compressed.",
    )

    @property
    def has_snapshot(self) -> bool:
        """Whether a run has a snapshot."""
        return self.mode == SNAPSHOT

    def conflicts(self) -> Iterator[Conflict]:
        """Keys that contradict each other, and why."""
        untouched = CodeSpec()
        for key in ("include", "exclude", "max_size"):
            if not self.has_snapshot and getattr(self, key) != getattr(untouched, key):
                yield key, f"{key!r} has no effect without a snapshot; set 'mode: snapshot', or remove it"
