"""For scripts that train with the Trainer of Hugging Face transformers, and of libraries built on it, such as TRL."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from slurmtrain.errors import UserError
from slurmtrain.runtime.training.loop import current


class SlurmtrainCallback(TrainerCallback):  # type: ignore[misc]
    """Lets a run of the Trainer stop without losing a step, and shows its progress and metrics.

    Make it before the Trainer, on all ranks, and put it last among the callbacks::

        callback = SlurmtrainCallback()
        trainer = Trainer(model=model, args=args, train_dataset=data, callbacks=[callback])
        trainer.train(resume_from_checkpoint=callback.resume_from)

    When the run is asked to stop, all ranks agree on a step, save there as the Trainer does, and exit with code 75;
    callbacks that come later, and the rest of the script, do not run. A stop during an evaluation takes effect after
    it. Outside a job the callback does nothing.
    """

    def __init__(self) -> None:
        self._loop = current()
        self._loop.listen()

    @property
    def resume_from(self) -> str | None:
        """The checkpoint to continue from; None to start from the beginning."""
        return self._loop.worker.resume_from

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Begin to report. Raises UserError if the Trainer is not set up for this run."""
        if self._loop.is_active and getattr(args, "enable_jit_checkpoint", False):
            raise UserError(
                "enable_jit_checkpoint replaces the handler of SIGTERM, saves without agreement between ranks, and "
                "ends with exit code 0: remove it from TrainingArguments, since SlurmtrainCallback saves when the run "
                "is asked to stop"
            )
        self._loop.check_world(args.world_size, "without GPUs it needs TrainingArguments(use_cpu=True)")
        # Again: the Trainer, or a library that it calls, may have set handlers of its own since.
        self._loop.listen()
        self._loop.progress(state.global_step, state.max_steps)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Report the step; ask the Trainer to save and to stop if the run is to stop."""
        self._loop.progress(state.global_step, state.max_steps)
        # After the last step training ends by itself, and the run completes.
        if state.global_step < state.max_steps and self._loop.stop_requested():
            control.should_save = control.should_training_stop = True
            # An evaluation might take up the time that is left for the save.
            control.should_evaluate = False
        self._begin_next(control)

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Note what the Trainer does at the end of an epoch."""
        self._begin_next(control)

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Log the Trainer's metrics."""
        self._loop.record(kwargs.get("logs") or {})

    def on_prediction_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Show that an evaluation goes on."""
        self._loop.beat()

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Note that an evaluation has ended."""
        self._loop.continue_steps()
        # The Trainer saves right after the evaluation.
        if control.should_save:
            self._loop.begin_save()

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Leave after the save for a stop."""
        if self._loop.is_stopping:
            self._loop.leave()
        self._loop.continue_steps()

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Journal that training is completed."""
        self._loop.complete()

    def _begin_next(self, control: TrainerControl) -> None:
        """Note what the Trainer does before the next step, evaluation first: it may take longer than a step."""
        if control.should_evaluate:
            self._loop.begin_pause("evaluation")
        elif control.should_save:
            self._loop.begin_save()
