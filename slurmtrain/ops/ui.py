"""Showing runs in MLflow: a process sends what is new, and a server on this machine shows the store.

The server starts, and the process sends the runs that were asked for, at the same time, since each takes seconds. The
page can be opened once both are done; the process then goes on with all other runs.

Run as a program, this module is that process. Its orders are a line of JSON on standard input, and its answers lines on
standard output. It ends when its standard input does, after the run that it is sending: whatever ends the command that
has started it ends this process, too.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from slurmtrain.config import load_config
from slurmtrain.errors import NotAvailable, PathError, RunNotFound, SlurmtrainError, TrackingError
from slurmtrain.ops.shared.find import choose_all
from slurmtrain.ops.shared.mirroring import MirrorOutcome, has_begun, mirror_runs
from slurmtrain.ops.shared.next_attempts import current_plan
from slurmtrain.ops.shared.observe import Observed, observe
from slurmtrain.ops.shared.trackers import MLFLOW, mlflow_uri
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.system.child_process import HelperProcess
from slurmtrain.system.files import describe_os_error_at
from slurmtrain.system.inherited import current_directory
from slurmtrain.system.process import StopSignal
from slurmtrain.tracking.to_mlflow.database import sqlite_file
from slurmtrain.tracking.to_mlflow.mlflow_runs import flatten_sweep
from slurmtrain.tracking.to_mlflow.rest_client import RestClient
from slurmtrain.tracking.to_mlflow.sending import SWEEP_TAG
from slurmtrain.tracking.to_mlflow.server import RunningServer, is_server, page_address, run_page, runs_page, serve

if TYPE_CHECKING:
    from slurmtrain.registry.cells import Sent
    from slurmtrain.registry.rows import Listed

_POLL_S = 0.05
# How long the page waits for more of the runs that were asked for, once it could be opened with some of them: MLflow's
# page looks for new runs every 30 seconds.
_PATIENCE_S = 2.0
_SENDS_NO_MORE = "the process that sends to trackers has ended: 'slurmtrain sync' sends what is new"
# How many runs MLflow's page draws at first.
_FIRST_PAGE = 10
# With the ids of more runs, an address would get longer than browsers and terminals take.
_FILTERED = 50
Show = Callable[[int, int, Sequence[str]], None]
"""A callback that takes how many runs were sent, how many are to be, and new problems."""


@dataclass(frozen=True, slots=True)
class Shown:
    """What a page shows: these runs, newest first.

    ``store``: the URI of the MLflow store of the newest. ``sweep``: the id of the sweep, if they are all of its runs.
    ``is_all``: the page shows older runs of their experiment, too.
    """

    runs: Sequence[str]
    store: str
    sweep: str = ""
    is_all: bool = False


def choose_shown(workspace: Workspace, observed: Observed, name: str | None) -> Shown:
    """What is to be shown.

    Args:
        workspace: Where the runs are.
        observed: The runs.
        name: A run, for its own page; a sweep, or a pattern, for the curves of these runs; None: all runs in the
            experiment of the newest.

    Raises:
        RunNotFound: There is no such run.
        NotAvailable: None of them is to be in MLflow, or has started.
    """
    if not len(observed.runs):
        raise RunNotFound(f"there are no runs in {workspace.root.path}; 'slurmtrain submit' starts one")
    runs = observed.runs
    chosen = sorted(runs.index if name is None else choose_all(workspace, runs, [name]), reverse=True)
    sent = workspace.store.sent()
    for run_id in chosen:
        if store := _store_of(workspace, runs[run_id], sent.get(run_id, {})):
            sweep = runs[run_id].sweep or ""
            swept = {other for other, row in runs.named([sweep]).items() if row.sweep == sweep}
            is_sweep = len(chosen) > 1 and set(chosen) == swept
            return Shown(chosen if name else chosen[:_FIRST_PAGE], store, sweep if is_sweep else "", name is None)
    raise NotAvailable(
        f"MLflow has nothing of {describe_runs(chosen)}: it has not started yet, "
        "or tracking.mlflow.enabled is false in its spec"
    )


def describe_runs(run_ids: Sequence[str]) -> str:
    """These runs, in a sentence."""
    return f"run {run_ids[0]}" if len(run_ids) == 1 else f"any of these {len(run_ids)} runs"


def _store_of(workspace: Workspace, listed: Listed, sent: Mapping[str, Sent]) -> str:
    """The MLflow store that has a run, or is to have it; empty if there is none."""
    if MLFLOW in sent and listed.row["mlflow_run_id"]:
        return sent[MLFLOW].uri
    if listed.unreadable or listed.row["deleted_at"] is not None or not has_begun(listed.row):
        return ""
    with contextlib.suppress(PathError):
        run = workspace.store.load(listed.id)
        if run is not None and (plan := current_plan(workspace.root.run(run.id), run)).spec.tracking.mlflow.enabled:
            return mlflow_uri(workspace, plan)
    return ""


class Display:
    """What shows runs: the process that sends them, and the server, unless their store is one that runs already."""

    def __init__(
        self, workspace: Workspace, shown: Shown, sending: SendingProcess, server: RunningServer | None
    ) -> None:
        """Both were started a moment ago.

        Args:
            workspace: Where the runs are.
            shown: The runs to show.
            sending: The process that sends them.
            server: The server on this machine; None: their store has its own.
        """
        self._workspace = workspace
        self._shown = shown
        self._reported: set[str] = set()
        self._sending = sending
        self.server = server
        """The server on this machine, if there is one."""

    def address(self, stop: StopSignal, show: Show) -> str:
        """The address of the page, once it can be opened; empty if the wait was stopped.

        Args:
            stop: Ends the wait.
            show: Is shown how many runs were sent, and each problem, once.

        Raises:
            NotAvailable: The runs are not in MLflow.
            TrackingError: The server does not start, or their store cannot be read.
        """
        if self.server is not None:
            # A store that does not exist is made by the process that sends, before the server opens it.
            file, uri = sqlite_file(self._shown.store), self._shown.store
            sent = self._workspace.store.sent().values() if file is None else ()
            if any(each.uri == uri for of in sent for each in of.values()) if file is None else file.exists():
                self.server.open_store()
        status: SendingStatus | None = None
        present: Sequence[str] = ()
        opens_at = math.inf
        while not stop.wait(_POLL_S):
            self._look(show)
            if status is not self._sending.status:
                status, present = self._sending.status, self._present()
            is_complete = status.urgent_left == 0 or len(present) == len(self._shown.runs) or self._sending.ended
            if is_complete and not present:
                raise NotAvailable(f"MLflow has nothing of {describe_runs(self._shown.runs)}")
            if self.server is not None:
                if present:
                    self.server.open_store()
                if not self.server.answers():
                    continue
            opens_at = min(opens_at, time.monotonic() + _PATIENCE_S)
            if present and (is_complete or time.monotonic() >= opens_at):
                return self._address_of(present)
        return ""

    def follow(self, stop: StopSignal, show: Show, *, forever: bool) -> int:
        """Go on until told to stop; returns how many runs were sent last.

        Args:
            stop: Ends it.
            show: As in :meth:`address`.
            forever: Also after all that was new has been sent.

        Raises:
            TrackingError: The server has ended.
        """
        while forever or not (self._sending.status.over or self._sending.ended):
            if stop.wait(_POLL_S):
                break
            self._look(show)
        return self._sending.status.sent

    def _look(self, show: Show) -> None:
        """Read what the process has said, and look whether the server goes on."""
        self._sending.read()
        status = self._sending.status
        problems = [*status.problems, *([_SENDS_NO_MORE] if self._sending.ended else [])]
        show(status.sent, status.total, [each for each in problems if each not in self._reported])
        self._reported.update(problems)
        if self.server is not None and self.server.ended:
            raise TrackingError(f"the MLflow server for {self._shown.store} has ended: {self.server.last_line}")

    def _present(self) -> list[str]:
        """The ids in MLflow of the runs to show that are there, newest first."""
        listed = self._workspace.store.listed(self._shown.runs)
        ids = (listed[run_id].row["mlflow_run_id"] for run_id in self._shown.runs if run_id in listed)
        return [mlflow_id for mlflow_id in ids if mlflow_id]

    def _address_of(self, present: Sequence[str]) -> str:
        """The address of the page that shows these runs, by their ids in MLflow. Raises TrackingError."""
        shown = self._shown
        try:
            if self.server is not None:
                client: Any = RestClient(self.server.uri, {}, proxies=False)
            else:
                # It knows all ways to log in. Importing mlflow takes a second.
                from slurmtrain.tracking.to_mlflow.mlflow_tracker import MlflowTracker

                client = MlflowTracker({"uri": shown.store}, self._workspace.root).client
            experiment = str(client.get_run(present[0]).info.experiment_id)
            if shown.sweep:
                flatten_sweep(client, experiment, shown.sweep)
        except SlurmtrainError:
            raise
        except Exception as error:
            raise TrackingError(f"the MLflow store {shown.store} does not show run {present[0]}: {error}") from error
        path = runs_page(experiment)
        if shown.sweep:
            path = runs_page(experiment, f"tags.`{SWEEP_TAG}` = '{shown.sweep}'")
        elif not shown.is_all and len(shown.runs) == 1:
            path = run_page(experiment, present[0])
        elif not shown.is_all and len(present) <= _FILTERED:
            path = runs_page(experiment, f"attributes.run_id IN ({', '.join(map(repr, present))})")
        return page_address(shown.store if self.server is None else self.server.uri, path)


@contextlib.contextmanager
def displaying(
    workspace: Workspace, shown: Shown, host: str, port: int, occupied: Callable[[int, int], None]
) -> Iterator[Display]:
    """Send what is new, and start a server for the store, as long as this context lasts.

    Args:
        workspace: Where the runs are.
        shown: The runs to show.
        host: The address that the server listens on.
        port: Its port or, if that is in use, the next free one.
        occupied: Called with ``port`` and the port that is used instead.

    Raises:
        NotAvailable: A server cannot show this store.
    """
    with contextlib.ExitStack() as stack:
        server = None
        if not is_server(shown.store):
            server = stack.enter_context(serve(shown.store, workspace.root, host, port, occupied))
        sending = SendingProcess(workspace, shown.runs)
        stack.callback(sending.end)
        yield Display(workspace, shown, sending, server)


# How often a page that is open gets new points, in seconds.
EVERY_S = 15.0
_NICE = 10
# Of its answers, at a time.
_CHUNK = 1 << 16


@dataclass(frozen=True, slots=True)
class SendingStatus:
    """What the process says after each run.

    ``urgent_left``: how many of the runs that come first are still to be sent. ``sent`` of ``total`` runs were sent in
    this round; ``over``: it has ended. ``problems``: its problems so far.
    """

    urgent_left: int
    sent: int = 0
    total: int = 0
    over: bool = False
    problems: list[str] = field(default_factory=list)


class SendingProcess:
    """Sends what is new in all runs, again and again, as long as this process does not end it."""

    def __init__(self, workspace: Workspace, urgent: Sequence[str]) -> None:
        """Start it.

        Args:
            workspace: Where the runs are.
            urgent: The ids of runs that it sends before all others.
        """
        config = workspace.config
        orders = {"runs": str(config.shared_root or config.runs), "urgent": list(urgent)}
        # Ctrl-C is for the command that the user has typed, which ends this process then.
        blocked = (signal.SIGINT,)
        line = f"{json.dumps(orders)}\n".encode()
        self._process = HelperProcess("slurmtrain.ops.ui", line, os.environ, blocked, answers=True)
        self._unread = b""
        self.status = SendingStatus(len(urgent))
        """Its last answer."""
        self.ended = False
        """Whether it has ended by itself, which it never should."""

    def read(self) -> None:
        """Read its answers until now."""
        while not self.ended and select.select([self._process.answers], [], [], 0)[0]:
            chunk = os.read(self._process.answers.fileno(), _CHUNK)
            self.ended = not chunk
            *lines, self._unread = (self._unread + chunk).split(b"\n")
            if lines:
                self.status = SendingStatus(**json.loads(lines[-1]))

    def end(self) -> None:
        """End it. The next command sends the rest."""
        self._process.end(0)


def send_forever() -> None:
    """Execute the orders on standard input."""
    orders = json.loads(sys.stdin.buffer.readline())
    # MLflow, and plugins of it, may print something.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    urgent, nice = set(orders["urgent"]), _NICE

    def say(status: SendingStatus) -> None:
        nonlocal nice
        print(json.dumps(asdict(status)), file=answers, flush=True)
        if _wait(0):
            raise SystemExit
        if not status.urgent_left:
            # From now on, the page and its server come first.
            os.nice(nice)
            nice = 0

    def report(left: Sequence[str], total: int, so_far: MirrorOutcome) -> None:
        say(SendingStatus(len(urgent.intersection(left)), total - len(left), total, False, so_far.problems))

    pause_s = 0.0
    while not _wait(pause_s):
        outcome = MirrorOutcome()
        # A new workspace: the registry may have been rebuilt meanwhile.
        workspace = Workspace(load_config(cwd=current_directory(), environ=os.environ, runs=orders["runs"]))
        try:
            runs = observe(workspace, ask_slurm=False).runs
            outcome = mirror_runs(workspace, runs.fetch(runs.behind()), first=urgent, report=report)
        except (SlurmtrainError, OSError) as error:
            outcome.problems.append(describe_os_error_at(error) if isinstance(error, OSError) else str(error))
        finally:
            workspace.close()
        say(SendingStatus(0, len(outcome.mirrored), len(outcome.mirrored), True, [*outcome.problems, *outcome.notes]))
        # From the end: a slow store gets a pause, too.
        pause_s = EVERY_S


def _wait(seconds: float) -> bool:
    """Wait so long; returns whether the orders have ended."""
    return bool(select.select([sys.stdin.buffer], [], [], seconds)[0])


if __name__ == "__main__":
    # Whoever has started it may have been killed.
    with contextlib.suppress(BrokenPipeError):
        send_forever()
