"""Saving and loading with accelerate, on one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.one_rank import OneRank

from slurmtrain.errors import UserError
from slurmtrain.model.diagnosis.hang import Phase

pytest.importorskip("accelerate", reason="accelerate is not installed: scripts/bootstrap trainers")
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration

from slurmtrain.integrations.accelerate import load_state, save_state


def prepared(**options: Any) -> tuple[Accelerator, torch.nn.Linear]:
    accelerator = Accelerator(cpu=True, **options)
    return accelerator, accelerator.prepare(torch.nn.Linear(2, 1))


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_what_was_saved_is_loaded_with_its_step(rank: OneRank, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURMTRAIN_RESUME_FROM", str(tmp_path / "checkpoint-7"))
    accelerator, model = prepared()
    assert save_state(accelerator, 7, tmp_path) == tmp_path / "checkpoint-7"
    saved = model.weight.detach().clone()
    with torch.no_grad():
        model.weight.zero_()
    assert load_state(accelerator) == 7
    assert torch.equal(model.weight, saved)


def test_without_a_checkpoint_training_starts_at_step_0(rank: OneRank) -> None:
    accelerator, _ = prepared()
    assert load_state(accelerator) == 0


def test_a_checkpoint_of_another_name_is_refused(rank: OneRank, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURMTRAIN_RESUME_FROM", "/somewhere/epoch_3")
    accelerator, _ = prepared()
    with pytest.raises(UserError, match=r"/somewhere/epoch_3 is not a checkpoint of .*save_state\(\)"):
        load_state(accelerator)


def test_the_newest_are_kept_and_what_killed_saves_left_is_deleted(rank: OneRank) -> None:
    directory = rank.attempt.run.checkpoints
    for name in ("checkpoint-2", "checkpoint-4.tmp", "checkpoint-5", "checkpoint-9", "checkpoint-6.tmp", "other"):
        (directory / name / "part").mkdir(parents=True)
    accelerator, _ = prepared()
    assert save_state(accelerator, 6) == directory / "checkpoint-6"
    # A later one is another run's, or was left by an attempt that went further: it is not ours to delete.
    assert names(directory) == ["checkpoint-5", "checkpoint-6", "checkpoint-9", "other"]
    assert names(directory / "checkpoint-6") == ["model.safetensors", "random_states_0.pkl"]
    save_state(accelerator, 7, keep=1)
    assert names(directory) == ["checkpoint-7", "checkpoint-9", "other"]
    # One of the same step is replaced.
    (directory / "checkpoint-7" / "stale").touch()
    save_state(accelerator, 7)
    assert names(directory / "checkpoint-7") == ["model.safetensors", "random_states_0.pkl"]
    with pytest.raises(ValueError, match="must keep at least one checkpoint, not 0"):
        save_state(accelerator, 8, keep=0)


def test_a_save_that_fails_leaves_the_one_of_the_same_step(rank: OneRank, monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator, _ = prepared()
    path = save_state(accelerator, 3)

    def fail(*arguments: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(accelerator, "save_state", fail)
    with pytest.raises(OSError, match="no space left"):
        save_state(accelerator, 3)
    assert names(path) == ["model.safetensors", "random_states_0.pkl"]


def test_a_save_is_a_phase_of_its_own(rank: OneRank, monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator, _ = prepared()
    phases = []
    monkeypatch.setattr(
        accelerator, "save_state", lambda path: [Path(path).mkdir(parents=True), phases.append(rank.beat.phase)]
    )
    save_state(accelerator, 3)
    assert phases == [Phase.SAVING]


def test_names_of_accelerates_own_are_refused(rank: OneRank, tmp_path: Path) -> None:
    naming = ProjectConfiguration(project_dir=str(tmp_path), automatic_checkpoint_naming=True, total_limit=1)
    accelerator, _ = prepared(project_config=naming)
    with pytest.raises(UserError, match=r"total_limit deletes checkpoints before the next is written: remove both"):
        save_state(accelerator, 3)


def test_an_accelerator_that_does_not_train_on_all_ranks_is_refused(
    rank: OneRank, monkeypatch: pytest.MonkeyPatch
) -> None:
    accelerator, _ = prepared()
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match=r"this run has 2 ranks, but its trainer trains on 1: .*cpu=True"):
        load_state(accelerator)
