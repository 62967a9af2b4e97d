"""The loop over the steps of a script: it counts them, logs, agrees with the other ranks, saves and stops."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, overload

import torch

from slurmtrain.errors import CheckpointError
from slurmtrain.model.diagnosis.hang import Phase
from slurmtrain.model.experiment.strategy import FP32
from slurmtrain.model.interruption.exit_report import STOPPED
from slurmtrain.model.metrics.step_figures import PRECISIONS, TF32, peak_flops
from slurmtrain.model.run.events.rank_events import RankMeasured, SharesChosen, TrainingStarted
from slurmtrain.runtime.checkpoint import rng
from slurmtrain.runtime.checkpoint.rng import share_random_numbers
from slurmtrain.runtime.environment.node import Worker
from slurmtrain.runtime.training.loop import PAUSE, TrainingLoop, check_limit, logger
from slurmtrain.runtime.training.module_watch import StepTime, SynchronyWatch
from slurmtrain.runtime.training.parallel import ParallelTraining
from slurmtrain.runtime.training.passes import hardware_of
from slurmtrain.runtime.training.profiling import CommunicationSampler, StepTracer

if TYPE_CHECKING:
    from slurmtrain.model.experiment.plan import Plan
    from slurmtrain.runtime.checkpoint.checkpointer import Checkpointer
    from slurmtrain.runtime.job.process_group import RankGroup
    from slurmtrain.runtime.training.loader import Loader

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class StatedFigures:
    """What a script has stated of its model (:meth:`SteppedTraining.measure`), and what its device could do."""

    samples_per_step: int | None = None
    tokens_per_sample: float | None = None
    flops_per_sample: float | None = None
    peak_flops: float | None = None


class SteppedTraining(TrainingLoop, ParallelTraining):
    """The part of a session that goes through steps."""

    rank: int
    device: torch.device
    _plan: Plan | None
    _ranks: RankGroup

    def __init__(self, worker: Worker) -> None:
        """``worker``: where this process runs."""
        super().__init__(worker)
        self._first_step = 0
        self._samples = 0
        self._checkpointer: Checkpointer | None = None
        # A plug-in, on mixed hardware.
        self._balancer: Any = None
        # Until the steps that the spec wants traced are over.
        self._tracer: StepTracer | None = None
        self._own_time = StepTime(self.device)
        # Seconds that a loader waited for data, in the same steps as ``_took``.
        self._waited_s = 0.0
        self._stated = StatedFigures()
        self._communication: CommunicationSampler | None = None
        self._registered: tuple[object, ...] = ()
        self._synchrony: SynchronyWatch | None = None
        self._restored_rng: dict[str, Any] | None = None
        self._in_step = False
        self._total = 0

    # --- what scripts call ------------------------------------------------------------------------------------------

    @overload
    def steps(self, total: int) -> Iterator[int]: ...

    @overload
    def steps(self, total: int, loader: Loader) -> Iterator[tuple[int, Any]]: ...

    def steps(self, total: int, loader: Loader | None = None) -> Iterator[Any]:
        """Count from the restored step to ``total``: ``for step in run.steps(total)``.

        A step is finished when the loop asks for the next one. Between steps this saves when a save is due; on a stop
        signal all ranks agree on a step, save, and exit. It may be called again with a greater total.

        Args:
            total: The number of steps in the whole run, including earlier attempts'.
            loader: A loader from :meth:`loader`, if each step is to have a batch of it.

        Returns:
            The number of each step, from 0: how many were finished before it; with a ``loader``, also its batch.

        Raises:
            DataError: The ``loader`` was made after :meth:`checkpoint`, or by something else.
            ValueError: ``total`` is not a whole number of steps.
            CheckpointError: The state can never be saved, or another attempt has taken over the run.
            StrategyError: The spec has a ``strategy`` that the script has not applied.
            SystemExit: A stop was requested: the code is 75.
        """
        counted = self._count_to(total, loader)
        return counted if loader is None else self._loaders.with_steps(counted, loader)

    def _count_to(self, total: int, loader: Loader | None) -> Iterator[int]:
        if isinstance(total, bool) or not isinstance(total, int) or total < 0:
            raise ValueError(f"run.steps() needs a whole number of steps, not {total!r}")
        self._strategy.check_applied()
        self._write_first(TrainingStarted(total_steps=total))
        self._begin_steps(total, are_loaded=loader is not None)
        try:
            while self.step < total:
                self._in_step = True
                self._shares.begin_step()
                if self.step + 1 >= self._agree_at and self._pulse.phase is not Phase.FIRST:
                    # The last step before ranks agree: the pipeline of a GPU has filled again since the last time. Not
                    # the first one: torch.compile traces there, and must not see the hooks.
                    self._own_time.begin()
                    self._own_s = self._own_time.s
                elif self._own_time.is_measuring:
                    self._own_time.end()
                if self._balancer is not None:
                    self._balancer.begin(self.step, due=self.step + 1 >= self._agree_at)
                if self._communication is not None:
                    self._communication.begin_step()
                yield self.step
                self._finish_step(counts=self._communication is None or not self._communication.end_step())
            if self._synchrony is not None:
                self._synchrony.look(self.step)
            self._save_if_new("end")
        finally:
            self._end_steps()

    def _begin_steps(self, total: int, *, are_loaded: bool) -> None:
        """Prepare what takes part in all steps up to ``total``, whose batches may be loaded."""
        self._restore_rng()
        # After the restore, which gives each rank a state of its own.
        share_random_numbers(self._ranks, self._strategy.tp_size)
        self._total = total
        # What is shared outside of steps, as for an evaluation after them, is not trained on.
        self._shares.samples = self._samples
        self._note_time(0)
        self._agree_after(1)
        if self._checkpointer is not None:
            self._checkpointer.begin_training()
        self._own_time.watch(self._registered)
        if self._balancer is not None:
            self._balancer.watch(self._strategy.replicated_parameters())
            self._balancer.repeat(self.step)
        if self._ranks.world_size > 1 and self._registered:
            journal = self._journal if self.rank == 0 else None
            self._synchrony = SynchronyWatch(self._registered, self._ranks, journal, self.step)
        self._beat(Phase.FIRST)
        self._shares.begin_steps(are_loaded=are_loaded)
        if self._tracer is not None:
            self._begin_traced(self._tracer)

    def _end_steps(self) -> None:
        if self._tracer is not None:
            self._tracer.close()
        self._samples = self._shares.samples
        self._shares.begin_step()
        self._own_time.end()
        if self._communication is not None:
            self._communication.close()
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

        Meanwhile neither this rank nor ranks that wait for it count as hanging, and the time does not count as the time
        of a step. It needs no other ranks: rank 0 may pause alone.

        Args:
            activity: What for.
            limit: After this time, 2 hours by default, the rank hangs after all, unless its main thread computes.

        Raises:
            ValueError: ``limit`` is not positive.
        """
        check_limit(limit, "run.pause()")
        phase = self._pulse.phase
        if phase is Phase.PAUSED:
            yield
            return
        self._own_time.discard()
        self._begin_pause(activity, limit)
        try:
            yield
        finally:
            self._end_interlude()
            self._beat(phase)

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
        if self.rank == 0:
            self._metrics.add({**more, **(metrics or {})})
            if not self._in_step:
                self._metrics.write(self.step)

    def measure(
        self,
        *,
        flops_per_sample: float | None = None,
        tokens_per_sample: float | None = None,
        samples_per_step: int | None = None,
        precision: str | None = None,
    ) -> None:
        """State facts about the model, from which tokens a second and the MFU are computed; anywhere in the session.

        For a transformer with N parameters and sequences of T tokens, ``run.measure(flops_per_sample=6 * N * T,
        tokens_per_sample=T)`` is the usual estimate.

        Args:
            flops_per_sample: Floating point operations that a sample needs, forward and backward, without activations
                that are computed again.
            tokens_per_sample: How many tokens a sample has, on average.
            samples_per_step: The samples of a step, of all ranks together; needed only if batches come neither from
                :meth:`loader` nor from :meth:`share`.
            precision: What matrices are multiplied in: ``bf16``, ``fp16``, ``tf32`` or ``fp32``; by default the spec's
                ``mixed_precision``, else what torch is set to.

        Raises:
            ValueError: A number is not positive, or there is no such precision.
        """
        numbers = {
            "flops_per_sample": flops_per_sample,
            "tokens_per_sample": tokens_per_sample,
            "samples_per_step": samples_per_step,
        }
        for name, number in numbers.items():
            if number is not None and not (isinstance(number, int | float) and 0 < number < math.inf):
                raise ValueError(f"run.measure() needs a positive number for {name}, not {number!r}")
        if precision is not None and precision not in PRECISIONS:
            raise ValueError(f"run.measure() knows the precisions {', '.join(PRECISIONS)}, not {precision!r}")
        changes: dict[str, Any] = {name: number for name, number in numbers.items() if number is not None}
        self._stated = replace(self._stated, **changes)
        if flops_per_sample is not None or precision is not None:
            self._stated = replace(self._stated, peak_flops=self._find_peak(precision))

    def _find_peak(self, precision: str | None) -> float | None:
        """What this rank's device can do at most: as the spec says, or as known of its GPU; None: unknown."""
        spec = self._plan.spec if self._plan is not None else None
        if spec is not None and spec.measures.peak_tflops:
            return spec.measures.peak_tflops * 1e12
        chosen = precision or self._strategy.precision
        if precision is None and chosen == FP32 and torch.backends.cuda.matmul.fp32_precision == TF32:
            chosen = TF32
        return peak_flops(hardware_of(self.device)[0], chosen)

    # --- between steps ----------------------------------------------------------------------------------------------

    def _finish_step(self, *, counts: bool = True) -> None:
        # Everything that is done after each step. Training has evicted the caches, so that each additional function
        # call costs a microsecond or two: see scripts/bench step.
        self._in_step = False
        self.step += 1
        if self._tracer is not None:
            counts = not self._end_traced(self._tracer) and counts
        if self._balancer is not None:
            self._note_shares(self._balancer.end(self.step))
        if self.rank == 0:
            self._metrics.write(self.step)
        self._note_time(int(counts))
        if counts and self._pulse.phase is Phase.TRAINING:
            self._waited_s += self._shares.waited_s
        self._beat(self._pulse.phase)
        if self.step >= self._agree_at:
            self._agree()
        if self._tracer is not None:
            self._begin_traced(self._tracer)

    def _begin_traced(self, tracer: StepTracer) -> None:
        """Trace the step that begins, if it is to be traced."""
        if tracer.is_due(self.step) and self.step < self._total:
            with self.pause("profiling"):
                tracer.begin(self.step, self._own_time.s)

    def _end_traced(self, tracer: StepTracer) -> bool:
        """A step has ended, and after the last one the trace is written; returns whether it was traced."""
        was_traced = tracer.end_step()
        if tracer.is_over(self.step) or self.step >= self._total:
            with self.pause("writing a trace"):
                traced = tracer.write(self.step)
            if traced is not None:
                self._write(traced)
        if tracer.is_over(self.step):
            self._tracer = None
        return was_traced

    def _agree(self) -> None:
        """Agree with the other ranks whether to stop or to save, and on the progress of a save."""
        saving = self._checkpointer is not None and self._checkpointer.saving_step is not None
        vote = self._own_vote(self._step_s, saving=saving)
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
            self._note_shares(self._balancer.choose(self.step))
            self._note_time(0)
        if self._synchrony is not None and self._synchrony.is_due(self.step):
            self._synchrony.look(self.step)
            self._note_time(0)
        self._outside_step(lambda checkpointer: checkpointer.advance(self.step, agreed, self._metrics.latest))
        self._samples = self._shares.samples
        self._record_measures()
        # After the last step nothing is left to stop: the run completes.
        if agreed.stop and self.step < self._total:
            self._stop()

    def _note_shares(self, chosen: SharesChosen | None) -> None:
        if chosen is not None:
            self._write_first(chosen)

    def _agree_after(self, gap: int) -> None:
        """Agree after ``gap`` more steps, or earlier, at a step that is to be saved or at the last one."""
        self._gap = max(1, gap)
        due = self._checkpointer.next_step(self.step) if self._checkpointer is not None else None
        self._agree_at = min(self.step + self._gap, self._total, *(() if due is None else (due,)))

    def _outside_step(self, work: Callable[[Checkpointer], T]) -> T | None:
        """Do ``work`` with checkpoints, which does not count in the step time, and return its result."""
        if self._checkpointer is None:
            return None
        phase = self._pulse.phase
        self._beat(Phase.SAVING if phase is not Phase.STOPPING else phase)
        try:
            return work(self._checkpointer)
        finally:
            self._pulse.saved(self._checkpointer.longest_s)
            self._beat(phase)
            self._note_time(0)
            if self._checkpointer.saving_step == self.step:
                # All ranks wait for the save that has just begun: agree after the next step, then less and less often.
                self._agree_after(1)

    def _stop(self) -> NoReturn:
        """Save, journal the stop, and exit with the code that means that the run can continue from here."""
        # The agreement was progress: the save gets the whole time before a forced exit.
        self._flag.put_off_forced_exit()
        self._beat(Phase.STOPPING)
        reason = self._save_if_new("stop")
        # Before the journal reports it: the end of the loop over steps, which also notes it, comes later.
        self._samples = self._shares.samples
        self._journal_stop()
        if self.rank == 0 and reason is None:
            logger.info("stopped after step %d", self.step)
        raise SystemExit(STOPPED)

    def _measured(self) -> RankMeasured:
        """What this rank has needed since it was started."""
        stated, steps, recorded = self._stated, self.step - self._first_step, self._communication
        counted = stated.samples_per_step and steps * stated.samples_per_step
        return replace(
            super()._measured(),
            steps=steps,
            samples=counted or self._samples or None,
            epoch_samples=self._loaders.epoch_samples,
            own_p50_s=self._own_time.owns.quantile(0.5),
            data_wait_share=self._data_wait_share(),
            communication_share=None if recorded is None else recorded.share,
            profiled_steps=recorded.steps or None if recorded is not None else None,
            profiled_s=recorded.seconds or None if recorded is not None else None,
            tokens_per_sample=stated.tokens_per_sample,
            flops_per_sample=stated.flops_per_sample,
            peak_flops=stated.peak_flops,
        )

    def _data_wait_share(self) -> float | None:
        """The part of the time of steps that this rank waited for data; None: unknown."""
        step_s, used_s = self._took.mean, self._own_time.waits.mean
        if not step_s:
            return None
        # A GPU may compute while the loader waits for data, and is known to be idle only until the forward pass.
        if used_s is not None and (not self._waited_s or self.device.type == "cuda"):
            return min(1.0, used_s / step_s)
        return min(1.0, self._waited_s / self._took.total_s) if self._waited_s else None

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

    def _save_if_new(self, why: str) -> str | None:
        return self._outside_step(lambda checkpointer: checkpointer.save(self.step, why, self._metrics.latest))

    def _restore_rng(self) -> None:
        """Restore the generators at registration, and again before the first step: setup in between may use them."""
        if self._restored_rng is not None:
            rng.restore(self._restored_rng, self.device)
