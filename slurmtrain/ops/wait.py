"""Waiting for runs to end."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from slurmtrain.ops.shared.interrupt import StopSignal
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.ops.sync import Synced, sync
from slurmtrain.registry.store import Listed

# How often to look: soon at first, for runs that are over soon; then seldom, since each look takes time from the run.
FIRST_LOOK_S = 0.2
LAST_LOOK_S = 1.0


def wait(
    workspace: Workspace,
    run_ids: Sequence[str],
    tell: Callable[[Mapping[str, Listed]], None],
    stop: StopSignal | None = None,
) -> tuple[bool, Synced]:
    """Wait until all these runs have ended, telling of each look at them; then mirror them to the tracking store.

    ``stop`` ends the waiting early, between two looks. Returns whether all completed, and what the last sync found,
    with the notes of all syncs if nothing ended it early.
    """
    notes: list[str] = []
    pause = FIRST_LOOK_S
    while True:
        synced = sync(workspace, run_ids, track=False)
        chosen = {run_id: synced.observed.runs[run_id] for run_id in run_ids}
        notes += synced.notes
        tell(chosen)
        if all(listed.ended for listed in chosen.values()):
            break
        if stop is None:
            time.sleep(pause)
        elif stop.wait(pause):
            return False, synced
        pause = min(pause * 1.2, LAST_LOOK_S)
    synced = sync(workspace, run_ids)
    synced.notes = list(dict.fromkeys([*notes, *synced.notes]))
    return all(listed.state == "completed" for listed in chosen.values()), synced
