"""Slots: how many runs of a sweep may run at once on this machine, and which GPUs each of them has.

A slot, a GPU and a place in the line are locked files, in ``.slots/<host>/`` of the runs root; GPUs, which the runs of
all runs roots share, have theirs in the user's cache directory. The kernel releases them when their holder dies,
however that happens: no slot is lost, and nothing waits for a run that is gone. The holder is an agent. If it is
killed, its ranks may save for a while: their resources are not free until they have ended.

Runs get slots in the order of their ids, as in the recipe for locks of ZooKeeper: each holds a file with its own id
while it waits, and watches only the one before it; only the first in line tries the slots. If a run dies or is
cancelled, the next looks again for the one before it. A run that comes late, such as one that was preempted, may try
beside the first.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurmtrain.errors import PathError
from slurmtrain.model.experiment.resources import ResourcesSpec
from slurmtrain.model.run.events.agent_events import WaitingForSlot
from slurmtrain.model.run.layout import RUN_ID, AttemptDir, RunDir
from slurmtrain.runtime.environment.node import Node
from slurmtrain.runtime.environment.variables import ATTEMPT_DIR, local_gpus, set_local_gpus
from slurmtrain.runtime.job.run_reader import read_run, wait_for_node_0
from slurmtrain.system.files import cache_directory, describe_os_error, make_directory, read_json, write_json
from slurmtrain.system.journal import Journal
from slurmtrain.system.locks import locked
from slurmtrain.system.process import Process, marked_processes

_POLL_S = 0.5


@dataclass(frozen=True, slots=True)
class Slots:
    """The slots of a sweep on a machine.

    ``folder``: directory that the runs of this machine share. ``sweep``: its id; for single runs, a name that they
    share. ``count``: how many of its runs may run at once; None: as many as there are GPUs for. ``gpus``: directory
    that the runs of all runs roots share; None: there is only one.
    """

    folder: Path
    sweep: str
    count: int | None
    gpus: Path | None = None

    @property
    def line(self) -> Path:
        """The directory of the waiting runs, a file each."""
        return self.folder / self.sweep / "line"

    def slot(self, index: int) -> Path:
        """The file that the holder of a slot has locked."""
        return self.folder / self.sweep / str(index)

    def gpu(self, name: str) -> Path:
        """The file that the run that uses a GPU has locked. ``name``: as in CUDA_VISIBLE_DEVICES."""
        return self.gpu_folder / name.replace("/", "_")

    @property
    def gpu_folder(self) -> Path:
        """The directory of the GPUs, a file each."""
        return self.gpus or self.folder / "gpus"


@dataclass(frozen=True, slots=True)
class SlotRequest:
    """A run's needs to begin. ``run``: its id. ``gpus``: GPUs that it may use. ``needed``: how many of them it needs.

    ``is_early``: whether a run that must begin before it is not in line yet, but will be. ``in_use``: the slots and
    GPUs that processes use, also those whose holder is dead.
    """

    run: str
    gpus: Sequence[str] = ()
    needed: int = 0
    is_early: Callable[[], bool] = lambda: False
    in_use: Callable[[], Collection[Path]] = lambda: ()


@dataclass(frozen=True, slots=True)
class Share:
    """What a run has. ``slot``: the file of its slot; None: it needs none. ``gpus``: the names of its GPUs."""

    slot: Path | None
    gpus: list[str]


def take_slot(
    slots: Slots,
    request: SlotRequest,
    held: contextlib.ExitStack,
    *,
    give_up: Callable[[], bool],
    note: Callable[[], object] = lambda: None,
) -> Share | None:
    """Wait for a slot, and for as many GPUs as the run needs; returns them.

    Args:
        slots: the slots.
        request: what the run needs.
        held: receives the slot and the GPUs, which are free again when it is closed, or this process ends.
        give_up: whether to wait no longer.
        note: called once, if the run has to wait.

    Returns:
        Its slot and GPUs; None if it has given up.

    Raises:
        PathError: a lock cannot be opened.
    """
    make_directory(slots.line)
    make_directory(slots.gpu_folder)
    ticket = slots.line / request.run
    with contextlib.ExitStack() as place:
        ahead, has_place, noted = None, False, False
        while not give_up():
            # An earlier attempt of the same run that is about to end may have it, or another run may look whether
            # somebody holds it, and remove it just before it is locked: until the next time there is no place.
            if not has_place or not ticket.exists():
                with contextlib.ExitStack() as attempt:
                    has_place = attempt.enter_context(locked(ticket, wait=False)) is not None
                    if has_place:
                        attempt.callback(ticket.unlink, missing_ok=True)
                        place.push(attempt.pop_all())
            if ahead is None or not _is_waiting(slots.line / ahead):
                names = [path.name for path in slots.line.iterdir()]
                earlier = [name for name in names if name < request.run and RUN_ID.fullmatch(name)]
                waiting = (name for name in sorted(earlier, reverse=True) if _is_waiting(slots.line / name))
                # The last run in line before this one.
                ahead = next(waiting, None)
            if ahead is None and not request.is_early() and (share := _take_share(slots, request, held)) is not None:
                return share
            if not noted:
                note()
                noted = True
            time.sleep(_POLL_S)
    return None


def _is_waiting(ticket: Path) -> bool:
    """Whether somebody holds this place in the line; one whose holder was killed is removed."""
    if not ticket.exists():
        return False
    with locked(ticket, wait=False) as lock:
        if lock is None:
            return True
        # If its owner is just about to lock it, it makes another one when it looks again.
        ticket.unlink(missing_ok=True)
    return False


def _take_share(slots: Slots, request: SlotRequest, held: contextlib.ExitStack) -> Share | None:
    """A slot and GPUs, all of them or none; None if there are not enough."""
    avoided: set[Path] = set()
    while True:
        with contextlib.ExitStack() as trial:
            slot = _lock_some(trial, [slots.slot(index) for index in range(slots.count or 0)], 1, avoided)
            gpus = _lock_some(trial, [slots.gpu(name) for name in request.gpus], request.needed, avoided)
            if gpus is None or (slot is None and slots.count is not None):
                return None
            # Asked for while the locks are held: whoever held them before starts nothing any more.
            in_use = {*(slot or ()), *gpus}.intersection(request.in_use())
            if not in_use:
                held.push(trial.pop_all())
                names = {slots.gpu(name): name for name in request.gpus}
                return Share(slot[0] if slot else None, [names[path] for path in gpus])
        avoided |= in_use


def _lock_some(
    trial: contextlib.ExitStack, paths: Sequence[Path], count: int, avoided: Collection[Path]
) -> list[Path] | None:
    """Lock some files; returns them, or None if fewer are free.

    Args:
        trial: receives the locks.
        paths: the files.
        count: how many of them.
        avoided: which not.
    """
    chosen: list[Path] = []
    for path in paths:
        if len(chosen) == count:
            break
        if path in avoided:
            continue
        with contextlib.ExitStack() as attempt:
            if attempt.enter_context(locked(path, wait=False)) is not None:
                trial.push(attempt.pop_all())
                chosen.append(path)
    return chosen if len(chosen) == count else None


# --- how a run gets its slot ------------------------------------------------------------------------------------------
# ``turn.json`` of the attempt has the resources that it took: its GPUs and, in a sweep, its slot.


# The name under which runs that are of no sweep stand in line for GPUs.
_SINGLE = "single"


def wait_for_slot(
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
        turn_of_node_0 = wait_for_node_0(attempt, lambda: _read_turn(attempt), give_up, "it was this run's turn")
        if turn_of_node_0 is not None:
            set_local_gpus(turn_of_node_0.get("gpus", ()))
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
        slot = None if share.slot is None else str(share.slot.relative_to(folder))
        try:
            write_json(attempt.turn, {"gpus": share.gpus, "slot": slot})
        except OSError as error:
            raise PathError(f"cannot write {attempt.turn}: {describe_os_error(error)}") from error
    return held


def gpus_of_account(host: str) -> Path | None:
    """What the local runs of this account lock on a machine to use GPUs, whatever their runs root.

    Args:
        host: the name of the machine, since others may have the same home directory.

    Returns:
        A directory; None if none can be used: then GPUs are locked in the runs root.
    """
    with contextlib.suppress(PathError, OSError, RuntimeError):
        folder = make_directory(cache_directory() / "gpus" / host, private=True)
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
    for path in {Path(values[ATTEMPT_DIR]) for values in marked_processes((ATTEMPT_DIR,)).values()}:
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


def _read_turn(attempt: AttemptDir) -> dict[str, Any] | None:
    """What a run has, once node 0 has written it. Raises PathError."""
    return read_json(attempt.turn, types={"gpus": "Sequence[str]", "slot": "str | None"})
