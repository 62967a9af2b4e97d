"""The names of checkpoints' directories."""

from __future__ import annotations

import pytest

from slurmtrain.model.run.file_names import checkpoint_name, checkpoint_step, staging_name, trash_name


@pytest.mark.parametrize("step", [0, 5, 10**9])
def test_a_checkpoints_step_is_read_from_its_name(step: int) -> None:
    assert checkpoint_step(checkpoint_name(step)) == step


def test_checkpoints_that_are_being_built_or_deleted_are_not_taken_for_published_ones() -> None:
    assert checkpoint_step(staging_name("4711.0", 5)) is None
    assert checkpoint_step(trash_name("step-5")) is None
    for name in ("step-", "step--1", "step-5.tmp", "step-five", "mystep-5"):
        assert checkpoint_step(name) is None, name


def test_no_two_attempts_share_a_staging_name() -> None:
    assert staging_name("4711.0", 5) != staging_name("4711.1", 5)
