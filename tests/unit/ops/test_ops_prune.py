"""Pruning checkpoints: what the policy lets go is deleted, and what a run builds is left alone."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.checkpoints import ATTEMPT, write_rank_event
from helpers.saved_runs import FILES, STEPS, act_before, checkpoint_states, cut, delete_first, fill_the_disk, on_disk

from slurmtrain.model.run.layout import RunDir
from slurmtrain.ops.prune import Pruned, prune
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.ops.verify import verify
from slurmtrain.runtime.checkpoint import checkpoint_files
from slurmtrain.system.files import read_json, write_json
from slurmtrain.system.locks import locked

Act = Callable[[], object]


def steps_of(pruned: Pruned) -> list[int]:
    return [one.step for one in pruned.checkpoints]


def test_what_the_policy_lets_go_is_deleted_while_the_run_trains(workspace: Workspace, training: RunDir) -> None:
    size = checkpoint_files.bytes_of(training.checkpoints / "step-10") + checkpoint_files.bytes_of(
        training.checkpoints / "step-20"
    )
    pruned = prune(workspace, training.id)
    assert (steps_of(pruned), pruned.bytes, pruned.problems) == ([10, 20], size, [])
    assert on_disk(training) == ["step-30", "step-40"]
    assert sorted(checkpoint_states(workspace, training)) == [30, 40]
    assert steps_of(prune(workspace, training.id)) == []


def test_a_dry_run_changes_nothing(workspace: Workspace, ended: RunDir) -> None:
    (ended.checkpoints / ".1.0-step-50").mkdir()
    before = on_disk(ended)
    pruned = prune(workspace, ended.id, dry=True)
    assert steps_of(pruned) == [10, 20]
    assert [left.path.name for left in pruned.leftovers] == [".1.0-step-50"]
    assert on_disk(ended) == before
    assert sorted(checkpoint_states(workspace, ended)) == list(STEPS)
    assert not list(ended.journals.glob("prune-*"))


def test_the_policy_is_that_of_the_newest_submission(workspace: Workspace, training: RunDir) -> None:
    plan = read_json(training.plan) or {}
    plan["spec"]["checkpoint"]["keep"] = {"last": 1, "every_steps": 20, "best": None}
    training.submission(1).path.mkdir(parents=True)
    write_json(training.submission(1).plan, plan)
    assert steps_of(prune(workspace, training.id)) == [10, 30]


def test_one_that_verify_has_found_bad_does_not_stand_for_a_good_one(workspace: Workspace, training: RunDir) -> None:
    for step in (30, 40):
        cut(training.checkpoints / f"step-{step}" / FILES[0])
    verify(workspace, training.id, hashes=False)
    assert steps_of(prune(workspace, training.id)) == []
    for step in (10, 20):
        cut(training.checkpoints / f"step-{step}" / FILES[0])
    verify(workspace, training.id, hashes=False)
    assert steps_of(prune(workspace, training.id)) == [], "without a good one, all stay"


def test_damaged_ones_go_when_there_is_a_newer_one(workspace: Workspace, training: RunDir) -> None:
    write_rank_event(
        training, "rejected", step=20, path="checkpoints/step-20", reason="hash", aside="checkpoints/damaged-step-20"
    )
    checkpoint_files.set_aside(training.checkpoints / "step-20")
    cut(training.checkpoints / "step-40" / FILES[0])
    verify(workspace, training.id, hashes=False)
    pruned = prune(workspace, training.id)
    assert [(one.path.name, one.why) for one in pruned.checkpoints] == [("damaged-step-20", "damaged")]
    assert on_disk(training) == ["step-10", "step-30", "step-40"]
    assert sorted(checkpoint_states(workspace, training)) == [10, 30, 40]


def test_one_that_the_run_deletes_first_is_left_to_it(
    workspace: Workspace, training: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    act_before(monkeypatch, "delete_checkpoint", lambda: delete_first(training, 10))
    pruned = prune(workspace, training.id)
    assert (steps_of(pruned), pruned.problems) == ([20], [])
    assert sorted(checkpoint_states(workspace, training)) == [10, 30, 40], "the run journals what it has deleted"


def test_what_cannot_be_deleted_is_reported_and_stays_listed(
    workspace: Workspace, training: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    delete = checkpoint_files.delete_checkpoint

    def refuse(path: Path) -> None:
        if path.name == "step-10":
            raise OSError(errno.EACCES, "Permission denied")
        delete(path)

    monkeypatch.setattr(checkpoint_files, "delete_checkpoint", refuse)
    pruned = prune(workspace, training.id)
    assert pruned.problems == [f"{training.checkpoints / 'step-10'} cannot be deleted: permission denied"]
    assert steps_of(pruned) == [20]
    assert sorted(checkpoint_states(workspace, training)) == [10, 30, 40]


def test_a_full_disk_keeps_nothing_from_being_deleted(
    workspace: Workspace, training: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill_the_disk(monkeypatch)
    pruned = prune(workspace, training.id)
    assert on_disk(training) == ["step-30", "step-40"]
    assert len(pruned.problems) == 2
    assert "no space left on the device" in pruned.problems[0]


class Killed(BaseException):
    """What ends a command at once."""


def test_the_next_prune_journals_what_a_killed_one_could_not(
    workspace: Workspace, ended: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    delete = checkpoint_files.delete_checkpoint

    def deadly(path: Path) -> None:
        delete(path)
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_files, "delete_checkpoint", deadly)
        with pytest.raises(Killed):
            prune(workspace, ended.id)
    assert on_disk(ended) == ["step-20", "step-30", "step-40"]
    assert sorted(checkpoint_states(workspace, ended)) == list(STEPS)
    assert steps_of(prune(workspace, ended.id)) == [20]
    assert sorted(checkpoint_states(workspace, ended)) == [30, 40]


def test_what_dead_attempts_left_goes_once_the_run_is_over_and_no_command_starts_it_again(
    workspace: Workspace, ended: RunDir
) -> None:
    for name in (".1.0-step-50", ".trash-step-5"):
        (ended.checkpoints / name).mkdir()
        (ended.checkpoints / name / "__0_0.distcp").write_bytes(b"x" * 100)
    with locked(ended.lock):
        assert steps_of(prune(workspace, ended.id)) == [10, 20]
    pruned = prune(workspace, ended.id)
    assert [(left.path.name, left.bytes, left.complete) for left in pruned.leftovers] == [
        (".1.0-step-50", 100, False), (".trash-step-5", 100, False)
    ]  # fmt: skip
    assert pruned.bytes == 200
    assert on_disk(ended) == ["step-30", "step-40"]


def test_one_that_only_lacks_its_name_is_published_and_known_then(workspace: Workspace, ended: RunDir) -> None:
    (ended.checkpoints / "step-40").rename(ended.checkpoints / ".1.0-step-40")
    journal = ended.attempts / ATTEMPT / "rank-0.jsonl"
    journal.write_text("".join(line for line in journal.read_text().splitlines(True) if '"step":40' not in line))
    assert sorted(checkpoint_states(workspace, ended)) == [10, 20, 30]
    pruned = prune(workspace, ended.id)
    assert [left.complete for left in pruned.leftovers] == [True]
    assert on_disk(ended) == ["step-30", "step-40"]
    assert checkpoint_states(workspace, ended) == {30: (True, False), 40: (True, False)}


def test_what_a_run_that_trains_is_building_is_left_alone(workspace: Workspace, training: RunDir) -> None:
    (training.checkpoints / ".1.0-step-50").mkdir()
    (training.checkpoints / ".0.9-step-45").mkdir()
    checkpoint_files.delete_checkpoint(training.checkpoints / "step-10")
    pruned = prune(workspace, training.id)
    assert (pruned.leftovers, steps_of(pruned)) == ([], [20])
    assert on_disk(training) == [".0.9-step-45", ".1.0-step-50", "step-30", "step-40"]
    assert sorted(checkpoint_states(workspace, training)) == [10, 30, 40], "it journals what it has deleted itself"
