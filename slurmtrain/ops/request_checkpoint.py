"""Asking a training run to save now."""

from __future__ import annotations

import contextlib
import secrets
import time
from dataclasses import dataclass
from typing import Any

from slurmtrain.errors import NotAvailable, PathError, RunBusy
from slurmtrain.model.run.events.base import AnyEvent, Payload, select
from slurmtrain.model.run.events.checkpoint_events import CheckpointSaved, SaveFailed
from slurmtrain.model.run.events.command_events import SaveRequested
from slurmtrain.model.run.events.rank_events import SessionStarted, StateRegistered, TrainingStarted
from slurmtrain.model.run.layout import attempt_of
from slurmtrain.model.run.run import Attempt, Checkpoint, Run
from slurmtrain.ops.shared.observe import observe_run
from slurmtrain.ops.shared.readable_checkpoints import refuse_external
from slurmtrain.ops.shared.views import SCHEMA, checkpoint_json
from slurmtrain.ops.shared.workspace import Workspace, person
from slurmtrain.system.files import describe_os_error, read_json, write_json

# How often the run's journals are read while waiting, in seconds.
_POLL_S = 0.5


@dataclass(frozen=True, slots=True)
class SaveRequest:
    """A request for a checkpoint of a run now.

    ``step``: the run's step at the time. ``before``: the save events journaled by then, by their place in a journal, as
    times do not decide: the clocks of nodes differ.
    """

    run_id: str
    id: str
    attempt: str
    step: int
    before: frozenset[tuple[str, int]]


@dataclass(frozen=True, slots=True)
class RequestOutcome:
    """What became of a request.

    ``outcome``: ``asked``: it was not waited for; ``saved``; ``failed``; ``ended``: the attempt ended first, with a
    checkpoint if it saved on exit; ``late``: not known in time.
    """

    outcome: str
    checkpoint: Checkpoint | None = None
    reason: str = ""

    def to_dict(self, workspace: Workspace, request: SaveRequest) -> dict[str, Any]:
        """What ``checkpoint --json`` prints."""
        directory = workspace.root.run(request.run_id)
        return {
            "schema": SCHEMA,
            "run_id": request.run_id,
            "request": request.id,
            "outcome": self.outcome,
            "checkpoint": checkpoint_json(directory, self.checkpoint) if self.checkpoint else None,
            "reason": self.reason or None,
        }


def request_checkpoint(workspace: Workspace, run_id: str) -> SaveRequest:
    """Ask a training run for a checkpoint. It saves at the end of a step: see :func:`wait_for_checkpoint`.

    The request is atomic: a kill leaves all of it or nothing. Raises RunBusy if the run does not train, NotAvailable if
    its script writes its own checkpoints, PathError if the run directory cannot be written.
    """
    directory = workspace.root.run(run_id)
    run = observe_run(workspace, run_id, ask_slurm=True)
    # Rank 0 checks for requests once its script has registered what to save.
    refuse_external(
        directory,
        run,
        "only slurmtrain.session() saves on request. 'slurmtrain cancel' sends it the signal of requeue.signal, on "
        "which it may save before it ends; 'slurmtrain resume' then continues",
    )
    newest = run.newest
    if run.state != "running" or newest is None:
        saved = f"its newest checkpoint is of step {run.checkpoint.step}" if run.checkpoint else "it has none"
        raise RunBusy(f"run {run.id} is {run.state}, and only a run that is training can save; {saved}")
    hint = f"'slurmtrain logs {run.id}' shows how far it is"
    if not _has_journaled(workspace, run.id, newest, SessionStarted):
        raise RunBusy(
            f"run {run.id} is still starting, or its script does not use slurmtrain.session() and cannot be asked; "
            f"{hint}"
        )
    if not _has_journaled(workspace, run.id, newest, TrainingStarted):
        raise RunBusy(f"run {run.id} has not begun its first step (run.steps()), and cannot save before that; {hint}")
    if not _has_journaled(workspace, run.id, newest, StateRegistered):
        raise NotAvailable(
            f"the script of run {run.id} has not registered anything to save yet; it does that with run.checkpoint()"
        )
    # Before the request is written: whatever is saved from then on may fulfil it.
    before = frozenset(_save_events(workspace, run_id))
    request = SaveRequest(run_id, secrets.token_hex(8), newest.key, run.step or 0, before)
    try:
        with workspace.journal(directory, "checkpoint") as journal:
            journal.write(SaveRequested(request=request.id, by=person()))
        # Last: rank 0 looks for this file alone, so a kill before it leaves an event that asks for nothing.
        write_json(directory.request, {"request": request.id, "t": time.time()})
    except OSError as error:
        problem = describe_os_error(error)
        raise PathError(f"cannot write to {directory.path}: {problem}; ask as the run's owner") from error
    return request


