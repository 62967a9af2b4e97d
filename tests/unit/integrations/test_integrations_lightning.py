"""The callback and the logger for Lightning, called as its Trainer does."""

from __future__ import annotations

import os
import signal
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from helpers.one_rank import OneRank

from slurmtrain.errors import UserError
from slurmtrain.model.diagnosis.hang import Phase
from slurmtrain.model.interruption.exit_report import STOPPED

if TYPE_CHECKING:
    from slurmtrain.integrations.lightning import SlurmtrainCallback

# Importing it takes seconds, which every process that collects tests would have to wait for.
pytestmark = pytest.mark.skipif(
    find_spec("lightning") is None, reason="lightning is not installed: scripts/bootstrap trainers"
)


def new_callback(*arguments: Any) -> SlurmtrainCallback:
    from slurmtrain.integrations.lightning import SlurmtrainCallback

    return SlurmtrainCallback(*arguments)


class Trainer:
    """As much of a Trainer as the callback uses, in a run of six steps."""

    def __init__(self, callback: SlurmtrainCallback, **changes: Any) -> None:
        self.callback = callback
        self.global_step = 0
        self.max_steps = 6
        self.max_epochs = None
        self.current_epoch = 0
        self.is_last_batch = False
        self.estimated_stepping_batches = 6
        self.world_size = 1
        self.is_global_zero = True
        self.optimizers = [object()]
        self.checkpoint_callback = None
        self.strategy = SimpleNamespace(barrier=lambda _: None)
        for name, value in changes.items():
            setattr(self, name, value)

    def save_checkpoint(self, path: Path) -> None:
        path.parent.mkdir(exist_ok=True)
        path.write_text("saved")

    def call(self, event: str, *arguments: Any) -> None:
        getattr(self.callback, event)(self, None, *arguments)

    def step(self, steps: int = 1) -> None:
        self.global_step += steps
        self.call("on_train_batch_end", None, None, 0)


def begun(**changes: Any) -> Trainer:
    trainer = Trainer(new_callback(), **changes)
    trainer.call("setup", "fit")
    trainer.call("on_train_start")
    return trainer


def test_steps_metrics_and_the_end_are_reported(rank: OneRank) -> None:
    trainer = begun()
    from slurmtrain.integrations.lightning import SlurmtrainLogger

    logger = SlurmtrainLogger()
    for _ in range(6):
        trainer.step()
        logger.log_metrics({"loss": 0.5}, step=17)
    trainer.call("on_train_end")
    assert rank.lines()[-2:] == [(6, {}), (6, {"loss": 0.5})]
    assert rank.kinds() == ["session", "total", "measured", "finished"]
    assert (logger.name, logger.version) == ("slurmtrain", "0123456789")


def test_a_stop_waits_for_the_end_of_an_accumulation_and_keeps_one_file(rank: OneRank) -> None:
    directory = rank.attempt.run.checkpoints
    directory.mkdir()
    for name in ("stop-step=1.ckpt", "stop-step=0.ckpt.tmp", "epoch=0-step=1.ckpt"):
        (directory / name).write_text("old")
    trainer = begun()
    trainer.step()
    os.kill(os.getpid(), signal.SIGTERM)
    trainer.step(0)
    with pytest.raises(SystemExit) as left:
        trainer.step()
    assert left.value.code == STOPPED
    assert sorted(path.name for path in directory.iterdir()) == ["epoch=0-step=1.ckpt", "stop-step=2.ckpt"]
    assert rank.kinds()[-1] == "stopped"


@pytest.mark.parametrize(
    "changes",
    [{"global_step": 5}, {"max_steps": -1, "max_epochs": 2, "current_epoch": 1, "is_last_batch": True}],
    ids=["steps", "epochs"],
)
def test_a_stop_at_the_last_step_lets_the_trainer_finish(rank: OneRank, changes: dict[str, Any]) -> None:
    trainer = begun(**changes)
    os.kill(os.getpid(), signal.SIGTERM)
    trainer.step()
    trainer.call("on_train_end")
    assert rank.kinds()[-1] == "finished"


@pytest.mark.parametrize(
    ("dirpath", "directory"), [("here", "here"), (None, "beside")], ids=["dirpath", "ModelCheckpoint"]
)
def test_a_stop_saves_where_it_is_told_or_beside_the_other_checkpoints(
    rank: OneRank, tmp_path: Path, dirpath: str | None, directory: str
) -> None:
    beside = SimpleNamespace(dirpath=str(tmp_path / "beside"))
    trainer = Trainer(new_callback(tmp_path / dirpath if dirpath else None), checkpoint_callback=beside)
    trainer.call("on_train_start")
    os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(SystemExit):
        trainer.step()
    assert (tmp_path / directory / "stop-step=1.ckpt").read_text() == "saved"


def test_handlers_that_the_trainer_installs_are_replaced(rank: OneRank) -> None:
    trainer = Trainer(new_callback())
    own = signal.getsignal(signal.SIGTERM)
    for event in ("on_sanity_check_start", "on_train_start"):
        signal.signal(signal.SIGTERM, lambda *_: None)
        trainer.call(event)
        assert signal.getsignal(signal.SIGTERM) == own


def test_validations_and_saves_are_phases_of_their_own(rank: OneRank) -> None:
    trainer = Trainer(new_callback())
    trainer.call("on_validation_start")
    trainer.call("on_validation_end")
    assert rank.beat.phase is Phase.READY
    trainer.call("on_train_start")
    trainer.step()
    trainer.step()
    trainer.call("on_validation_start")
    trainer.call("on_validation_batch_end", None, None, 0)
    assert (rank.beat.phase, rank.beat.activity) == (Phase.PAUSED, "validation")
    trainer.call("on_validation_end")
    assert rank.beat.phase is Phase.TRAINING
    trainer.call("on_save_checkpoint", {})
    assert rank.beat.phase is Phase.SAVING
    trainer.step()
    assert rank.beat.phase is Phase.TRAINING


@pytest.mark.parametrize(
    ("changes", "total"),
    [({}, 6), ({"estimated_stepping_batches": float("inf")}, None), ({"optimizers": [1, 2]}, None)],
    ids=["one", "endless", "two optimizers"],
)
def test_the_total_is_reported_where_it_is_known(rank: OneRank, changes: dict[str, Any], total: int | None) -> None:
    begun(**changes)
    assert rank.events()[-1]["total_steps"] == total


def test_lightnings_own_requeue_is_refused(rank: OneRank) -> None:
    from lightning.pytorch.plugins.environments import SLURMEnvironment

    strategy = SimpleNamespace(cluster_environment=SLURMEnvironment(auto_requeue=True))
    with pytest.raises(UserError, match=r"plugins=\[SLURMEnvironment\(auto_requeue=False\)\]"):
        begun(strategy=strategy)
    begun(strategy=SimpleNamespace(cluster_environment=SLURMEnvironment(auto_requeue=False)))


def test_a_trainer_that_does_not_train_on_all_ranks_is_refused(rank: OneRank) -> None:
    with pytest.raises(UserError, match=r"this run has 1 ranks, but its trainer trains on 4: pass Trainer\(devices="):
        begun(world_size=4)
