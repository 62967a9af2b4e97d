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

    ``runs``: finds all run directories, to read them again. ``warn``: called with the reason, once. ``repairs``:
    whether a damaged file is put aside, and a new one made in its place.
    """

    runs: Callable[[], Sequence[RunDir]]
    warn: Callable[[str], None]
    repairs: bool = True

    def fill(self, transaction: Transaction) -> None:
        """Read all run directories into an empty registry."""
        from slurmtrain.registry.ingest import ingest

        ingest(transaction, self.runs(), dead=False)

    def repair(self, path: Path) -> bool:
        """Replace a damaged file, unless there are too many runs; whether there is an intact one now.

        Raises what :func:`~slurmtrain.registry.damage.repair.repair` does.
        """
        from slurmtrain.registry.damage.repair import repair

        runs = self.runs() if self.repairs else ()
        if not self.repairs or len(runs) > _MOST_RUNS:
            return False
        repaired = repair(path, runs)
        if repaired.kept is not None:
            self.warn(str(repaired))
        return True
