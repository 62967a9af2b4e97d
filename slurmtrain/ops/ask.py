"""Asking a run that trains for a checkpoint."""

from __future__ import annotations

import contextlib
import gc
import secrets
import time
from dataclasses import dataclass
from typing import Any

from slurmtrain.errors import NotAvailable, PlaceError, RunBusy
from slurmtrain.model.run.events.base import AnyEvent
from slurmtrain.model.run.events.command import SaveRequested
from slurmtrain.model.run.layout import RunDir, attempt_of
from slurmtrain.model.run.run import Attempt, Checkpoint, Run
from slurmtrain.ops.shared.checkpoints import refuse_external
from slurmtrain.ops.shared.observe import observe_run
from slurmtrain.ops.shared.views import SCHEMA, checkpoint_json
from slurmtrain.ops.shared.workspace import Workspace, person
from slurmtrain.system.files import describe_os_error, read_json, write_json

# How often the run's journals are read while waiting.
_LOOK_S = 0.5


@dataclass(frozen=True, slots=True)
class SaveRequest:
    """A checkpoint that a person wants of a run now. ``step``: where the run was then.

    ``before``: what had been journaled of saves by then; clocks of nodes differ, so times do not tell.
    """

    run_id: str
    id: str
    attempt: str
    step: int
    before: frozenset[tuple[str, int]]


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of a wish.

    ``outcome``: ``asked``: nobody has waited; ``saved``; ``failed``; ``ended``: the attempt ended first, with a
    checkpoint if it saved in leaving; ``late``: nobody knows yet.
    """

    outcome: str
    checkpoint: Checkpoint | None = None
    reason: str = ""

    def to_dict(self, workspace: Workspace, wish: SaveRequest) -> dict[str, Any]:
        """What ``checkpoint --json`` prints."""
        directory = workspace.root.run(wish.run_id)
        return {
            "schema": SCHEMA,
            "run_id": wish.run_id,
            "request": wish.id,
            "outcome": self.outcome,
            "checkpoint": checkpoint_json(directory, self.checkpoint) if self.checkpoint else None,
            "reason": self.reason or None,
        }


def ask(workspace: Workspace, run_id: str) -> SaveRequest:
    """Ask a run that trains for a checkpoint. It saves at the end of a step; :func:`answer` waits for that.

    Killed at any moment, this has asked or has not. Raises RunBusy for a run that does not train, NotAvailable for one
    whose script brings its own checkpoints, PlaceError where the run directory cannot be written.
    """
    directory = workspace.root.run(run_id)
    run = observe_run(workspace, run_id, ask_slurm=True)
    attempt = _check_trains(workspace, directory, run)
    wish = SaveRequest(run_id, secrets.token_hex(8), attempt.key, run.step or 0, frozenset(_saves(workspace, run_id)))
    try:
        with workspace.journal(directory, "checkpoint") as journal:
            journal.write(SaveRequested(request=wish.id, by=person()))
        write_json(directory.request, {"request": wish.id, "t": time.time()})
    except OSError as error:
        raise PlaceError(
            f"cannot write to {directory.path}: {describe_os_error(error)}; ask as the run's owner"
        ) from error
    return wish


def _check_trains(workspace: Workspace, directory: RunDir, run: Run) -> Attempt:
    """The attempt that can be asked. Rank 0 looks for wishes from when it has registered its state on."""
    refuse_external(directory, run, "nobody can ask it to save")
    newest = run.newest
    if run.state != "running" or newest is None:
        there = f"its newest checkpoint is that of step {run.checkpoint.step}" if run.checkpoint else "it has none"
        raise RunBusy(f"run {run.id} is {run.state}, and only one that trains can save; {there}")
    later = f"'slurmtrain logs {run.id}' tells how far it is"
    if not _told(workspace, run.id, newest, "session"):
        raise RunBusy(
            f"run {run.id} is still starting, or its script does not use slurmtrain.session(), and nobody can ask it; "
            f"{later}"
        )
    if not _told(workspace, run.id, newest, "total"):
        raise RunBusy(
            f"run {run.id} has not come to its first step yet (run.steps()), and does not save before; {later}"
        )
    if not _told(workspace, run.id, newest, "registered"):
        raise NotAvailable(
            f"the script of run {run.id} has named nothing to save so far: one that can be asked calls run.checkpoint()"
        )
    return newest


def _told(workspace: Workspace, run_id: str, attempt: Attempt, *kinds: str) -> bool:
    """Whether a rank of this attempt has journaled anything of these kinds."""
    return any(
        attempt_of(event.source) == attempt.key for kind in kinds for event in workspace.store.events(run_id, kind)
    )


def _saves(workspace: Workspace, run_id: str) -> dict[tuple[str, int], AnyEvent]:
    """What is known of saves of a run, good and bad, by where it is written."""
    told = [event for kind in ("saved", "save_failed") for event in workspace.store.events(run_id, kind)]
    return {(event.source, event.offset): event for event in told}


def answer(workspace: Workspace, wish: SaveRequest, timeout_s: float) -> Answer:
    """Wait until a wish is fulfilled, or cannot be any more, for so many seconds at most. Slurm is not asked."""
    gc.enable()
    workspace = workspace.looking_again()
    deadline = time.monotonic() + timeout_s
    ids = {wish.id}
    while True:
        # First: whoever has asked since stands for this wish too, and must be known before the save that says so.
        ids |= _stands_for(workspace.root.run(wish.run_id))
        run = observe_run(workspace, wish.run_id, ask_slurm=False)
        found = _answered(workspace, run, wish, ids)
        if found is not None:
            return found
        left = deadline - time.monotonic()
        if left <= 0:
            return Answer("late")
        time.sleep(min(_LOOK_S, left))


def _stands_for(directory: RunDir) -> set[str]:
    """The wish that the run finds when it next looks: the last one, which is put in place of those before it."""
    with contextlib.suppress(PlaceError):
        return {str(request)} if (request := (read_json(directory.request) or {}).get("request")) else set()
    return set()


def _answered(workspace: Workspace, run: Run, wish: SaveRequest, ids: set[str]) -> Answer | None:
    new = [event for at, event in _saves(workspace, run.id).items() if at not in wish.before]
    mine = sorted((e for e in new if attempt_of(e.source) == wish.attempt), key=lambda event: event.order)
    for event in mine:
        if event.kind == "saved" and event.data.get("request") in ids:
            return Answer("saved", _checkpoint(run, event))
        if event.kind == "save_failed" and event.data.get("request") in ids:
            return Answer("failed", reason=str(event.data.get("reason")))
    newest = run.newest
    if newest is not None and newest.key == wish.attempt and run.state == "running":
        return None
    late = [event for event in mine if event.kind == "saved" and int(event.data.get("step") or 0) >= wish.step]
    return Answer("ended", _checkpoint(run, late[-1]) if late else None, _ending(run))


def _ending(run: Run) -> str:
    if not run.ended:
        return f"the attempt of run {run.id} that was asked has ended, and the run is {run.state}"
    return f"run {run.id} is {run.state}" + (f": {run.reason}" if run.reason not in ("", run.state) else "")


def _checkpoint(run: Run, event: AnyEvent) -> Checkpoint | None:
    """The checkpoint that a save has made."""
    path, saved_at = event.data.get("path"), event.data.get("saved_at", event.time)
    return next((one for one in run.checkpoints if (one.path, one.saved_at) == (path, saved_at)), None)
