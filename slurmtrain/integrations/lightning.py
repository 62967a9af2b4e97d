"""For scripts that train with PyTorch Lightning's Trainer."""

from __future__ import annotations

import math
import re
import shutil
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import Logger
from lightning.pytorch.plugins.environments import SLURMEnvironment

from slurmtrain.errors import UserError
from slurmtrain.runtime.training.loop import current

# With .tmp it is what a killed save has left.
_STOP_FILE = re.compile(r"stop-step=(\d+)\.ckpt(?:\.tmp)?")


class SlurmtrainCallback(Callback):  # type: ignore[misc]
    """Lets a run of Lightning's Trainer stop without losing a step, and shows its progress.

    Make it before the Trainer, on all ranks, and put it last among the callbacks::

        callback = SlurmtrainCallback()
        trainer = Trainer(callbacks=[ModelCheckpoint(dirpath), callback], logger=SlurmtrainLogger(), ...)
        trainer.fit(module, data, ckpt_path=callback.resume_from)

    When the run is asked to stop, all ranks agree on a step, save ``stop-step=<n>.ckpt`` there, and exit with code 75;
    callbacks that come later, and the rest of the script, do not run. A stop during a validation takes effect after it.
    Outside a job the callback does nothing.
    """

    def __init__(self, dirpath: str | Path | None = None) -> None:
        """``dirpath``: where to save at a stop, which ``checkpoint.glob`` must match; None: where ModelCheckpoint does.

        If there is no ModelCheckpoint, that is the run's directory for checkpoints.
        """
        self._directory = Path(dirpath) if dirpath is not None else None
        self._loop = current()
        self._loop.listen()

    @property
    def resume_from(self) -> str | None:
        """The checkpoint to continue from; None to start from the beginning."""
        return self._loop.worker.resume_from

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Check the ``trainer``. Raises UserError if it is not set up for this run."""
        if not self._loop.is_active or stage != "fit":
            return
        environment = getattr(trainer.strategy, "cluster_environment", None)
        if isinstance(environment, SLURMEnvironment) and environment.auto_requeue:
            raise UserError(
                "Lightning's SLURMEnvironment would requeue the job by itself, without slurmtrain's record of it: pass "
                "Trainer(plugins=[SLURMEnvironment(auto_requeue=False)])"
            )
        self._loop.check_world(
            trainer.world_size, "pass Trainer(devices=<resources.procs_per_node>, num_nodes=<resources.nodes>)"
        )

    def on_sanity_check_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take over the signals that the ``trainer`` has begun to handle."""
        # Its own handler broadcasts between ranks, in the middle of whatever they do, and the script ends with code 0.
        self._loop.listen()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin to report, when the ``trainer`` has restored ``pl_module``."""
        # Again, since a Trainer with num_sanity_val_steps=0 has no sanity check.
        self._loop.listen()
        self._loop.progress(trainer.global_step, _total_steps(trainer))

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Report a step; save and leave if the run is to stop."""
        if trainer.global_step == self._loop.step:
            return  # it accumulates gradients, which no checkpoint holds
        self._loop.progress(trainer.global_step, _total_steps(trainer))
        # Whether training ends by itself after the current step.
        is_last = trainer.max_steps != -1 and trainer.global_step >= trainer.max_steps
        if trainer.is_last_batch and trainer.max_epochs not in (None, -1):
            is_last = is_last or trainer.current_epoch + 1 >= trainer.max_epochs
        if not is_last and self._loop.stop_requested():
            self._stop(trainer)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note that the ``trainer`` validates ``pl_module``."""
        self._loop.begin_pause("validation")

    def on_validation_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int, *more: Any
    ) -> None:
        """Show that a validation goes on."""
        self._loop.beat()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note that the ``trainer`` has validated ``pl_module``."""
        self._loop.continue_steps()

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Note that a save begins; it ends before the next step does."""
        self._loop.begin_save()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Journal that training of ``pl_module`` by the ``trainer`` is completed."""
        self._loop.complete()

    def _stop(self, trainer: Trainer) -> NoReturn:
        saved_to = self._directory or getattr(trainer.checkpoint_callback, "dirpath", None)
        attempt = self._loop.worker.attempt
        assert attempt is not None
        path = Path(saved_to or attempt.run.checkpoints) / f"stop-step={trainer.global_step}.ckpt"
        # Lightning writes to the directory for temporary files, and moves: on another file system that is a copy, and a
        # kill leaves half of it. Sharded strategies write a directory, file by file.
        unfinished = path.with_name(f"{path.name}.tmp")
        trainer.save_checkpoint(unfinished)
        # Sharded strategies write on all ranks, which must be done before the rename.
        trainer.strategy.barrier("slurmtrain")
        if trainer.is_global_zero:
            unfinished.rename(path)
            # What earlier stops have saved here; ModelCheckpoint leaves these files alone.
            for earlier in list(path.parent.iterdir()):
                match = _STOP_FILE.fullmatch(earlier.name)
                if match and int(match[1]) < trainer.global_step:
                    if earlier.is_dir():
                        shutil.rmtree(earlier, ignore_errors=True)
                    else:
                        earlier.unlink(missing_ok=True)
        self._loop.leave()


class SlurmtrainLogger(Logger):  # type: ignore[misc]
    """Makes what a module logs the metrics of the run, as ``slurmtrain status`` and MLflow have them.

    Pass it as ``Trainer(logger=SlurmtrainLogger())``, alone or with other loggers, and with SlurmtrainCallback, which
    counts the steps. Outside a job it does nothing.
    """

    @property
    def name(self) -> str:
        """The name of the logger, for paths."""
        return "slurmtrain"

    @property
    def version(self) -> str:
        """The id of the run, for paths."""
        attempt = current().worker.attempt
        return attempt.run.id if attempt is not None else ""

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Write ``metrics`` of the optimizer step finished last; ``step``, Lightning's count of batches, is ignored."""
        current().record(metrics)

    def log_hyperparams(self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the hyperparameters of a run are the ``params`` of its spec."""


def _total_steps(trainer: Trainer) -> int | None:
    """The steps that ``trainer.global_step`` will have counted at the end; None if that is unknown."""
    if len(trainer.optimizers) != 1:
        return None  # each optimizer's steps count
    total = trainer.estimated_stepping_batches
    return int(total) if math.isfinite(total) and total >= 0 else None
