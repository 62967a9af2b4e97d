"""When rank 0 wants a checkpoint: by the clock, as often as it pays, or because a person asks for one."""

from __future__ import annotations

import contextlib
import enum
import time

from slurmtrain.errors import PlaceError
from slurmtrain.model.interruption.interval import Cost, InterruptionStats, IntervalChoice, choose, is_due
from slurmtrain.model.run.layout import RunDir
from slurmtrain.model.spec.spec import Every
from slurmtrain.runtime.checkpoint.saver import SaveOutcome
from slurmtrain.system.files import read_json
from slurmtrain.system.journal import Journal

# How often it is looked whether a person asks for a checkpoint: looking may take a round trip to a file server.
_LOOK_S = 1.0
# An interval is journaled again when it has changed by this part of itself.
_CHANGED = 0.1


class Due(enum.IntEnum):
    """Why a checkpoint is due now."""

    NOT = 0
    INTERVAL = 1
    ASKED = 2

    @property
    def why(self) -> str:
        return self.name.lower()


class Schedule:
    """On ranks other than 0 it only knows of intervals of steps. Times are of the monotonic clock, in seconds."""

    def __init__(
        self, run: RunDir, every: Every, history: InterruptionStats, nodes: int, journal: Journal | None
    ) -> None:
        self._run = run
        self._every = every
        self._history = history
        self._nodes = nodes
        self._journal = journal
        self._cost = Cost()
        self._began = self._saved_at = self._looked_at = time.monotonic()
        self._stamp = self._stamp_of_request()
        self._request: str | None = None
        self._choice: IntervalChoice | None = None

    def begin(self) -> None:
        """Training begins."""
        self._began = self._saved_at = time.monotonic()
        self._choose()

    def is_due_at(self, step: int) -> bool:
        """Whether the interval is one of steps, and ends here."""
        return self._every.unit == "steps" and step % int(self._every.amount) == 0

    def due(self) -> Due:
        """Whether to save now."""
        if self._is_asked():
            return Due.ASKED
        if self._every.unit == "steps" or self._choice is None:
            return Due.NOT
        since = time.monotonic() - self._saved_at
        return Due.INTERVAL if is_due(self._every, self._choice, since_save_s=since) else Due.NOT

    def began(self) -> None:
        """A save has begun, and training goes on: its next interval counts from now."""
        self._saved_at = time.monotonic()

    def ended(self, outcome: SaveOutcome) -> None:
        """A save ended: what it has cost changes how often it pays."""
        if not outcome.problem:
            self._cost.add(stall_s=outcome.stall_s, save_s=outcome.seconds)
            self._choose()

    def _choose(self) -> None:
        choice = choose(
            self._history,
            nodes=self._nodes,
            uptime_s=time.monotonic() - self._began,
            stall_s=self._cost.stall_s,
            save_s=self._cost.save_s,
        )
        before, self._choice = self._choice, choice
        if self._journal is None or self._every.unit != "auto":
            return
        if before is None or abs(choice.seconds - before.seconds) > _CHANGED * before.seconds:
            with contextlib.suppress(OSError):
                self._journal.write("interval", **choice.to_dict())

    # --- on demand ----------------------------------------------------------------------------------------------------

    def take_request(self) -> str | None:
        """The id of the wish that the next save fulfils, once."""
        request, self._request = self._request, None
        return request

    def _is_asked(self) -> bool:
        now = time.monotonic()
        if now - self._looked_at >= _LOOK_S:
            self._looked_at = now
            stamp = self._stamp_of_request()
            if stamp != self._stamp:
                self._stamp = stamp
                with contextlib.suppress(PlaceError):
                    self._request = (read_json(self._run.request) or {}).get("request")
        return self._request is not None

    def _stamp_of_request(self) -> tuple[int, int] | None:
        try:
            found = self._run.request.stat()
        except OSError:
            return None
        return found.st_ino, found.st_mtime_ns
