"""Showing runs in MLflow: what is new is mirrored, and a server on this machine shows the store."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from slurmtrain.errors import NotAvailable, RunNotFound, SlurmtrainError, TrackingError
from slurmtrain.ops.shared.find import choose_all
from slurmtrain.ops.shared.interrupt import StopSignal
from slurmtrain.ops.shared.mirroring import MirrorOutcome, mirror_runs
from slurmtrain.ops.shared.observe import Observed, observe
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.system.files import describe_os_error
from slurmtrain.system.owned_files import user_name
from slurmtrain.tracking.to_mlflow.server import RunningServer, is_server, page_address, run_page, runs_page, serve

# How often a page that is open gets new points, in seconds.
EVERY_S = 15.0
_POLL_S = 0.5
_SSH_PORT = "22"


@dataclass(frozen=True, slots=True)
class Page:
    """A page of MLflow: the URI of the ``store`` that has it, and its ``path`` on a server of this store."""

    store: str
    path: str

    @property
    def address(self) -> str:
        """The page on a server that runs already; empty if the store has none."""
        return page_address(self.store, self.path) if is_server(self.store) else ""


def mirror_new(workspace: Workspace, *, wait: bool = True) -> tuple[Observed, MirrorOutcome]:
    """Observe all runs, and send what is new in them to their tracking stores.

    Args:
        workspace: Where the runs are.
        wait: Wait for another command that is sending; otherwise, nothing is sent then.
    """
    observed = observe(workspace, ask_slurm=False)
    return observed, mirror_runs(workspace, observed.runs.fetch(observed.runs.index), wait=wait)


def find_page(workspace: Workspace, observed: Observed, name: str | None) -> Page:
    """The page of a run, or the list of runs in their experiment.

    Args:
        workspace: Where the runs are.
        observed: The runs, after they have been mirrored.
        name: A run, for its own page; a name that several runs have, a sweep, or a pattern, for a list of these; None:
            the list of runs in the experiment of the newest.

    Raises:
        RunNotFound: There is no such run.
        NotAvailable: None of them is in MLflow.
        TrackingError: Their store cannot be read.
    """
    from slurmtrain.tracking.to_mlflow.mlflow_tracker import MlflowTracker

    chosen = runs_to_show(workspace, observed, name)
    sent = {run_id: of_run["mlflow"] for run_id, of_run in workspace.store.sent().items() if "mlflow" in of_run}
    listed = workspace.store.listed(chosen)
    ids = {run_id: listed[run_id].row["mlflow_run_id"] for run_id in chosen if run_id in sent}
    newest = next((run_id for run_id in reversed(chosen) if ids.get(run_id)), None)
    if newest is None:
        runs = f"run {chosen[0]} is not" if len(chosen) == 1 else f"none of these {len(chosen)} runs is"
        raise NotAvailable(f"{runs} in MLflow: it has not started yet, or tracking.mlflow.enabled is false in its spec")
    store = sent[newest].uri
    experiment, title = MlflowTracker({"uri": store}, workspace.root).experiment_of(ids[newest])
    if len(chosen) == 1:
        return Page(store, run_page(experiment, ids[newest]))
    # By default an experiment is called like its runs: its whole list has them.
    if name in (None, title):
        return Page(store, runs_page(experiment))
    return Page(store, runs_page(experiment, [ids[run] for run in chosen if ids.get(run) and sent[run].uri == store]))


def runs_to_show(workspace: Workspace, observed: Observed, name: str | None) -> Sequence[str]:
    """The runs of the ``workspace``, as ``observed``, that a ``name`` refers to, oldest first; None: all.

    Raises RunNotFound.
    """
    if not len(observed.runs):
        raise RunNotFound(f"there are no runs in {workspace.root.path}; 'slurmtrain submit' starts one")
    return sorted(observed.runs.index) if name is None else choose_all(workspace, observed.runs, [name])


@contextlib.contextmanager
def show_page(
    workspace: Workspace, page: Page, host: str, port: int, occupied: Callable[[int, int], None]
) -> Iterator[tuple[RunningServer, str]]:
    """Start a server for the page's store, and yield it with the page's address.

    Args:
        workspace: Where the runs are.
        page: The page.
        host: The address that the server listens on.
        port: Its port or, if that is in use, the next free one.
        occupied: Called with ``port`` and the port that is used instead.

    Raises:
        NotAvailable: A server cannot show this store.
        TrackingError: The server does not start.
    """
    with serve(page.store, workspace.root, host, port, occupied) as server:
        yield server, page_address(server.uri, page.path)


def keep_mirroring(workspace: Workspace, server: RunningServer, warn: Callable[[str], None], stop: StopSignal) -> None:
    """Send what is new to the tracking stores every so often, until told to stop.

    Args:
        workspace: Where the runs are.
        server: The server.
        warn: Called with each problem, once.
        stop: Ends it.

    Raises:
        TrackingError: The server has ended.
    """
    reported: set[str] = set()
    due = time.monotonic() + EVERY_S
    while not stop.wait(_POLL_S):
        if server.ended:
            raise TrackingError(f"the MLflow server has ended: {server.last_line}")
        if time.monotonic() < due:
            continue
        # A new workspace: the registry may have been rebuilt meanwhile.
        again = Workspace(workspace.config)
        try:
            problems = mirror_new(again, wait=False)[1].problems
        except SlurmtrainError as error:
            problems = [str(error)]
        except OSError as error:
            problems = [f"{error.filename or workspace.root.path}: {describe_os_error(error)}"]
        finally:
            again.close()
        for problem in problems:
            if problem not in reported:
                reported.add(problem)
                warn(problem)
        # From the end: a slow store gets a pause, too.
        due = time.monotonic() + EVERY_S


def has_browser(environ: Mapping[str, str]) -> bool:
    """Whether this session has a screen where a browser can open a page of this machine."""
    return "SSH_CONNECTION" not in environ and any(environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY"))


def tunnel(environ: Mapping[str, str], server: RunningServer) -> str:
    """The command for the user's own machine that lets its browser reach a server here; empty unless this is ssh."""
    connection = environ.get("SSH_CONNECTION", "").split()
    if not connection:
        return ""
    # CLIENT CLIENT_PORT SERVER SERVER_PORT (ssh(1)).
    port = f" -p {connection[3]}" if connection[3:] and connection[3] != _SSH_PORT else ""
    return f"ssh -N -L {server.port}:{server.place}{port} {user_name(os.getuid())}@{socket.gethostname()}"
