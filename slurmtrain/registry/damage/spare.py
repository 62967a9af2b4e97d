"""What replaces a registry that fails: one in memory, or a new file where a file is damaged."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from slurmtrain.model.run.layout import RunDir
    from slurmtrain.registry.transaction import Transaction

# To read more runs takes minutes, for which no command keeps people waiting unasked.
_MOST_RUNS = 5000


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
        """Read all run directories into an empty registry."""
        from slurmtrain.registry.ingest import ingest

        ingest(transaction, self.runs(), dead=False)

    def repair(self, path: Path) -> bool:
        """Replace a damaged file, unless there are too many runs; whether there is an intact one now.

        Raises what :func:`~slurmtrain.registry.damage.repair.repair` does.
        """
        from slurmtrain.registry.damage.repair import repair

        runs = () if self.note is None else self.runs()
        if self.note is None or len(runs) > _MOST_RUNS:
            return False
        repaired = repair(path, runs)
        if repaired.kept is not None:
            self.note(str(repaired))
        return True
