"""What a rank does around the steps of a script, with a session and without.

It shows its progress, measures steps, writes metrics and events, and agrees with the other ranks on when to stop.
Nothing of it needs torch: a script without a session may train by another library.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from slurmtrain.errors import LaunchError
from slurmtrain.model.diagnosis.hang import PAUSE_S, Phase
from slurmtrain.model.experiment.launcher import RANKS
from slurmtrain.model.interruption.interval import Vote, steps_to_agreement
from slurmtrain.model.run.events.base import Payload
from slurmtrain.model.run.events.rank_events import RankMeasured, RankStopped
from slurmtrain.runtime.environment.node import Worker, this_worker
from slurmtrain.runtime.job import stacks
from slurmtrain.runtime.job.heartbeat import Pulse
from slurmtrain.runtime.job.metrics import MetricsFile, check_numbers, peak_memory, plain_number
from slurmtrain.runtime.job.signals import StopFlag
from slurmtrain.runtime.training.child_signals import ChildGuard
from slurmtrain.system.interpreter import leave_quickly
from slurmtrain.system.journal import Journal

# How long a pause may take unless the script says otherwise.
PAUSE = timedelta(seconds=PAUSE_S)
log = logging.getLogger("slurmtrain")
_SMOOTHING = 0.2
# Outside a job metrics go to Python's log, at most this often.
_LOG_EVERY_S = 1.0


class TrainingLoop:
    """A rank's reports of its training, and the stop requests that it hears of."""

    def __init__(self, worker: Worker) -> None:
        """``worker``: where this process runs."""
        self.step = 0
        """The number of finished steps, including earlier attempts'."""
        self._worker = worker
        self._flag = StopFlag()
        self._pulse = Pulse.open(worker.heartbeat, worker.local_rank)
        self._journal: Journal | None = None
        self._metrics = StepMetrics()
        self._guard: ChildGuard | None = None
        # The time of a step, smoothed, and of it what is this rank's own; 0: unknown.
        self._step_s = self._own_s = 0.0
        self._step_began = 0.0
        self._interlude_began: float | None = None
        # After how many steps ranks agree again, and after which.
        self._gap, self._agree_at = 1, 0

    def _begin_process(self) -> None:
        """Prepare this process for its end, and for questions of its agent."""
        leave_quickly()
        stacks.answer()

    def _hear_signals(self) -> None:
        """Take note of stop signals from now on, which only the main thread can, and keep them from child processes."""
        if threading.current_thread() is threading.main_thread():
            self._flag.install(self._worker.stop_signal, forced_exit_s=self._worker.forced_exit_s)
        self._guard = ChildGuard()

    # --- steps --------------------------------------------------------------------------------------------------------

    def _note_time(self, steps: int = 1) -> None:
        """Note that so many ``steps`` end now, and the next one begins."""
        now = time.monotonic()
        if steps > 0:
            took = (now - self._step_began) / steps
            self._step_s = took if not self._step_s else (1 - _SMOOTHING) * self._step_s + _SMOOTHING * took
        self._step_began = now

    def _beat(self, phase: Phase) -> None:
        self._pulse.beat(self.step, phase, self._step_s, self._own_s)

    def _begin_pause(self, activity: str, limit: timedelta) -> None:
        """Show an ``activity`` that may take longer than a step, up to ``limit``, until :meth:`_end_interlude`."""
        self._interlude_began = time.monotonic()
        self._pulse.pause(self.step, activity, limit.total_seconds(), self._step_s, self._own_s)

    def _begin_save(self) -> None:
        """Show a save, until :meth:`_end_interlude`."""
        self._interlude_began = time.monotonic()
        self._beat(Phase.SAVING)

    def _end_interlude(self) -> None:
        """Leave the time of a pause or save that ends now, if there was one, out of the time of the step."""
        if self._interlude_began is None:
            return
        took, self._interlude_began = time.monotonic() - self._interlude_began, None
        self._step_began += took
        if self._pulse.phase is Phase.SAVING:
            self._pulse.saved(took)

    # --- stops --------------------------------------------------------------------------------------------------------

    def _own_vote(self, step_s: float, *, saving: bool = False) -> Vote:
        """What this rank wants: a stop if it has received a signal; rank 0 says how soon to agree again.

        ``step_s``: seconds between two questions. ``saving``: whether a save is going on.
        """
        gap = steps_to_agreement(step_s, self._gap, saving=saving) if self._worker.rank == 0 else 0
        return Vote(stop=self._flag.raised is not None, gap=gap)

    def _journal_stop(self) -> None:
        """Journal that the run can continue from the current step."""
        self._write(self._measured())
        self._write_first(RankStopped(step=self.step))

    def _measured(self) -> RankMeasured:
        """What this rank has needed since it was started."""
        peak_bytes, memory = peak_memory()
        return RankMeasured(peak_bytes=peak_bytes, memory=memory)

    # --- events -------------------------------------------------------------------------------------------------------

    def _write(self, event: Payload) -> None:
        if self._journal is not None:
            self._journal.write(event)

    def _write_first(self, event: Payload) -> None:
        """Journal what is an event of the run, which rank 0 does for all."""
        if self._worker.rank == 0:
            self._write(event)

    def _close_files(self) -> None:
        self._metrics.close()
        if self._journal is not None:
            self._journal.close()


