"""Two attempts of a run at once: only the one that holds the lease publishes and deletes."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.ranks import Attempt, Pair, alone, listed
from helpers.site import until
from helpers.small_model import fill, model, restored_step, save_steps

from slurmtrain.errors import CheckpointError
from slurmtrain.model.experiment.checkpoint import KeepSpec
from slurmtrain.runtime.checkpoint import checkpoint_files
from slurmtrain.runtime.job.process_group import RankGroup


def test_an_attempt_that_has_lost_the_lease_publishes_nothing(tmp_path: Path) -> None:
    old, new = model(), model()
    with Attempt(tmp_path, alone(), {"model": old}) as zombie:
        assert save_steps(zombie, old, 1) == [""]
        fill(old, 66)
        assert zombie.begin(2) is None
        with Attempt(tmp_path, alone(), {"model": new}, restart=1) as living:
            restored = living.restore()
            assert restored is not None
            assert restored.step == 1
            assert save_steps(living, new, 2) == [""]
            with pytest.raises(CheckpointError, match="another attempt has taken over this run"):
                zombie.saver.finish()
            fill(old, 67)
            assert zombie.begin(3) is None
            with pytest.raises(CheckpointError, match="another attempt has taken over this run"):
                zombie.saver.finish()
            assert save_steps(living, new, 3) == [""]
        assert [event["step"] for event in zombie.events("saved")] == [1]
        assert zombie.events("pruned") == []
    assert listed(tmp_path) == ["step-1", "step-2", "step-3"]
    assert restored_step(tmp_path) == 3
    assert checkpoint_files.read_manifest(tmp_path / "checkpoints" / "step-2").attempt == "1.1"


def test_an_attempt_that_has_lost_the_lease_deletes_nothing(tmp_path: Path) -> None:
    """It may keep less than the one that has taken over."""
    old, new = model(), model()
    with Attempt(tmp_path, alone(), {"model": new}, keep=KeepSpec(last=9)) as attempt:
        assert save_steps(attempt, new, 1, 2, 3) == [""] * 3
    with Attempt(tmp_path, alone(), {"model": old}, restart=1, keep=KeepSpec(last=1)) as zombie:
        assert zombie.begin(4) is None
        with Attempt(tmp_path, alone(), {"model": new}, restart=2, keep=KeepSpec(last=9)) as living:
            with pytest.raises(CheckpointError, match="another attempt has taken over this run"):
                zombie.saver.finish()
            assert save_steps(living, new, 5) == [""]
    assert listed(tmp_path) == ["step-1", "step-2", "step-3", "step-5"]


def fence(ranks: RankGroup, root: Path) -> str:
    module = model()
    with Attempt(root, ranks, {"model": module}) as attempt:
        assert attempt.save(1) == ""
        assert attempt.begin(2) is None
        if ranks.rank == 0:
            (root / "lease.json").write_text('{"submission": 1, "attempt": "1.1"}')
        with pytest.raises(CheckpointError) as error:
            attempt.saver.finish()
    return str(error.value)


def test_all_ranks_of_a_lost_attempt_raise_the_same_error(tmp_path: Path, pair: Pair) -> None:
    first, second = pair.run(fence, tmp_path)
    assert first == second
    assert "another attempt has taken over" in first
    assert listed(tmp_path) == ["step-1"]


def test_a_lease_that_cannot_be_read_publishes_nothing(tmp_path: Path) -> None:
    module = model()
    with Attempt(tmp_path, alone(), {"model": module}) as attempt:
        assert save_steps(attempt, module, 1) == [""]
        attempt.run.lease.write_text("{")
        [problem] = save_steps(attempt, module, 2)
        assert "lease.json" in problem
        attempt.take_lease()
        assert save_steps(attempt, module, 3) == [""]
    assert listed(tmp_path) == ["step-1", "step-3"]


def test_a_lost_attempts_ranks_that_still_write_leave_the_living_ones_files_alone(tmp_path: Path) -> None:
    """The living attempt sweeps while the lost one writes: they share no directory."""
    old, new = model(), model()
    with (
        Attempt(tmp_path, alone(), {"model": old}) as zombie,
        Attempt(tmp_path, alone(), {"model": new}, restart=1) as living,
    ):
        assert zombie.begin(5) is None
        assert living.begin(5) is None
        # While there is a directory and no file in it, a sweep fails the save before anybody looks at the lease.
        staged = checkpoint_files.Staging(zombie.run.checkpoints, zombie.attempt.path.name, 5).path
        until((staged / "__0_0.distcp").exists, "the lost attempt's writing")
        checkpoint_files.sweep(living.run.checkpoints, living.attempt.path.name)
        with pytest.raises(CheckpointError):
            zombie.saver.finish()
        outcome = living.saver.finish()
        assert outcome is not None
        assert outcome.problem == ""
    checkpoint_files.sweep(living.run.checkpoints, "1.2")
    assert listed(tmp_path) == ["step-5"]
