"""All processes that the ranks of a node have started: which ones hear a stop signal, and how all of them are ended.

The agent is a child subreaper, so whatever a rank starts remains a descendant of the agent, even a daemon whose parents
have ended. Each rank begins a session, and no process can join an existing session, so descendants in the agent's own
session are its helpers, and all others belong to ranks. Containers that a daemon starts for a rank do not.

Who hears a stop signal:

* The ranks themselves, but not their children: if a worker of torch's data loader ends, it raises an exception in its
  rank, perhaps in the middle of a save; and a launcher such as torchrun passes the signal on by itself.
* The children of a shell: ``bash -c 'prepare && python train.py | tee log'`` does not pass signals on.
* Orphans: a rank that does not handle the signal dies of it, and the processes that it leaves may be the actual
  training.

Of a pipeline only the first process hears it at once, the next one when nothing writes into its input any more: a
program whose ``tee`` has ended would fail as soon as it prints something.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterable, Sequence

from slurmtrain.runtime.checkpoint.writer_process import PUBLISHING
from slurmtrain.runtime.environment.variables import HELPER
from slurmtrain.runtime.setup.helpers import HELPERS
from slurmtrain.system.process import (
    Entry,
    descend,
    has_variable,
    identity_of,
    name_of,
    pipe_of,
    program_of,
    read_table,
)

# Programs that wait for their children, and do not pass signals on.
SHELLS = frozenset(("ash", "bash", "busybox", "csh", "dash", "fish", "ksh", "mksh", "sh", "tcsh", "zsh"))
_POLL_S = 0.02
# How often to look for orphans to reap, at most: looking at all processes costs milliseconds.
_REAP_S = 1.0
# How long to go on killing. A process that has been killed ends at once, unless it is in a system call that cannot be
# interrupted, such as one to a file server that does not answer.
_KILL_S = 10.0


class RankProcesses:
    """The processes of this node's ranks, from the agent's point of view."""

    def __init__(self, *, besides: bool = False) -> None:
        """The agent must be a subreaper (:func:`~slurmtrain.system.process.become_subreaper`).

        ``besides``: the node runs other processes beside its ranks, which have the variable ``HELPER``.
        """
        self._besides = besides
        self._agent = os.getpid()
        self._session = os.getsid(0)
        self._ranks: frozenset[int] = frozenset()
        self._asked_already: set[tuple[int, int]] = set()
        self._reap_at = 0.0
        self.has_shell = False
        """Whether one of the ranks that were asked to stop is a shell."""

    def started(self, ranks: Iterable[int]) -> None:
        """Take note of the process ids of the ranks, whose exit codes are collected elsewhere."""
        self._ranks = frozenset(ranks)

    def running(self) -> list[Entry]:
        """The processes that have not ended, parents before their children."""
        return [entry for entry in self._entries() if not entry.ended]

    def have_orphans(self) -> bool:
        """Whether ranks that have ended have left processes behind."""
        return any(entry.parent == self._agent and entry.pid not in self._ranks for entry in self.running())

    def ask(self, number: signal.Signals) -> bool:
        """Send a stop signal to the processes that are to hear it and have not yet. Call it repeatedly until they end.

        Returns whether any process that was asked is still running.
        """
        running = self.running()
        asked_run = any(_key(entry) in self._asked_already for entry in running)
        new = [
            entry for entry in listeners(running, self._agent, self._is_shell) if _key(entry) not in self._asked_already
        ]
        first = [entry for entry in new if not _is_fed(entry, running)]
        # If each waits for another, as with a coprocess, none is first.
        for entry in first or ([] if asked_run else new):
            self._asked_already.add(_key(entry))
            asked_run = identity_of(entry).send(number) or asked_run
        return asked_run

    def wait(self, *, timeout_s: float, only: Callable[[Entry], bool] = lambda _entry: True) -> bool:
        """Wait until none of these is running any more; returns whether that is so.

        ``timeout_s``: how many seconds to wait at most. ``only``: which processes count.
        """
        deadline = time.monotonic() + timeout_s
        while any(map(only, self.running())):
            if time.monotonic() >= deadline:
                return False
            self._reap_orphans()
            time.sleep(_POLL_S)
        self._reap_orphans()
        return True

    def kill(self, *, spare: Callable[[Entry], bool] = lambda _entry: False) -> tuple[list[str], list[str]]:
        """Kill all of them, in passes until a pass finds none: any of them may start others meanwhile.

        ``spare``: the processes that are not killed. Returns descriptions of the killed processes, and of processes
        that still run: these are in a system call that cannot be interrupted, and end as soon as it returns.
        """
        killed: dict[tuple[int, int], str] = {}
        deadline = time.monotonic() + _KILL_S
        while running := [entry for entry in self.running() if not spare(entry)]:
            if time.monotonic() >= deadline:
                return list(killed.values()), [describe(entry) for entry in running]
            for entry in running:
                killed.setdefault(_key(entry), describe(entry))
                identity_of(entry).send(signal.SIGKILL)
            self._reap_orphans()
            time.sleep(_POLL_S)
        self._reap_orphans()
        return list(killed.values()), []

    def reap(self) -> None:
        """Reap orphans that have ended. It costs one system call if nothing has; call it as often as you like."""
        try:
            has_ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:
            return
        if not has_ended or time.monotonic() < self._reap_at:
            return
        # What has ended may also be a rank or a helper of the agent, which somebody else reaps, perhaps never.
        self._reap_at = time.monotonic() + _REAP_S
        self._reap_orphans()

    def _reap_orphans(self) -> None:
        for entry in self._entries():
            if entry.ended and entry.parent == self._agent and entry.pid not in self._ranks:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(entry.pid, os.WNOHANG)

    def _is_shell(self, pid: int) -> bool:
        is_shell = program_of(pid) in SHELLS
        self.has_shell = self.has_shell or (is_shell and pid in self._ranks)
        return is_shell

    def _entries(self) -> list[Entry]:
        entries = [entry for entry in descend(read_table(), self._agent) if entry.session != self._session]
        if not self._besides:
            return entries
        # One that has ended shows no variables.
        return [each for each in entries if each.pid not in HELPERS and not has_variable(each.pid, HELPER)]


def listeners(running: Iterable[Entry], agent: int, is_shell: Callable[[int], bool]) -> list[Entry]:
    """The processes for which a stop signal is.

    ``running``: the processes of ranks, parents before their children. ``agent``: the process id of the agent, which is
    the parent of ranks and of orphans. ``is_shell``: whether the process with this id is a shell.
    """
    parents = {agent}
    hearing = []
    for entry in running:
        if entry.parent in parents:
            hearing.append(entry)
            if is_shell(entry.pid):
                parents.add(entry.pid)
    return hearing


def is_publishing(entry: Entry) -> bool:
    """Whether this process is just publishing a checkpoint, which takes a moment."""
    return name_of(entry.pid) == PUBLISHING


def describe(entry: Entry) -> str:
    """A process in a few words."""
    return f"{name_of(entry.pid) or 'a process'} (pid {entry.pid})"


def _is_fed(entry: Entry, running: Sequence[Entry]) -> bool:
    """Whether the input of this process is a pipe into which another one of these writes."""
    pipe = pipe_of(entry.pid, 0)
    return pipe is not None and any(
        pipe in (pipe_of(other.pid, 1), pipe_of(other.pid, 2)) for other in running if other.pid != entry.pid
    )


def _key(entry: Entry) -> tuple[int, int]:
    return (entry.pid, entry.start)