class StepMetrics:
    """The metrics of the current step, collected until it is finished, then written as one line."""

    def __init__(self) -> None:
        self.latest: dict[str, Any] = {}
        """The latest value of each metric, by name."""
        self.pending: dict[str, Any] = {}
        """What has been logged since the last line."""
        self._file: MetricsFile | None = None
        self._logged_at = 0.0

    def open(self, path: Path) -> None:
        """Write to this file from now on, if there is none yet. Raises OSError."""
        if self._file is None:
            self._file = MetricsFile(path)

    def add(self, metrics: Mapping[str, Any]) -> None:
        """Add what a script has logged, by name. Raises TypeError for a value that is no number and no tensor.

        Tensors are read only when the step is finished, so as not to wait for a GPU earlier.
        """
        check_numbers(metrics)
        self.pending.update(metrics)

    def write(self, step: int) -> None:
        """Write a line for a finished ``step`` with what was added since the last one. Raises OSError, TypeError."""
        pending, self.pending = self.pending, {}
        self.latest.update(pending)
        if self._file is not None:
            self._file.write(step, pending)
        elif pending and time.monotonic() - self._logged_at >= _LOG_EVERY_S:
            self._logged_at = time.monotonic()
            text = " ".join(f"{name}={plain_number(name, value):.6g}" for name, value in pending.items())
            log.info("step %d %s", step, text)

    def close(self) -> None:
        """Close the file, if there is one."""
        if self._file is not None:
            self._file.close()


def check_limit(limit: timedelta, function: str) -> None:
    """Raise ValueError if the ``limit`` of a pause, which a script gives this ``function``, is not positive."""
    if limit <= timedelta(0):
        raise ValueError(f"{function} takes a positive limit, not {limit}")


def this_ranked_worker() -> Worker:
    """What this process knows about itself, from its environment, or else from its script's process group.

    Raises LaunchError if its rank cannot be known, or if it must not train: two processes that took themselves for the
    same rank would write to the same journal, and the same checkpoints.
    """
    worker = this_worker()
    if worker.launcher_restarts > 0:
        raise LaunchError(
            "the launcher has restarted this rank by itself (--max-restarts), and slurmtrain cannot tell it from the "
            "one before: leave the option out, slurmtrain restarts ranks (requeue.restarts_in_place)"
        )
    if worker.launched or worker.launcher == RANKS:
        return worker
    distributed = joined_group()
    if distributed is not None:
        rank = distributed.get_rank()
        return replace(
            worker,
            rank=rank,
            local_rank=rank - worker.first_rank,
            world_size=distributed.get_world_size(),
            launched=True,
        )
    if worker.expected > 1:
        raise LaunchError(
            f"it is not known which rank this process is: with 'launcher: {worker.launcher}' the command must start "
            "the ranks, as torchrun does, and set RANK, or call torch.distributed.init_process_group before slurmtrain"
        )
    return worker


def joined_group() -> Any:
    """torch.distributed, if this process has joined a process group; else None."""
    distributed = sys.modules.get("torch.distributed")
    is_joined = distributed is not None and distributed.is_available() and distributed.is_initialized()
    return distributed if is_joined else None
