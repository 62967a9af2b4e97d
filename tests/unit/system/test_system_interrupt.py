"""Commands that are interrupted: what they have begun they end, and then what is left to do."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Mapping

import pytest
from helpers.fakeslurm import SlurmCommands, squeue_line
from helpers.simulated_run import RUN_ID
from helpers.workspaces import build_run

from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.ops.watch import wait
from slurmtrain.registry.rows import Listed
from slurmtrain.system.process import StopSignal


def test_a_signal_ends_a_rest_at_once_and_handlers_are_as_they_were_before() -> None:
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    with StopSignal() as stop:
        signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGINT))
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        try:
            assert stop.wait(3600)
        finally:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
        assert stop.raised is signal.SIGINT
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before
    assert not StopSignal().raised


def test_a_rest_that_nobody_ends_lasts_as_long_as_it_should() -> None:
    with StopSignal() as stop:
        began = time.monotonic()
        assert not stop.wait(0.05)
        assert time.monotonic() - began >= 0.05


def test_outside_the_main_thread_signals_are_left_alone() -> None:
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    during: list[object] = []

    def work() -> None:
        with StopSignal() as stop:
            during.extend([signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT), stop.wait(0.01)])

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert during == [*before, False]
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


def test_who_waits_for_a_run_is_done_with_its_look_at_it_when_a_signal_has_come(
    workspace: Workspace, slurm: SlurmCommands
) -> None:
    build_run(workspace).submitted()
    slurm.replies("squeue", squeue_line("7"))
    states: list[str] = []
    with StopSignal() as stop:

        def interrupt(runs: Mapping[str, Listed]) -> None:
            os.kill(os.getpid(), signal.SIGINT)
            states.append(runs[RUN_ID].state)

        completed, synced = wait(workspace, [RUN_ID], interrupt, stop)
    assert (completed, states, synced.observed.runs[RUN_ID].state) == (False, ["pending"], "pending")
    # The registry is free: what is to be done next can be written.
    with workspace.store.begin() as writing:
        writing.clear()
