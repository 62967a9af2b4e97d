"""Cancelling: ask, wait for the run to save and leave, then kill what is left."""

from __future__ import annotations

import signal
import time

from slurmtrain.errors import RunBusy
from slurmtrain.model.state import Run
from slurmtrain.ops.observe import alive, observe
from slurmtrain.ops.workspace import Workspace
from slurmtrain.system.files import locked
from slurmtrain.system.process import Process, descendants

# Longer than node agents give their workers, so that killing is the exception.
PATIENCE_S = 45.0
_POLL_S = 0.1


def cancel(workspace: Workspace, run_id: str, *, patience_s: float = PATIENCE_S, force: bool = False) -> Run:
    """End a run, from any terminal of the machine it runs on; returns it as it then is.

    A run that has ended already is left as it is. Raises RunBusy for one on another machine. The wish is journaled
    first: if this is killed, ``sync`` goes on.
    ``force`` kills at once, without letting the run save.
    """
    run = _load(workspace, run_id)
    if run.ended:
        _kill(run)
        return run
    if alive(run) is None:
        hosts = ", ".join(sorted({process.host for process in _processes(run)}))
        raise RunBusy(f"run {run_id} is on {hosts}, whose processes cannot be reached from here; cancel it there")
    directory = workspace.root.run(run_id)
    with locked(directory.lock):
        run = _load(workspace, run_id)
        if not run.ended:
            with workspace.journal(directory, "cancel") as journal:
                journal.write("cancel")
    return finish_cancel(workspace, run_id, patience_s=0 if force else patience_s)


def finish_cancel(workspace: Workspace, run_id: str, *, patience_s: float = PATIENCE_S) -> Run:
    """End a run that somebody wished to cancel: SIGTERM first, SIGKILL to everything when that is no use."""
    run = _load(workspace, run_id)
    if run.ended:
        return run
    _ask(run)
    run = _wait(workspace, run_id, patience_s)
    while alive(run):
        _kill(run)
        run = _wait(workspace, run_id, 1.0)
    return run


def _load(workspace: Workspace, run_id: str) -> Run:
    observe(workspace, [run_id])
    run = workspace.store.load(run_id)
    assert run is not None
    return run


def _processes(run: Run) -> list[Process]:
    return [Process.from_plain(process) for process in run.newest.processes] if run.newest else []


def _ask(run: Run) -> None:
    """SIGTERM to the agents; the first process is submitit's controller, which hands it on to agents yet to speak."""
    for process in _processes(run):
        process.send(signal.SIGTERM)


def _kill(run: Run) -> None:
    for process in _processes(run):
        for each in [process, *descendants(process)]:
            each.send(signal.SIGKILL)


def _wait(workspace: Workspace, run_id: str, seconds: float) -> Run:
    """Wait until a run has ended and its processes are gone."""
    deadline = time.monotonic() + seconds
    while True:
        run = _load(workspace, run_id)
        if (run.ended and alive(run) is not True) or time.monotonic() >= deadline:
            return run
        time.sleep(_POLL_S)
