"""What replaces a registry that fails: one in memory, or a new file where a file is damaged."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from slurmtrain.model.run.layout import RunDir
    from slurmtrain.registry.transaction import Transaction


@dataclass(frozen=True, slots=True)
class Spare:
    """What a registry needs to be replaced if it fails.

    ``runs``: finds all run directories, to read them again. ``warn``: called with the reason, once. ``note``: called
    with what was done about a damaged file; None: nothing is.
    """

    runs: Callable[[], Sequence[RunDir]]
    warn: Callable[[str], None]
    note: Callable[[str], None] | None = None

    def fill(self, transaction: Transaction) -> None:
        """Read all run directories into a registry."""
        # Most commands need none of it.
        from slurmtrain.registry.ingest import ingest

        ingest(transaction, self.runs(), dead=False)
