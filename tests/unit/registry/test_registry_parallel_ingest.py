"""Rebuilding the registry in several processes, any of which may be killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from helpers.simulated_run import SimulatedRun
from helpers.workspaces import make_workspace

from slurmtrain.model.run.ids import run_id
from slurmtrain.ops import registry_care
from slurmtrain.ops.rebuild import rebuild
from slurmtrain.ops.shared import observe as observing
from slurmtrain.ops.shared.observe import observe
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.registry import parallel_ingest

IDS = [run_id(1_700_000_000_000 + number, number) for number in range(8)]
# Already these few runs are read by two processes, two runs at a time.
FEW, BATCH, PROCESSES = 0, 2, 2
ENDS_S = 20.0
# Rebuilds a registry, and stops in the middle, after a line with the ids of the processes that read.
REBUILD = f"""
import sys, time
from pathlib import Path
import psutil
from slurmtrain.config import Config
from slurmtrain.ops.rebuild import rebuild
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.registry import parallel_ingest

parallel_ingest.FEW, parallel_ingest._BATCH, parallel_ingest._MOST_PROCESSES = {FEW}, {BATCH}, {PROCESSES}

def show(done, total):
    if done == 4:
        print(*(each.pid for each in psutil.Process().children()), flush=True)
        time.sleep(3600)

runs = Path(sys.argv[1])
rebuild(Workspace(Config(runs=runs, executor=None, registry=runs / "registry.db", mlflow_uri=None)), show)
"""


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workspace:
    """Runs that have failed, of which the registry says something else."""
    monkeypatch.setattr(parallel_ingest, "FEW", FEW)
    monkeypatch.setattr(parallel_ingest, "_BATCH", BATCH)
    monkeypatch.setattr(parallel_ingest, "_MOST_PROCESSES", PROCESSES)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(PROCESSES)))
    workspace = make_workspace(tmp_path / "runs")
    for each in IDS:
        SimulatedRun(workspace.root.run(each)).created().submitted().started().crashed()
    observe(workspace, ask_slurm=False)
    with workspace.store.begin() as transaction:
        transaction.set_cancelled(IDS, 1.0)
    return workspace


def states(workspace: Workspace) -> set[str]:
    """The states of all runs, as a command sees them that reads nothing."""
    store = Workspace(workspace.config).store
    return {run.state for run in store.load_all(store.ids()).values()}


def own_readers() -> list[psutil.Process]:
    """The processes that read for this one."""
    return [each for each in psutil.Process().children() if any("reader_process" in word for word in each.cmdline())]


@contextmanager
def half_rebuilt(workspace: Workspace) -> Iterator[tuple[psutil.Process, list[psutil.Process]]]:
    """A command that is in the middle of a rebuild, and the processes that read for it; all are killed at the end."""
    command = [sys.executable, "-c", textwrap.dedent(REBUILD), str(workspace.root.path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        readers = [psutil.Process(int(pid)) for pid in process.stdout.readline().split()]
        try:
            yield psutil.Process(process.pid), readers
        finally:
            process.kill()
            for each in psutil.wait_procs(readers, timeout=ENDS_S)[1]:
                each.kill()


def test_a_rebuild_that_is_killed_leaves_no_process_and_is_repeated_by_the_next(workspace: Workspace) -> None:
    with half_rebuilt(workspace) as (command, readers):
        assert len(readers) == PROCESSES
        command.send_signal(signal.SIGKILL)
        assert psutil.wait_procs(readers, timeout=ENDS_S)[1] == []
    assert states(workspace) == {"cancelled"}  # the old registry
    rebuild(Workspace(workspace.config))
    assert states(workspace) == {"failed"}
    assert registry_care.check(Workspace(workspace.config), deep=True, show=lambda _done, _total: None) == []


def test_a_rebuild_reads_itself_what_a_killed_process_was_to_read(workspace: Workspace) -> None:
    def kill(count: int, _total: int) -> None:
        if count == BATCH:
            readers = own_readers()
            assert len(readers) == PROCESSES
            for each in readers:
                each.kill()
                each.wait()

    rebuild(workspace, kill)
    assert states(workspace) == {"failed"}
    assert registry_care.check(Workspace(workspace.config), deep=True, show=lambda _done, _total: None) == []
    assert own_readers() == []


def test_many_new_runs_are_read_by_several_processes(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = workspace.root.run(IDS[3])
    (broken.journals / "odd-1.jsonl").write_bytes(b"no record\n")
    with workspace.store.begin() as transaction:
        transaction.remove(IDS)
    monkeypatch.setattr(observing, "_FEW", 3)
    observed = observe(workspace, ask_slurm=False)
    assert [each for each, _ in observed.garbage] == [broken.id]
    assert {run.state for run in observed.runs.fetch(IDS).values()} == {"failed"}
    assert registry_care.check(Workspace(workspace.config), deep=True, show=lambda _done, _total: None) == []