def _has_journaled(workspace: Workspace, run_id: str, attempt: Attempt, cls: type[Payload]) -> bool:
    """Whether a rank of this attempt has journaled an event of this kind."""
    return any(attempt_of(event.source) == attempt.key for event in workspace.store.events(run_id, cls))


def _save_events(workspace: Workspace, run_id: str) -> dict[tuple[str, int], AnyEvent]:
    """A run's save events, successful and failed, by their place in a journal."""
    saved, failed = workspace.store.events(run_id, CheckpointSaved), workspace.store.events(run_id, SaveFailed)
    return {(event.source, event.offset): event for event in [*saved, *failed]}


def wait_for_checkpoint(workspace: Workspace, request: SaveRequest, timeout_s: float) -> RequestOutcome:
    """Wait until a request is fulfilled or no longer can be. Slurm is not asked.

    Args:
        workspace: where the run is.
        request: the result of :func:`request_checkpoint`.
        timeout_s: how many seconds to wait at most.
    """
    workspace = workspace.looking_again()
    deadline = time.monotonic() + timeout_s
    ids = {request.id}
    while True:
        # The file first, then the journals: a later request replaces this one, and the save that fulfils both names
        # only the later one.
        with contextlib.suppress(PathError):
            current = read_json(workspace.root.run(request.run_id).request) or {}
            ids |= {str(current["request"])} if current.get("request") else set()
        run = observe_run(workspace, request.run_id, ask_slurm=False)
        outcome = _outcome_so_far(workspace, run, request, ids)
        if outcome is not None:
            return outcome
        left = deadline - time.monotonic()
        if left <= 0:
            return RequestOutcome("late")
        time.sleep(min(_POLL_S, left))


def _outcome_so_far(workspace: Workspace, run: Run, request: SaveRequest, ids: set[str]) -> RequestOutcome | None:
    """What became of a request that a save may name by any of these ids; None while it is pending."""
    new = [event for place, event in _save_events(workspace, run.id).items() if place not in request.before]
    own = [event for event in new if attempt_of(event.source) == request.attempt]
    events = sorted(own, key=lambda event: event.order)
    for event in events:
        payload = event.payload
        if isinstance(payload, CheckpointSaved) and payload.request in ids:
            return RequestOutcome("saved", _saved_checkpoint(run, payload, event.time))
        if isinstance(payload, SaveFailed) and payload.request in ids:
            return RequestOutcome("failed", reason=str(payload.reason))
    newest = run.newest
    if newest is not None and newest.key == request.attempt and run.state == "running":
        return None
    late = [event for event in select(events, CheckpointSaved) if (event.payload.step or 0) >= request.step]
    checkpoint = _saved_checkpoint(run, late[-1].payload, late[-1].time) if late else None
    reason = f"run {run.id} is {run.state}" + (f": {run.reason}" if run.reason not in ("", run.state) else "")
    if not run.ended:
        reason = f"the attempt of run {run.id} that was asked to save has ended, and the run is {run.state}"
    return RequestOutcome("ended", checkpoint, reason)


def _saved_checkpoint(run: Run, saved: CheckpointSaved, time: float) -> Checkpoint | None:
    """The checkpoint that a save in the ``run`` made, journaled at ``time`` (seconds since 1970)."""
    key = (saved.path, time if saved.saved_at is None else saved.saved_at)
    return next((each for each in run.checkpoints if (each.path, each.saved_at) == key), None)
