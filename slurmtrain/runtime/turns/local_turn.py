"""The turn of a local run: node 0 takes a slot and GPUs, and tells the agents of the other nodes.

``turn.json`` of the attempt has the resources that it took: its GPUs and, in a sweep, its slot.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from slurmtrain.errors import LaunchError, PathError
from slurmtrain.model.run.events.agent import WaitingForSlot
from slurmtrain.model.run.layout import AttemptDir, RunDir
from slurmtrain.model.spec.resources import ResourcesSpec
from slurmtrain.runtime.environment.gpus import local_gpus, set_local_gpus
from slurmtrain.runtime.environment.node import Node
from slurmtrain.runtime.environment.variables import ATTEMPT_DIR
from slurmtrain.runtime.job.run_reader import agent_of_node_0, read_run
from slurmtrain.runtime.turns.slots import Share, SlotRequest, Slots, take_slot
from slurmtrain.system import user_cache
from slurmtrain.system.files import describe_os_error, make_directory, read_json, write_json
from slurmtrain.system.journal import Journal
from slurmtrain.system.process import Process, marked

_POLL_S = 0.1
# All agents of a run are started together. One that is killed before it journals anything is never seen.
_BEGIN_S = 300.0
# The name under which runs that are of no sweep stand in line for GPUs.
_SINGLE = "single"


def wait_for_turn(
    attempt: AttemptDir, node: Node, resources: ResourcesSpec, journal: Journal, give_up: Callable[[], bool]
) -> contextlib.ExitStack:
    """Wait until a local run may begin, and let this process use the GPUs that the run then has.

    A run of a sweep needs a slot. Any run needs as many GPUs as it requests, which no other run of this account has.

    Args:
        attempt: the attempt.
        node: this agent's node, whose submission names the slots.
        resources: what the run needs.
        journal: this agent's, for a wait.
        give_up: whether to wait no longer.

    Returns:
        What this process keeps locked: the run's slot and GPUs, on node 0.

    Raises:
        PathError: a file cannot be written or read.
        LaunchError: node 0 has ended before it had what the run needs.
    """
    turn, held = node.launch.turn, contextlib.ExitStack()
    needed = resources.most_gpus
    if turn is None and not needed:
        return held
    if node.index:
        gpus = _wait_for_node_0(attempt, give_up)
        if gpus is not None:
            set_local_gpus(gpus)
        return held
    folder = attempt.run.slots(socket.gethostname())
    sweep, count = (_SINGLE, None) if turn is None else (turn.sweep, turn.count)
    slots = Slots(folder, sweep, count, gpus_of_account(socket.gethostname()))
    request = SlotRequest(
        run=attempt.run.id,
        gpus=local_gpus(),
        needed=needed,
        is_early=is_to_come(attempt.run, turn.behind if turn is not None else None),
        in_use=lambda: used_by_ranks(attempt.run, slots),
    )
    waiting = WaitingForSlot(count=slots.count or 0, gpus=needed)
    share = take_slot(slots, request, held, give_up=give_up, note=lambda: journal.write(waiting))
    if share is not None:
        set_local_gpus(share.gpus)
        _announce(attempt, share, folder)
    return held


def gpus_of_account(host: str) -> Path | None:
    """What the local runs of this account lock on a machine to use GPUs, whatever their runs root.

    Args:
        host: the name of the machine, since others may have the same home directory.

    Returns:
        A directory; None if none can be used: then GPUs are locked in the runs root.
    """
    with contextlib.suppress(PathError, OSError, RuntimeError):
        folder = make_directory(user_cache.directory() / "gpus" / host, private=True)
        return folder if os.access(folder, os.W_OK | os.X_OK) else None
    return None


def used_by_ranks(run: RunDir, slots: Slots) -> set[Path]:
    """The slots and GPUs of all other runs with ranks, or processes that these have started, on this machine.

    Args:
        run: this run; an earlier attempt's processes do not count, since they are killed once it has its turn.
        slots: where the slots are.
    """
    root = run.path.parent
    used = set()
    for path in {Path(values[ATTEMPT_DIR]) for values in marked((ATTEMPT_DIR,)).values()}:
        # The runs root may have been renamed since they were started.
        beside = RunDir(root / path.parent.parent.name)
        is_beside = beside.path.exists()
        other = beside if is_beside else RunDir(path.parent.parent)
        turn = None
        with contextlib.suppress(PathError):
            turn = None if other.id == run.id else _read_turn(AttemptDir(other.attempts / path.name))
        if turn is not None:
            used |= {slots.gpu(name) for name in turn.get("gpus", ())}
            used |= {slots.folder / name for name in (turn.get("slot"),) if name and is_beside}
    return used


def is_to_come(run: RunDir, behind: str | None) -> Callable[[], bool]:
    """Whether the run before this one has neither begun nor a place in the line, but will have one.

    Args:
        run: this run.
        behind: the id of the one before it; None: there is none.
    """
    if behind is None:
        return lambda: False
    before = RunDir(run.path.parent / behind)

    def is_to_come() -> bool:
        if any(before.attempts.glob("*/turn.json")):
            return False
        newest = read_run(before).newest
        # With an agent it is pending only while it waits for a run outside of the sweep: this one may pass it then.
        if newest is None or (newest.hosts and newest.state == "pending"):
            return False
        return any(Process.from_dict(each).alive() for each in newest.processes)

    return is_to_come


def _announce(attempt: AttemptDir, share: Share, folder: Path) -> None:
    slot = None if share.slot is None else str(share.slot.relative_to(folder))
    try:
        write_json(attempt.turn, {"gpus": share.gpus, "slot": slot})
    except OSError as error:
        raise PathError(f"cannot write {attempt.turn}: {describe_os_error(error)}") from error


def _read_turn(attempt: AttemptDir) -> dict[str, Any] | None:
    """What a run has, once node 0 has written it. Raises PathError."""
    return read_json(attempt.turn, types={"gpus": "Sequence[str]", "slot": "str | None"})


def _wait_for_node_0(attempt: AttemptDir, give_up: Callable[[], bool]) -> list[str] | None:
    """The GPUs of the run, once node 0 has them; None if it was given up. Raises PathError or LaunchError."""
    deadline = time.monotonic() + _BEGIN_S
    node_0: Process | None = None
    while not give_up():
        node_0 = node_0 or agent_of_node_0(attempt)
        # Looked at before its file, so that its last word counts.
        is_gone = time.monotonic() > deadline if node_0 is None else node_0.alive() is False
        turn = _read_turn(attempt)
        if turn is not None:
            return list(turn.get("gpus", ()))
        if is_gone:
            raise LaunchError("the agent of node 0 has ended before it was this run's turn")
        time.sleep(_POLL_S)
    return None
