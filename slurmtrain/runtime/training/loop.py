"""What a rank does around the steps of a script, with a session and without.

It shows its progress, measures steps, writes metrics and events, and agrees with the other ranks on when to stop.
Nothing of it needs torch: a script without a session may train by another library.

A process without a session has one :class:`Loop`. The functions that scripts call as ``slurmtrain.progress()`` and so
on, and the adapters in :mod:`slurmtrain.integrations` act on it. Outside a job they do nothing.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import operator
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import timedelta
from functools import cache
from typing import TYPE_CHECKING, Any, NoReturn

from slurmtrain.errors import LaunchError, UserError
from slurmtrain.model.diagnosis.hang import PAUSE_S, Phase
from slurmtrain.model.experiment.launcher import RANKS
from slurmtrain.model.interruption.exit_report import STOPPED
from slurmtrain.model.interruption.interval import Vote, steps_to_agreement
from slurmtrain.model.metrics.step_figures import Durations
from slurmtrain.model.run.events.base import Payload
from slurmtrain.model.run.events.rank_events import (
    RankMeasured,
    RankStopped,
    SessionStarted,
    TrainingCompleted,
    TrainingStarted,
)
from slurmtrain.runtime.environment.node import Worker, this_worker
from slurmtrain.runtime.job import stacks
from slurmtrain.runtime.job.heartbeat import Pulse
from slurmtrain.runtime.job.metrics import StepMetrics, peak_memory, plain_number
from slurmtrain.runtime.job.signals import STOP_SIGNALS, StopFlag
from slurmtrain.runtime.training.child_signals import ChildGuard
from slurmtrain.system.interpreter import leave_quickly
from slurmtrain.system.journal import Journal

if TYPE_CHECKING:
    from slurmtrain.runtime.job.process_group import RankGroup

# How long a pause may take unless the script says otherwise.
PAUSE = timedelta(seconds=PAUSE_S)
logger = logging.getLogger("slurmtrain")
# The weight of the newest step in the smoothed time of a step.
_SMOOTHING = 0.2
# When measures are journaled first, and then after twice the time again and again: a dozen times in a day.
_RECORD_S = 15.0


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
        # The time of all steps but the first.
        self._took = Durations()
        self._record_after_s, self._record_at = _RECORD_S, 0.0
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
            if self._pulse.phase is Phase.TRAINING:
                self._took.add(took)
            self._step_s = took if not self._step_s else (1 - _SMOOTHING) * self._step_s + _SMOOTHING * took
        self._step_began = now

    def _beat(self, phase: Phase) -> None:
        self._pulse.beat(self.step, phase, self._step_s, self._own_s)

    def _begin_pause(self, activity: str, limit: timedelta) -> None:
        """Show an ``activity`` that may take longer than a step, up to ``limit``, until :meth:`_end_interlude`."""
        self._interlude_began = time.monotonic()
        self._pulse.pause(self.step, activity, limit.total_seconds(), self._step_s, self._own_s)

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
        return RankMeasured(
            peak_bytes=peak_bytes,
            memory=memory,
            step_p50_s=self._took.quantile(0.5),
            step_p95_s=self._took.quantile(0.95),
        )

    def _record_measures(self) -> None:
        """Journal what was measured until now, if it is time to: a rank that is killed has no other occasion."""
        if not self._record_at:
            self._record_at = self._step_began + self._record_after_s
        elif self._step_began >= self._record_at:
            if self._journal is not None:
                self._journal.write(self._measured(), durable=False)
            self._record_after_s *= 2
            self._record_at = self._step_began + self._record_after_s
            self._note_time(0)

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


def check_limit(limit: timedelta, function: str) -> None:
    """Raise ValueError if the ``limit`` of a pause, which a script gives this ``function``, is not positive."""
    if limit <= timedelta(0):
        raise ValueError(f"{function} needs a positive limit, not {limit}")


def this_ranked_worker() -> Worker:
    """What this process knows about itself, from its environment, or else from its script's process group.

    Raises LaunchError if its rank cannot be known, or if it must not train: two processes that took themselves for the
    same rank would write to the same journal, and the same checkpoints.
    """
    worker = this_worker()
    if worker.launcher_restarts > 0:
        raise LaunchError(
            "the launcher restarted this rank itself (--max-restarts), and slurmtrain cannot tell it from the "
            "previous one: leave the option out; slurmtrain restarts ranks (requeue.restarts_in_place)"
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
            f"this process does not know its rank: with 'launcher: {worker.launcher}' the command must start the "
            "ranks and set RANK, as torchrun does, or call torch.distributed.init_process_group before slurmtrain"
        )
    return worker


def joined_group() -> Any:
    """torch.distributed, if this process has joined a process group; else None."""
    distributed = sys.modules.get("torch.distributed")
    is_joined = distributed is not None and distributed.is_available() and distributed.is_initialized()
    return distributed if is_joined else None


# --- what scripts without a session call ------------------------------------------------------------------------------


def stop_requested() -> bool:
    """Whether this run was asked to stop: by a preemption, its time limit, ``slurmtrain cancel``, and so on.

    Call it after each step, where the script can save::

        for step in range(first, total):
            train_step()
            slurmtrain.progress(step + 1, total)
            if slurmtrain.stop_requested():
                save(step + 1)
                slurmtrain.leave()

    All ranks must call it equally often, at the same points: they agree on the answer, so that all of them stop after
    the same step. They do so on a gloo group of their own, in one all-reduce about every 0.25 s; the calls in between
    cost nothing. Ranks that do not use ``torch.distributed`` decide for themselves. Once the answer is True, it stays.

    The first call, of this or of any other function of its kind, makes the process take note of stop signals instead
    of being ended by them, and keeps them from its data loader's workers. Make it in the main thread, before workers
    start. Outside a job the answer is False.
    """
    return current().stop_requested()


def progress(step: int, total: int | None = None) -> None:
    """Report that ``step`` steps are finished: for ``status``, and so that a hang is noticed.

    Call it on all ranks: once before the loop, with the step that training starts from, and after each step. It also
    writes the metrics that were logged since the last call. Outside a job it does nothing.

    Args:
        step: Finished steps, including earlier attempts'.
        total: The number of steps in the whole run. Once they are finished, exit code 0 completes the run even if a
            stop was requested.

    Raises:
        ValueError: ``step`` or ``total`` is not a whole number of steps.
        TypeError: A metric logged for this step is not one number.
    """
    loop = current()
    loop.progress(_count_of_steps(step), None if total is None else _count_of_steps(total))
    if total is not None and step >= total:
        loop.complete()


def log(metrics: Mapping[str, Any] | None = None, /, **more: Any) -> None:
    """Log metrics of the current step: ``slurmtrain.log(loss=loss)``, or ``slurmtrain.log({"val/loss": loss})``.

    Rank 0 writes them, with the step, when :func:`progress` says that the step is finished, or when the process ends;
    the other ranks return at once. It never waits for a network. Outside a job it does nothing.

    Args:
        metrics: Values by name, for names that are not identifiers.
        more: Values by name. If a name is logged more than once in a step, the last value counts.

    Raises:
        TypeError: A value is neither a number nor a one-element tensor.
    """
    current().log({**(metrics or {}), **more})


def pause(activity: str = "", limit: timedelta = PAUSE) -> contextlib.AbstractContextManager[None]:
    """Pause training for something that takes longer than a step, such as an evaluation or a save.

    For instance::

        with slurmtrain.pause("evaluation"):
            evaluate(model)

    Meanwhile neither this rank nor ranks that wait for it count as hanging. It needs no other ranks: rank 0 may pause
    alone. A stop takes effect after it. Outside a job it does nothing.

    Args:
        activity: What for.
        limit: After this time, 2 hours by default, the rank hangs after all, unless its main thread computes.

    Returns:
        A context manager.

    Raises:
        ValueError: ``limit`` is not positive.
    """
    check_limit(limit, "slurmtrain.pause()")
    return current().pause(activity, limit)


def leave() -> NoReturn:
    """Exit because a stop was requested and the state is saved: the run continues from there.

    All ranks must call it. Each waits until all have saved; then the stop is journaled.

    Raises:
        SystemExit: Always; the code is 75, outside a job too.
    """
    current().leave()


# --- the loop ---------------------------------------------------------------------------------------------------------


@cache
def current() -> Loop:
    """The loop of this process."""
    return Loop(this_ranked_worker())


class Loop(TrainingLoop):
    """A process's loop without a session: it learns of each step when it is reported.

    Nothing happens outside a job, and in processes that the rank has forked.
    """

    def __init__(self, worker: Worker) -> None:
        """``worker``: where this process runs."""
        super().__init__(worker)
        self.worker = worker
        self.is_stopping = False
        """Whether the ranks have agreed to stop."""
        # A forked child has a copy of this loop, and must not report for the rank.
        self._pid, self._parent = os.getpid(), os.getppid()
        self._journal = Journal(worker.attempt.rank_journal(worker.rank)) if worker.attempt is not None else None
        self._ranks: RankGroup | None = None
        self._total: int | None = None
        self._reports = 0
        self._is_complete = False
        self._has_left = threading.Event()
        # Calls of stop_requested(), and when the ranks agreed last.
        self._calls = 0
        self._agreed_at = 0.0

    @property
    def is_active(self) -> bool:
        """Whether it reports and listens: not outside a job, not in a fork, and not after the end."""
        return self._journal is not None and not self._has_left.is_set() and os.getpid() == self._pid

    def check_world(self, size: int, advice: str) -> None:
        """Raise UserError if a trainer does not train on all ranks: each would train alone, and save to the same place.

        ``size``: how many processes the trainer trains on. ``advice``: what to do.
        """
        ranks = self.worker.world_size
        if self.is_active and size != ranks:
            raise UserError(f"this run has {ranks} ranks, but its trainer trains on {size}: {advice}")

    # --- signals ------------------------------------------------------------------------------------------------------

    def listen(self) -> None:
        """Handle stop signals from now on; again if other code has replaced the handlers since.

        Raises RuntimeError if this process has a session, which handles them itself.
        """
        if not self.is_active or threading.current_thread() is not threading.main_thread():
            return
        if self._guard is not None:
            self._flag.reinstall()
            return
        handlers = map(signal.getsignal, (*STOP_SIGNALS, self.worker.stop_signal))
        if any(isinstance(getattr(handler, "__self__", None), StopFlag) for handler in handlers):
            raise RuntimeError(
                "this process has a slurmtrain.session(): use its run.steps() and run.log(), not "
                "slurmtrain.progress(), slurmtrain.log() or an adapter"
            )
        self._begin_process()
        self._hear_signals()
        atexit.register(self._close)
        self.beat(Phase.READY)

    def stop_requested(self) -> bool:
        """See :func:`stop_requested`."""
        if self.is_stopping or not self.is_active:
            return self.is_stopping
        self._listen_once()
        self._calls += 1
        # Counted in calls, not in seconds: all ranks have to ask at the same one, and their clocks differ.
        if self._calls < self._agree_at:
            return False
        self.is_stopping = self._agree()
        if self.is_stopping:
            self.beat()

            def allow_long_save() -> None:
                # A trainer's own save may take minutes without a call of slurmtrain: as long as the parent lives, it
                # ends the grace, or the agent above it.
                pause_s = (self.worker.forced_exit_s or 0.0) / 4
                while pause_s and not self._has_left.wait(pause_s) and os.getppid() == self._parent:
                    self._flag.put_off_forced_exit()

            threading.Thread(target=allow_long_save, name="slurmtrain-stop", daemon=True).start()
        return self.is_stopping

    def _agree(self) -> bool:
        """Whether any rank has received a stop signal; decides when to ask the others again."""
        # The mean over everything since the last agreement, evaluations included: rather too often than too late.
        call_s = (time.monotonic() - self._agreed_at) / self._gap if self._agreed_at else 0.0
        vote, ranks = self._own_vote(call_s), self._group()
        if ranks is None:
            return vote.stop
        agreed = ranks.agree(vote)
        self._gap, self._agreed_at = max(1, agreed.gap), time.monotonic()
        self._agree_at = self._calls + self._gap
        return agreed.stop

    def leave(self) -> NoReturn:
        """See :func:`leave`."""
        if self.is_active:
            self.is_stopping = True
            self.beat()
            self._flush()
            ranks = self._group()
            if ranks is not None:
                # Nobody leaves before all ranks have saved: the agent gives the others only seconds.
                ranks.greatest(0)
            self._journal_stop()
            self._close()
        raise SystemExit(STOPPED)

    # --- progress -----------------------------------------------------------------------------------------------------

    def progress(self, step: int, total: int | None = None) -> None:
        """Report that ``step`` steps are finished, of ``total`` if that is known, and write the pending metrics."""
        if not self.is_active:
            return
        self._listen_once()
        self._end_interlude()
        self._note_time(max(0, step - self.step) if self._reports else 0)
        self.step = step
        if not self._reports:
            self._write_first(SessionStarted(step=step, world_size=self.worker.world_size))
        if self._total != total or not self._reports:
            self._total = total
            self._write_first(TrainingStarted(total_steps=total))
        self._reports += 1
        # The first report comes before the first step, or after it, when other ranks may still compile theirs.
        self.continue_steps()
        self._flush(always=self._reports > 1)
        self._record_measures()

    def complete(self) -> None:
        """Journal, once, that the work of this rank is done: exit code 0 then means that the run is completed."""
        # A stop leaves work to do, even if an adapter calls this when its trainer ends.
        if self.is_active and not self._is_complete and not self.is_stopping:
            self._is_complete = True
            self._write(self._measured())
            self._write(TrainingCompleted(step=self.step))
            self.beat(Phase.READY)

    def beat(self, phase: Phase | None = None) -> None:
        """Show that this rank is alive, and the ``phase`` that begins, if one does."""
        if self.is_active:
            self._flag.put_off_forced_exit()
            self._beat(self._pulse.phase if phase is None else phase)

    def _beat(self, phase: Phase) -> None:
        super()._beat(Phase.STOPPING if self.is_stopping else phase)

    def begin_pause(self, activity: str, limit: timedelta = PAUSE) -> None:
        """Begin an ``activity`` that may take longer than a step, up to ``limit``, until :meth:`continue_steps`."""
        if self.is_active and not self.is_stopping:
            self._begin_pause(activity, limit)

    def begin_save(self) -> None:
        """Begin a save, which ends with :meth:`continue_steps` or with the next step."""
        if self.is_active:
            self._flag.put_off_forced_exit()
            self._interlude_began = time.monotonic()
            self._beat(Phase.SAVING)

    def continue_steps(self) -> None:
        """Begin the phase of the loop over steps again, after another one; outside the loop, none is watched."""
        self._end_interlude()
        if not self._reports or self._is_complete:
            self.beat(Phase.READY)
        else:
            self.beat(Phase.FIRST if self._reports == 1 else Phase.TRAINING)

    @contextlib.contextmanager
    def pause(self, activity: str, limit: timedelta) -> Iterator[None]:
        """See :func:`pause`."""
        if self._pulse.phase is Phase.PAUSED:
            yield
            return
        self._listen_once()
        self.begin_pause(activity, limit)
        try:
            yield
        finally:
            self.continue_steps()

    # --- metrics ------------------------------------------------------------------------------------------------------

    def log(self, metrics: Mapping[str, Any]) -> None:
        """Keep ``metrics`` until the current step is finished. Raises TypeError if one is not a number."""
        if self.is_active and self.worker.rank == 0:
            self._listen_once()
            self._metrics.add(metrics)

    def record(self, metrics: Mapping[str, Any]) -> None:
        """Write ``metrics`` of the step finished last, at once; what is not a number is left out."""
        if not self.is_active or self.worker.rank != 0:
            return
        numbers = {}
        for name, value in metrics.items():
            with contextlib.suppress(TypeError):
                numbers[name] = plain_number(name, value)
        self.log(numbers)
        self._flush()

    def _flush(self, *, always: bool = False) -> None:
        """Write the pending metrics with the step; ``always``: also the step alone if there are none."""
        attempt = self.worker.attempt
        if self.worker.rank == 0 and attempt is not None and (always or self._metrics.pending):
            self._metrics.open(attempt.metrics)
            self._metrics.write(self.step)

    # --- parts --------------------------------------------------------------------------------------------------------

    def _listen_once(self) -> None:
        if self._guard is None:
            self.listen()

    def _group(self) -> RankGroup | None:
        """The group of ranks that agree; None if this one is alone. All ranks call this at the same points."""
        distributed = joined_group()
        if distributed is not None and self._ranks is None and distributed.get_world_size() > 1:
            import torch

            from slurmtrain.runtime.job.process_group import RankGroup

            # Votes are numbers on the CPU, which gloo carries, whatever the script computes on.
            cpu = torch.device("cpu")
            self._ranks = RankGroup(distributed.get_rank(), distributed.get_world_size(), cpu)
        return None if distributed is None else self._ranks

    def _close(self) -> None:
        """Write what is pending and end the threads: a process group's threads must not outlive the interpreter."""
        if not self.is_active:
            return
        self._flush()
        self._pulse.beat(self.step, Phase.LEFT, self._step_s)
        # From here on nothing that the script calls reports: files and group are about to be closed.
        self._has_left.set()
        if self._ranks is not None:
            self._ranks.close()
        self._close_files()
        self._flag.release()


def _count_of_steps(steps: Any) -> int:
    """A number of steps. Raises ValueError for anything else."""
    try:
        number = operator.index(steps)
    except TypeError:
        number = -1
    if isinstance(steps, bool) or number < 0:
        raise ValueError(f"slurmtrain.progress() needs a whole number of steps, not {steps!r}")
    return number
