"""Waiting for runs to end."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.ops.sync import Synced, sync
from slurmtrain.registry.store import Listed

# Seconds between two checks: short at first, for runs that end soon, then longer, since checking a local run takes CPU
# time from it.
FIRST_PAUSE_S = 0.2
LAST_PAUSE_S = 1.0


class Stop(Protocol):
    """What ends a wait early: a signal to this process, or a limit."""

    def wait(self, seconds: float) -> bool:
        """Sleep for ``seconds``, or until the wait is to end; returns whether it is."""


def wait(
    workspace: Workspace,
    run_ids: Sequence[str],
    show: Callable[[Mapping[str, Listed]], None],
    stop: Stop | None = None,
) -> tuple[bool, Synced]:
    """Wait until all these runs have ended, then mirror them to the tracking store.

    Args:
        workspace: where the runs are.
        run_ids: the runs to wait for.
        show: called with them, by id, after each check.
        stop: ends the waiting early, between two checks.

    Returns:
        Whether all runs completed, and the last sync, with the notes of all syncs unless it was ended early.
    """
    notes: list[str] = []
    pause = FIRST_PAUSE_S
    while True:
        # Without MLflow: importing it takes seconds, during which nothing would be shown.
        synced = sync(workspace, run_ids, track=False)
        chosen = {run_id: synced.observed.runs[run_id] for run_id in run_ids}
        notes += synced.notes
        show(chosen)
        if all(listed.ended for listed in chosen.values()):
            break
        if stop is None:
            time.sleep(pause)
        elif stop.wait(pause):
            return False, synced
        pause = min(pause * 1.2, LAST_PAUSE_S)
    synced = sync(workspace, run_ids)
    synced.notes = list(dict.fromkeys([*notes, *synced.notes]))
    return all(listed.state == "completed" for listed in chosen.values()), synced
