"""The callback for the Trainer of transformers, called as the Trainer does."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.one_rank import OneRank

from slurmtrain.errors import UserError
from slurmtrain.model.diagnosis.hang import Phase
from slurmtrain.model.interruption.exit_report import STOPPED

pytest.importorskip("transformers", reason="transformers is not installed: scripts/bootstrap trainers")
from transformers import TrainerControl, TrainerState

from slurmtrain.integrations.transformers import SlurmtrainCallback


class Caller:
    """Calls a callback as the Trainer does in a run of six steps."""

    def __init__(self, *, world_size: int = 1, jit: bool = False) -> None:
        self.callback = SlurmtrainCallback()
        self.args: Any = SimpleNamespace(world_size=world_size, enable_jit_checkpoint=jit)
        self.state = TrainerState(global_step=0, max_steps=6)
        self.control = TrainerControl()

    def call(self, event: str, **more: Any) -> None:
        getattr(self.callback, event)(self.args, self.state, self.control, **more)

    def step(self) -> None:
        self.state.global_step += 1
        self.control._new_step()
        self.call("on_step_end")


def test_steps_logs_and_the_end_are_reported(rank: OneRank) -> None:
    trainer = Caller()
    trainer.call("on_train_begin")
    for _ in range(6):
        trainer.step()
    trainer.call("on_log", logs={"loss": 0.5, "note": "x"})
    trainer.call("on_train_end")
    assert rank.lines()[-2:] == [(6, {}), (6, {"loss": 0.5})]
    assert rank.kinds() == ["session", "total", "measured", "finished"]
    assert rank.beat.phase is Phase.READY


def test_a_stop_saves_without_an_evaluation_and_leaves_after_the_save(rank: OneRank) -> None:
    trainer = Caller()
    trainer.call("on_train_begin")
    trainer.step()
    assert not trainer.control.should_save
    os.kill(os.getpid(), signal.SIGTERM)
    trainer.control.should_evaluate = True
    trainer.step()
    assert trainer.control.should_save
    assert trainer.control.should_training_stop
    assert not trainer.control.should_evaluate
    with pytest.raises(SystemExit) as left:
        trainer.call("on_save")
    assert left.value.code == STOPPED
    assert (rank.events()[-1]["kind"], rank.events()[-1]["step"]) == ("stopped", 2)


def test_a_stop_at_the_last_step_lets_the_trainer_finish(rank: OneRank) -> None:
    trainer = Caller()
    trainer.call("on_train_begin")
    trainer.state.global_step = 5
    os.kill(os.getpid(), signal.SIGTERM)
    trainer.step()
    assert not trainer.control.should_training_stop
    trainer.call("on_save")
    trainer.call("on_train_end")
    assert rank.kinds()[-1] == "finished"


def test_evaluations_and_saves_are_phases_of_their_own(rank: OneRank) -> None:
    trainer = Caller()
    trainer.call("on_prediction_step")  # an evaluation before training
    trainer.call("on_evaluate")
    assert rank.beat.phase is Phase.READY
    trainer.call("on_train_begin")
    trainer.step()
    trainer.step()
    trainer.control.should_evaluate = trainer.control.should_save = True
    trainer.call("on_epoch_end")
    assert (rank.beat.phase, rank.beat.activity) == (Phase.PAUSED, "evaluation")
    paused_at = rank.beat.at
    trainer.call("on_prediction_step")
    assert rank.beat.phase is Phase.PAUSED
    assert rank.beat.at > paused_at
    trainer.call("on_evaluate")
    assert rank.beat.phase is Phase.SAVING
    trainer.call("on_save")
    assert rank.beat.phase is Phase.TRAINING


def test_a_jit_checkpoint_is_refused_in_a_job(rank: OneRank) -> None:
    with pytest.raises(UserError, match=r"enable_jit_checkpoint replaces the handler of SIGTERM.*: remove it"):
        Caller(jit=True).call("on_train_begin")


def test_a_trainer_that_does_not_train_on_all_ranks_is_refused(rank: OneRank) -> None:
    with pytest.raises(UserError, match=r"this run has 1 ranks, but its trainer trains on 2: .*use_cpu=True"):
        Caller(world_size=2).call("on_train_begin")


def test_outside_a_job_the_callback_does_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from slurmtrain.runtime.training import loop

    loop.current.cache_clear()
    monkeypatch.chdir(tmp_path)
    trainer = Caller(world_size=2, jit=True)
    assert trainer.callback.resume_from is None
    for event in ("on_train_begin", "on_step_end", "on_evaluate", "on_save", "on_train_end"):
        trainer.call(event)
    assert not trainer.control.should_save
    assert list(tmp_path.iterdir()) == []
    loop.current.cache_clear()
