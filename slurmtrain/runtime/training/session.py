"""The library inside a training script: ``with slurmtrain.session() as run``."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, overload

import torch
import torch.distributed as dist

from slurmtrain.errors import CheckpointError
from slurmtrain.model.diagnosis.hang import PAUSE_S, Phase
from slurmtrain.model.diagnosis.redact import redact
from slurmtrain.model.interruption.exit_report import STOPPED
from slurmtrain.model.interruption.interval import InterruptionStats, Vote, steps_to_agreement
from slurmtrain.model.run.events.rank import (
    ExceptionRaised,
    RankStopped,
    SessionStarted,
    StateRegistered,
    TrainingCompleted,
    TrainingStarted,
)
from slurmtrain.runtime.checkpoint import files
from slurmtrain.runtime.checkpoint.states import rng
from slurmtrain.runtime.data.loader import DataRank, Loader
from slurmtrain.runtime.data.loaders import Loaders
from slurmtrain.runtime.data.shares import Shares
from slurmtrain.runtime.environment.worker import Worker
from slurmtrain.runtime.job import stacks
from slurmtrain.runtime.job.earlier_starts import read_history
from slurmtrain.runtime.job.heartbeat import Pulse
from slurmtrain.runtime.job.plan_file import read_plan
from slurmtrain.runtime.job.process_group import RankGroup
from slurmtrain.runtime.job.signals import StopFlag
from slurmtrain.runtime.job.torch_private import check_version, import_compiler
from slurmtrain.runtime.strategies.strategy import Strategy
from slurmtrain.runtime.training.balancer import Balancer
from slurmtrain.runtime.training.child_signals import ChildGuard
from slurmtrain.runtime.training.parallel import ParallelTraining
from slurmtrain.runtime.training.rank_group import join_group, pick_device
from slurmtrain.runtime.training.ranked_worker import this_ranked_worker
from slurmtrain.runtime.training.repeatable import make_repeatable, name_key, share_random_numbers
from slurmtrain.runtime.training.step_metrics import StepMetrics
from slurmtrain.runtime.training.step_time import StepTime
from slurmtrain.system.interpreter import leave_quickly, without_collection
from slurmtrain.system.journal import Journal

if TYPE_CHECKING:
    from slurmtrain.runtime.checkpoint.checkpointer import Checkpointer

_log = logging.getLogger("slurmtrain")
_SMOOTHING = 0.2
# An exception's message is cut to this length: some contain a whole tensor.
_MESSAGE_CHARACTERS = 2000
# How long a pause may take unless the script says otherwise.
PAUSE = timedelta(seconds=PAUSE_S)
T = TypeVar("T")


def session(
    params: Mapping[str, Any] | None = None, *, backend: str | None = None, timeout: timedelta | None = None
) -> Session:
    """Join the run that this process belongs to.

    Use it as a context manager, once in a process, in the main thread::

        with slurmtrain.session(params={"lr": 0.1, "steps": 1000}) as run:
            model = Net().to(run.device)
            optimizer = torch.optim.SGD(model.parameters(), lr=run.params["lr"])
            run.checkpoint(model=model, optimizer=optimizer)  # restores if there is a checkpoint
            for step in run.steps(run.params["steps"]):
                loss = train_step(model, optimizer, batch(step))
                run.log(loss=loss)

    Entering it joins the process group, unless the script has already created one. On a stop signal (preemption, time
    limit, ``slurmtrain cancel``) all ranks finish the same step, save, and exit with code 75, which means that the run
    can continue from there; leaving the ``with`` block in any other way without an exception means that the work is
    done, unless a stop signal has come and ``run.steps(total)`` has not reached its total. The same script also runs
    outside a job and under plain torchrun, but without checkpoints and a metrics file: those need a run directory.

    Args:
        params: Values for parameters that the spec does not set, by name; they also apply outside any job. The spec's
            ``params`` win.
        backend: As for ``torch.distributed.init_process_group``. By default, with GPUs, NCCL for tensors on GPUs and
            gloo for those on CPUs; otherwise gloo.
        timeout: As for ``torch.distributed.init_process_group``: how long a collective may take. By default torch's.

    Returns:
        The session: ``rank``, ``world_size``, ``device``, ``params`` and so on are available before it is entered.

    Raises:
        NotAvailable: This version of torch is too old.
        PathError: The run's plan cannot be read. Entering the session raises what
            ``torch.distributed.init_process_group`` raises.
        LaunchError: With ``launcher: node`` or ``none``, it is not known which rank this process is; or the launcher
            has restarted it.
    """
    check_version(torch.__version__)
    return Session(this_ranked_worker(), params or {}, backend, timeout)


class Session(ParallelTraining):
    """A training script's view of its run; :func:`session` makes it.

    All ranks must call :meth:`checkpoint`, :meth:`steps` and :meth:`log` alike, since these run collectives.
    """

    def __init__(
        self, worker: Worker, params: Mapping[str, Any], backend: str | None, timeout: timedelta | None
    ) -> None:
        """``worker``: where this process runs; ``params``, ``backend`` and ``timeout`` as for :func:`session`."""
        self.rank = worker.rank
        """The rank of this process in the run, from 0."""
        self.local_rank = worker.local_rank
        """The rank of this process on its node, from 0."""
        self.world_size = worker.world_size
        """The number of processes in the run."""
        self.attempt = worker.number
        """Which attempt of the run this is, from 1."""
        self.seed = worker.seed
        """The spec's ``seed``, with which random numbers are seeded as the session is entered; None if it has none."""
        self.accumulation = worker.accumulation
        """Into how many microbatches to divide the batch of each rank (gradient accumulation), the spec's or, after it
        ran out of memory, more; 1 outside a job."""
        self.params = {**params, **worker.params}
        """The spec's ``params``, which override those given to :func:`session`."""
        self.dir: Path | None = worker.attempt.run.path if worker.attempt else None
        """The run's directory; None outside a job."""
        self.device = pick_device(worker.local_rank)
        """Where to compute: this process's GPU, or the CPU."""
        self.step = 0
        """The number of finished steps, including those of earlier attempts."""
        self._worker = worker
        self._backend = backend
        self._timeout = timeout
        self._plan = read_plan(worker.submission.plan) if worker.submission is not None else None
        self._flag = StopFlag()
        self._guard: ChildGuard | None = None
        self._journal: Journal | None = None
        self._metrics = StepMetrics()
        self._checkpointer: Checkpointer | None = None
        self._restored_rng: dict[str, Any] | None = None
        self._in_step = False
        self._owns_group = False
        self._step_s = 0.0
        self._step_began = 0.0
        self._pulse = Pulse.open(worker.heartbeat, worker.local_rank)
        self._own_time = StepTime(self.device)
        self._balancer: Balancer | None = None
        self._registered: tuple[object, ...] = ()
        self._total = 0
        self._gap = 1
        self._agree_at = 0

    # --- entering and leaving -----------------------------------------------------------------------------------------

    def __enter__(self) -> Session:
        if self._worker.attempt is not None:
            leave_quickly()
            stacks.answer()
        self._beat(Phase.JOINING)
        self._owns_group = join_group(self._worker, self.device, self._backend, self._timeout)
        make_repeatable(self._worker)
        self._ranks = RankGroup(self.rank, self.world_size, self.device)
        strategy = self._plan.spec.strategy if self._plan else None
        self._strategy = Strategy(strategy, self._ranks, self._worker.node, self.accumulation)
        parts = self._strategy.dp_rank, self._strategy.dp_size
        data_rank = DataRank(
            *parts, self.device, lambda: self.step if self._in_step else None, lambda *sizes: self._shares.take(*sizes)
        )
        self._loaders = Loaders(data_rank, self.seed)
        self._shares = Shares(*parts, self._loaders)
        if self._plan is not None and self._plan.spec.resources.mixed and self.world_size > 1:
            self._balancer = Balancer(self._shares, self._ranks, self.accumulation)
        attempt = self._worker.attempt
        if attempt is not None:
            if threading.current_thread() is threading.main_thread():
                self._flag.install(self._worker.stop_signal, forced_exit_s=self._worker.forced_exit_s)
            self._guard = ChildGuard()
            self._journal = Journal(attempt.rank_journal(self.rank))
            if self.rank == 0:
                self._metrics.open(attempt.metrics)
                self._journal.write(SessionStarted(world_size=self.world_size, device=str(self.device)))
        self._beat(Phase.READY)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        left = error is None or (isinstance(error, SystemExit) and error.code in (None, 0))
        stopped = isinstance(error, SystemExit) and error.code == STOPPED
        try:
            if left:
                self._finish()
                if self._journal is not None and self._is_done():
                    # Every rank: an exit code of 0 does not prove this to the agent once a stop has been requested.
                    self._journal.write(TrainingCompleted(step=self.step))
            elif not isinstance(error, SystemExit | KeyboardInterrupt) and self._journal is not None:
                # Before anything else: the rank with the earliest event counts as the first to fail.
                message = str(error) if not self._worker.deterministic else name_key(str(error))
                message = redact(message)[:_MESSAGE_CHARACTERS]
                self._journal.write(ExceptionRaised(type=type(error).__name__, message=message))
        finally:
            self._loaders.close()
            if self._checkpointer is not None:
                self._checkpointer.close(failed=not (left or stopped))
            self._metrics.close()
            if self._journal is not None:
                self._journal.close()
            self._beat(Phase.LEFT)
        if left or stopped:
            self._ranks.close()
            if self._owns_group and dist.is_initialized():
                dist.destroy_process_group()
            self._flag.release()

    # --- what scripts call ------------------------------------------------------------------------------------------

    def checkpoint(self, **objects: object) -> None:
        """Register what checkpoints contain, and restore it at once if there is a checkpoint.

        Call it once, on all ranks, with everything::

            run.checkpoint(model=model, optimizer=optimizer, scheduler=scheduler, loader=loader)

        DistributedDataParallel and torch.compile wrappers are unwrapped, and modules may be sharded by ``fully_shard``.
        The states of Python's, NumPy's and torch's random number generators are included, and that of the
        communication hook that :meth:`parallelize` has chosen. Outside a job it does nothing.

        Args:
            objects: Anything with ``state_dict`` and ``load_state_dict``, by their names in the checkpoint; of others,
                such as the state of a communication hook, each rank's attributes. Ranks may have different parts of a
                model, if the names of parameters are unique in the whole model.

        Raises:
            CheckpointError: Checkpoints exist and none can be restored, or the newest good one does not fit these
                objects.
            StrategyError: An optimizer was made before :meth:`parallelize`.
            TypeError: One of the objects has no state that can be saved.
            RuntimeError: It was already called.
        """
        if self._checkpointer is not None:
            raise RuntimeError("run.checkpoint() may be called only once, with everything that a checkpoint contains")
        self._strategy.check_optimizers(objects)
        attempt, plan = self._worker.attempt, self._plan
        if attempt is None or plan is None:
            return
        objects.update(self._loaders.register())
        # Torch's checkpoint modules take most of a second to import, and import its compiler on first use.
        with without_collection():
            from slurmtrain.runtime.checkpoint.checkpointer import Checkpointer
            from slurmtrain.runtime.checkpoint.state_dicts import Objects

            import_compiler()

        states = self._strategy.states() | ({"run.shares": self._shares} if self._balancer is not None else {})
        self._checkpointer = Checkpointer(
            attempt,
            Objects({**objects, **states}, additions=states),
            plan,
            read_history(self._worker) if self.rank == 0 else InterruptionStats(),
            self._ranks,
            self._journal if self.rank == 0 else None,
        )
        if self.rank == 0 and self._journal is not None:
            self._journal.write(StateRegistered(objects=sorted(objects)))
            files.sweep(attempt.run.checkpoints, attempt.owner)
        self._registered = tuple(objects.values())
        from_start = self._worker.from_start
        restored = self._outside_step(lambda checkpointer: checkpointer.restore(from_start=from_start))
        if restored is not None:
            self.step = restored.step
            self._restored_rng = restored.rng
        self._restore_rng()

    @overload
    def steps(self, total: int) -> Iterator[int]: ...

    @overload
    def steps(self, total: int, loader: Loader) -> Iterator[tuple[int, Any]]: ...

    def steps(self, total: int, loader: Loader | None = None) -> Iterator[Any]:
        """Count from the restored step to ``total``: ``for step in run.steps(total)``.

        A step is finished when the loop asks for the next one. Between steps this saves when a save is due; on a stop
        signal all ranks agree on a step, save, and exit. It may be called again with a greater total.

        Args:
            total: The number of steps in the whole run, including those of earlier attempts.
            loader: What :meth:`loader` has returned, if each step is to have a batch of it.

        Returns:
            The number of each step, from 0: how many were finished before it; with a ``loader``, also its batch.

        Raises:
            DataError: The ``loader`` was made after :meth:`checkpoint`, or by something else.
            ValueError: ``total`` is not a whole number of steps.
            CheckpointError: The state can never be saved, or another attempt has taken over the run.
            StrategyError: The spec has a ``strategy`` that the script has not applied.
            SystemExit: A stop was requested: the code is 75.
        """
        counted = self._count_to(total)
        return counted if loader is None else self._loaders.with_steps(counted, loader)

    def _count_to(self, total: int) -> Iterator[int]:
        if isinstance(total, bool) or not isinstance(total, int) or total < 0:
            raise ValueError(f"run.steps() takes a whole number of steps, not {total!r}")
        self._strategy.check_applied()
        if self._journal is not None and self.rank == 0:
            self._journal.write(TrainingStarted(total_steps=total))
        self._restore_rng()
        share_random_numbers(self._ranks, self._strategy.tp_size)
        self._total = total
        self._step_began = time.monotonic()
        self._agree_after(1)
        if self._checkpointer is not None:
            self._checkpointer.begin_training()
        self._own_time.watch(self._registered)
        if self._balancer is not None:
            self._balancer.watch(self._strategy.replicated_parameters())
        self._beat(Phase.FIRST)
        try:
            while self.step < total:
                self._in_step = True
                if self.step + 1 >= self._agree_at and self._pulse.phase is not Phase.FIRST:
                    # The last step before ranks agree: the pipeline of a GPU has filled again since the last time. Not
                    # the first one: torch.compile traces there, and must not see the hooks.
                    self._own_time.begin()
                elif self._own_time.is_measuring:
                    self._own_time.end()
                if self._balancer is not None:
                    self._balancer.begin(due=self.step + 1 >= self._agree_at)
                yield self.step
                self._finish_step()
            self._save_if_new("end")
        finally:
            self._own_time.end()
            if self._balancer is not None:
                self._balancer.close()
            if self._pulse.phase is not Phase.STOPPING:
                self._beat(Phase.READY)

    @contextlib.contextmanager
    def pause(self, activity: str = "", limit: timedelta = PAUSE) -> Iterator[None]:
        """Pause training for something that takes longer than a step, such as an evaluation.

        It is a context manager::

            with run.pause("evaluation"):
                evaluate(model)

        Meanwhile neither this rank nor those that wait for it count as hanging, and the time does not count as that of
        a step. It needs no other ranks: rank 0 may pause alone.

        Args:
            activity: What for.
            limit: After this time, 2 hours by default, the rank hangs after all, unless its main thread computes.

        Raises:
            ValueError: ``limit`` is not positive.
        """
        if limit <= timedelta(0):
            raise ValueError(f"run.pause() takes a positive limit, not {limit}")
        phase, began = self._pulse.phase, time.monotonic()
        if phase is Phase.PAUSED:
            yield
            return
        self._own_time.discard()
        self._pulse.pause(self.step, activity, limit.total_seconds(), self._step_s, self._own_time.s)
        try:
            yield
        finally:
            self._beat(phase)
            self._step_began += time.monotonic() - began

    def log(self, metrics: Mapping[str, Any] | None = None, /, **more: Any) -> None:
        """Record metrics of the current step: ``run.log(loss=loss)``, or ``run.log({"val/loss": loss})``.

        Rank 0 writes them, with the step, to a file in the run directory when the step is finished; the other ranks
        return at once. Outside a step they are written at once. It never waits for a network.

        Args:
            metrics: Values by name, for names that are not identifiers.
            more: Values by name. If a name is logged more than once in a step, the last value counts.

        Raises:
            TypeError: A value is neither a number nor a one-element tensor. Tensors are read only when the step is
                finished, so as not to wait for a GPU earlier.
        """
        if self.rank != 0:
            return
        if metrics:
            more.update(metrics)
        self._metrics.add(more)
        if not self._in_step:
            self._metrics.write(self.step)

    # --- between steps ----------------------------------------------------------------------------------------------

    def _finish_step(self) -> None:
        # Everything that is done after each step. Training has evicted the caches, so that each additional function
        # call costs a microsecond or two: see scripts/bench step.
        self._in_step = False
        self.step += 1
        if self._balancer is not None:
            self._balancer.end()
        if self.rank == 0:
            self._metrics.write(self.step)
        now = time.monotonic()
        took, self._step_began = now - self._step_began, now
        self._step_s = took if not self._step_s else (1 - _SMOOTHING) * self._step_s + _SMOOTHING * took
        self._pulse.beat(self.step, self._pulse.phase, self._step_s, self._own_time.s)
        if self.step >= self._agree_at:
            self._agree()

    def _agree(self) -> None:
        """Agree with the other ranks whether to stop or to save, and on the progress of a save."""
        vote = Vote(stop=self._flag.raised is not None, gap=self._next_gap() if self.rank == 0 else 0)
        if self._checkpointer is not None:
            vote = self._checkpointer.complete(vote, self.step)
        if self._balancer is not None:
            vote = replace(vote, balance=self._balancer.calls)
        agreed = self._ranks.agree(vote)
        self._agree_after(agreed.gap)
        # Only now: other ranks may still have been in their first step when this rank finished its own.
        self._beat(Phase.TRAINING)
        if agreed.balance and self._balancer is not None:
            # Before a save, so that a run that continues from it has the same shares.
            chosen = self._balancer.choose(self.step)
            if chosen is not None and self.rank == 0 and self._journal is not None:
                self._journal.write(chosen)
            self._step_began = time.monotonic()
        self._outside_step(lambda checkpointer: checkpointer.advance(self.step, agreed, self._metrics.latest))
        if agreed.stop and self.step < self._total:
            self._stop()

    def _agree_after(self, gap: int) -> None:
        """Agree after ``gap`` more steps, or earlier, at a step that is to be saved or at the last one."""
        self._gap = max(1, gap)
        due = self._checkpointer.next_step(self.step) if self._checkpointer is not None else None
        self._agree_at = min(self.step + self._gap, self._total, *(() if due is None else (due,)))

    def _next_gap(self) -> int:
        saving = self._checkpointer is not None and self._checkpointer.saving_step is not None
        return steps_to_agreement(self._step_s, self._gap, saving=saving)

    def _outside_step(self, work: Callable[[Checkpointer], T]) -> T | None:
        """Do ``work`` with checkpoints, which does not count in the step time. Returns what it returns."""
        if self._checkpointer is None:
            return None
        phase = self._pulse.phase
        self._beat(Phase.SAVING if phase is not Phase.STOPPING else phase)
        try:
            return work(self._checkpointer)
        finally:
            self._pulse.saved(self._checkpointer.longest_s)
            self._beat(phase)
            self._step_began = time.monotonic()
            if self._checkpointer.saving_step == self.step:
                # All ranks wait for the save that has just begun: agree after the next step, then less and less often.
                self._agree_after(1)

    def _stop(self) -> NoReturn:
        """Save, journal the stop, and exit with the code that means that the run can continue from here."""
        self._flag.put_off_forced_exit()
        self._beat(Phase.STOPPING)
        reason = self._save_if_new("stop")
        if self._journal is not None and self.rank == 0:
            self._journal.write(RankStopped(step=self.step))
        if self.rank == 0 and reason is None:
            _log.info("stopped after step %d", self.step)
        raise SystemExit(STOPPED)

    def _finish(self) -> None:
        """Save the last step of a script that has finished, even if it left its loop early."""
        if self._in_step:
            self._in_step = False
            self.step += 1
        if self.rank == 0 and self._metrics.pending:
            self._metrics.write(self.step)
        self._save_if_new("end")
        if self._checkpointer is not None and self.step > 0 and self.step != self._checkpointer.saved_step:
            raise CheckpointError(f"training reached step {self.step}, but its last checkpoint could not be saved")

    def _is_done(self) -> bool:
        """Whether leaving the session now means that the work is done.

        After a stop signal it may also mean that the script, or a library that it calls, has heard the signal itself.
        """
        return self._flag.raised is None or 0 < self._total <= self.step

    def _save_if_new(self, why: str) -> str | None:
        return self._outside_step(lambda checkpointer: checkpointer.save(self.step, why, self._metrics.latest))

    def _beat(self, phase: Phase) -> None:
        self._pulse.beat(self.step, phase, self._step_s, self._own_time.s)

    def _restore_rng(self) -> None:
        """Restore the generators at registration, and again before the first step: setup in between may use them."""
        if self._restored_rng is not None:
            rng.restore(self._restored_rng, self.device)
