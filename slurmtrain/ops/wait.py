"""Waiting for runs to end."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from slurmtrain.ops.shared.family import open_upstreams
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.ops.sync import Synced, sync
from slurmtrain.registry.rows import Listed

# A run that could not be read for this many seconds is no longer waited for: a file server that does not answer for a
# moment must not end the wait.
PATIENCE_S = 10.0
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
    """Wait until all these runs have ended, or cannot be read for a while, then mirror them to the tracking store.

    Meanwhile it does what ``sync`` does, for them and for the runs that they start after: nobody else may.

    Args:
        workspace: where the runs are.
        run_ids: the runs to wait for; if one is of a search, all runs of the search are waited for.
        show: called with them, by id, after each check.
        stop: ends the waiting early, between two checks.

    Returns:
        Whether all runs completed, or were pruned by their search; and the last sync, with the notes of all syncs, and
        all runs of the searches, unless it was ended early.
    """
    notes: list[str] = []
    pruned: set[str] = set()
    waited = dict.fromkeys(run_ids)
    pause = FIRST_PAUSE_S
    # When a run that cannot be read now could not be read for the first time (time.monotonic()).
    unreadable: dict[str, float] = {}
    chosen: dict[str, Listed] = {}
    while True:
        # Without MLflow: importing it takes seconds, during which nothing would be shown.
        synced = sync(workspace, [*waited, *open_upstreams(workspace, chosen)], track=False)
        waited.update(dict.fromkeys(synced.searched))
        pruned.update(synced.pruned)
        chosen = {run_id: synced.observed.runs[run_id] for run_id in waited}
        notes += synced.notes
        show(chosen)
        now = time.monotonic()
        unreadable = {run_id: unreadable.get(run_id, now) for run_id, listed in chosen.items() if listed.unreadable}
        given_up = {run_id for run_id, since in unreadable.items() if now - since >= PATIENCE_S}
        if all(listed.ended or run_id in given_up for run_id, listed in chosen.items()):
            last = sync(workspace, list(waited))
            notes += last.notes
            if waited.keys() >= set(last.searched):
                break
            # Its search has answered with further runs.
            waited.update(dict.fromkeys(last.searched))
            pause = FIRST_PAUSE_S
        if stop is None:
            time.sleep(pause)
        elif stop.wait(pause):
            return False, synced
        pause = min(pause * 1.2, LAST_PAUSE_S)
    last.notes = list(dict.fromkeys(notes))
    last.searched = [run_id for run_id in waited if run_id not in run_ids]
    return all(listed.state == "completed" or run_id in pruned for run_id, listed in chosen.items()), last
