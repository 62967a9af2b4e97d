"""The turn of a local run: node 0 takes a slot and GPUs, and tells the agents of the other nodes."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable

from slurmtrain.errors import PathError
from slurmtrain.model.run.events.agent import WaitingForSlot
from slurmtrain.model.run.layout import AttemptDir, RunDir
from slurmtrain.model.spec.spec import ResourcesSpec
from slurmtrain.runtime.environment.gpus import local_gpus, set_local_gpus
from slurmtrain.runtime.environment.node import Node
from slurmtrain.runtime.job.run_reader import read_run
from slurmtrain.runtime.turns.slots import SlotRequest, Slots, take_slot
from slurmtrain.system.files import describe_os_error, read_json, write_json
from slurmtrain.system.journal import Journal
from slurmtrain.system.process import Process

_POLL_S = 0.1


def wait_for_turn(
    attempt: AttemptDir, node: Node, resources: ResourcesSpec, journal: Journal, give_up: Callable[[], bool]
) -> contextlib.ExitStack:
    """Wait until a run of a local sweep may begin, and let this process use the GPUs that the run then has.

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
    """
    turn = node.launch.turn
    assert turn is not None
    held = contextlib.ExitStack()
    if node.index:
        gpus = _wait_for_node_0(attempt, give_up)
    else:
        needed = resources.allocated.max * resources.gpus_per_node
        slots = Slots(attempt.run.slots(socket.gethostname()), turn.sweep, turn.count)
        request = SlotRequest(attempt.run.id, local_gpus(), needed, is_to_come(attempt.run, turn.behind))
        waiting = WaitingForSlot(count=turn.count, gpus=needed)
        gpus = take_slot(slots, request, held, give_up=give_up, note=lambda: journal.write(waiting))
        if gpus is not None:
            _announce(attempt, gpus)
    if gpus is not None:
        set_local_gpus(gpus)
    return held


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


def _announce(attempt: AttemptDir, gpus: list[str]) -> None:
    try:
        write_json(attempt.turn, {"gpus": gpus})
    except OSError as error:
        raise PathError(f"cannot write {attempt.turn}: {describe_os_error(error)}") from error


def _wait_for_node_0(attempt: AttemptDir, give_up: Callable[[], bool]) -> list[str] | None:
    """The GPUs of the run, once node 0 has them; None if it was given up. Raises PathError."""
    while not give_up():
        turn = read_json(attempt.turn, types={"gpus": "Sequence[str]"})
        if turn is not None:
            return list(turn.get("gpus", ()))
        time.sleep(_POLL_S)
    return None
