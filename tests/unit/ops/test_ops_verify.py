"""Verifying checkpoints: whatever is damaged is noticed, and journaled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.checkpoints import write_rank_event
from helpers.saved_runs import FILES, STEPS, act_before, checkpoint_states, cut, delete_first, fill_the_disk, flip

from slurmtrain.model.run.layout import MANIFEST, RunDir
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.ops.verify import Verified, verify, verify_checkpoint
from slurmtrain.runtime.checkpoint import checkpoint_files
from slurmtrain.system.files import write_json

Act = Callable[[], object]


def results(verified: Verified) -> dict[int, str]:
    return {checked.step: checked.result for checked in verified.checked}


def test_good_checkpoints_are_good_and_journaled_as_such(workspace: Workspace, training: RunDir) -> None:
    verified = verify(workspace, training.id)
    assert results(verified) == dict.fromkeys(STEPS, "good")
    assert (verified.all_good, verified.newest_good, verified.problems) == (True, 40, [])
    assert checkpoint_states(workspace, training) == dict.fromkeys(STEPS, (True, True))


@pytest.mark.parametrize("name", FILES[:2])
@pytest.mark.parametrize("damage", [flip, cut, Path.unlink], ids=["flipped", "cut", "missing"])
def test_any_damage_to_any_file_is_found_and_journaled(
    workspace: Workspace, training: RunDir, name: str, damage: Callable[[Path], object]
) -> None:
    damage(training.checkpoints / "step-40" / name)
    verified = verify(workspace, training.id)
    assert results(verified) == {10: "good", 20: "good", 30: "good", 40: "bad"}
    assert (verified.all_good, verified.newest_good) == (False, 30)
    assert str(training.checkpoints / "step-40" / name) in str(verified.bad[0].reason)
    assert checkpoint_states(workspace, training)[40] == (False, False)
    assert (training.checkpoints / "step-40").is_dir(), "verify renames nothing"


def test_all_bad_files_are_reported(workspace: Workspace, training: RunDir) -> None:
    cut(training.checkpoints / "step-20" / FILES[0])
    (training.checkpoints / "step-20" / FILES[1]).unlink()
    [checked] = verify(workspace, training.id, step=20).checked
    assert checked.reason is not None
    assert "bytes, but its manifest says" in checked.reason
    assert f"{FILES[1]} is missing" in checked.reason


@pytest.mark.parametrize("damage", [flip, cut], ids=["flipped", "cut"])
def test_a_manifest_that_cannot_be_read_makes_a_bad_checkpoint(
    workspace: Workspace, training: RunDir, damage: Callable[[Path], object]
) -> None:
    path = training.checkpoints / "step-20" / MANIFEST
    path.write_bytes(path.read_bytes().strip())
    path.write_text(path.read_text().replace('"schema": 2', '"schema": 9') if damage is flip else path.read_text()[:-1])
    verified = verify(workspace, training.id)
    assert results(verified) == {10: "good", 20: "bad", 30: "good", 40: "good"}
    assert checkpoint_states(workspace, training)[20] == (False, False)


def test_sizes_alone_are_looked_at_on_demand_and_do_not_make_a_checkpoint_verified(
    workspace: Workspace, training: RunDir
) -> None:
    flip(training.checkpoints / "step-30" / FILES[0])
    cut(training.checkpoints / "step-20" / FILES[0])
    verified = verify(workspace, training.id, hashes=False)
    assert results(verified) == {10: "good", 20: "bad", 30: "good", 40: "good"}
    assert checkpoint_states(workspace, training) == {
        10: (True, False),
        20: (False, False),
        30: (True, False),
        40: (True, False),
    }


def test_what_was_repaired_is_good_again(workspace: Workspace, training: RunDir) -> None:
    path = training.checkpoints / "step-40" / FILES[0]
    flip(path)
    assert not verify(workspace, training.id, step=40).all_good
    assert verify_checkpoint(path.parent, lambda *_: None).result == "bad"
    flip(path)
    assert verify(workspace, training.id, step=40).all_good
    assert verify_checkpoint(path.parent, lambda *_: None).result == "good"
    assert checkpoint_states(workspace, training)[40] == (True, True)


def test_those_put_aside_are_listed_with_the_reason_and_do_not_count(workspace: Workspace, training: RunDir) -> None:
    name = checkpoint_files.relative_path(checkpoint_files.set_aside(training.checkpoints / "step-40"))
    write_rank_event(training, "rejected", step=40, path="checkpoints/step-40", reason="its hash differs", aside=name)
    (training.checkpoints / "damaged-step-15.2").mkdir()
    verified = verify(workspace, training.id)
    assert results(verified) == {10: "good", 15: "aside", 20: "good", 30: "good", 40: "aside"}
    aside = [(one.step, one.reason) for one in verified.checked if one.result == "aside"]
    assert aside == [(15, None), (40, "its hash differs")]
    assert verified.all_good


def test_one_that_the_run_deletes_meanwhile_is_not_bad(
    workspace: Workspace, training: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    act_before(monkeypatch, "verify_files", lambda: delete_first(training, 10))
    verified = verify(workspace, training.id)
    assert results(verified) == {10: "gone", 20: "good", 30: "good", 40: "good"}
    assert verified.all_good
    assert checkpoint_states(workspace, training)[10] == (True, False)


def test_one_that_the_run_saves_anew_meanwhile_is_not_bad(
    workspace: Workspace, training: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    def save_anew() -> None:
        path = training.checkpoints / "step-10"
        write_json(path / MANIFEST, replace(checkpoint_files.read_manifest(path), saved_at=5.0).to_json())
        cut(path / FILES[0])

    act_before(monkeypatch, "verify_files", save_anew)
    verified = verify(workspace, training.id, step=10)
    assert results(verified) == {10: "gone"}
    assert not verified.all_good, "nothing that is there was found to be good"


def test_files_are_compared_in_parallel_and_bytes_are_reported(workspace: Workspace, training: RunDir) -> None:
    progress: list[tuple[int, int]] = []
    verify(workspace, training.id, show=lambda read, total: progress.append((read, total)))
    total = sum(checkpoint_files.bytes_of(training.checkpoints / f"step-{step}") for step in STEPS)
    assert len(progress) == len(STEPS) * 2
    assert progress[-1] == (total, total)
    assert [done for done, _ in progress] == sorted(done for done, _ in progress)


def test_a_result_that_cannot_be_journaled_is_reported_all_the_same(
    workspace: Workspace, training: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill_the_disk(monkeypatch)
    verified = verify(workspace, training.id)
    assert verified.all_good
    assert verified.problems == [f"the results cannot be recorded in {training.journals}: no space left on the device"]
