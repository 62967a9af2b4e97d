"""Published checkpoints: whole or not there."""

from __future__ import annotations

import errno
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
import xxhash
from helpers.accounts import BOB, give, needs_accounts
from helpers.ranks import Attempt, Pair, alone, listed
from helpers.site import until
from helpers.small_model import fill, model, restored_step, save_steps

from slurmtrain.errors import CheckpointError
from slurmtrain.model.experiment.checkpoint import BestSpec, KeepSpec
from slurmtrain.runtime.checkpoint import checkpoint_files
from slurmtrain.runtime.checkpoint.checkpoint_files import Manifest, Staging
from slurmtrain.runtime.job.process_group import RankGroup
from slurmtrain.system.files import make_directory

ATTEMPT = "4711.0"
NAMES = ("__0_0.distcp", ".metadata")


@pytest.fixture
def checkpoints(tmp_path: Path) -> Path:
    path = tmp_path / "checkpoints"
    path.mkdir()
    return path


def manifest_of(step: int, written: dict[str, bytes], **more: Any) -> Manifest:
    return Manifest(
        step=step,
        world_size=1,
        saved_at=time.time(),
        seconds=1.5,
        stall_s=0.25,
        plan_hash="abc",
        attempt=ATTEMPT,
        why="steps",
        files={name: (len(content), xxhash.xxh3_128(content).hexdigest()) for name, content in written.items()},
        **more,
    )


def stage(checkpoints: Path, step: int, content: bytes = b"weights", attempt: str = ATTEMPT) -> Staging:
    staging = Staging(checkpoints, attempt, step)
    for name in NAMES:
        (make_directory(staging.path) / name).write_bytes(content + name.encode())
    return staging


def publish(checkpoints: Path, step: int, content: bytes = b"weights", attempt: str = ATTEMPT, **more: Any) -> Path:
    written = {name: content + name.encode() for name in NAMES}
    return stage(checkpoints, step, content, attempt).publish(manifest_of(step, written, **more))


def test_a_manifest_says_what_was_written(checkpoints: Path) -> None:
    kinds = {"model": {"kind": "module", "per_rank": False}}
    path = publish(
        checkpoints, 5, b"12345", metrics={"loss": 0.5}, params={"lr": 1}, objects=kinds, mesh=({"shape": [2]},)
    )
    manifest = checkpoint_files.read_manifest(path)
    assert (manifest.step, manifest.world_size, manifest.plan_hash, manifest.why) == (5, 1, "abc", "steps")
    assert (manifest.metrics, manifest.params, manifest.objects) == ({"loss": 0.5}, {"lr": 1}, kinds)
    assert manifest.files["__0_0.distcp"] == (17, xxhash.xxh3_128(b"12345__0_0.distcp").hexdigest())
    assert manifest.bytes == checkpoint_files.bytes_of(path) == 17 + 14
    described = manifest.describe(path)
    assert (described["step"], described["path"], described["bytes"]) == (5, "checkpoints/step-5", 31)
    assert (described["seconds"], described["stall_s"]) == (1.5, 0.25)
    checkpoint_files.verify_files(path, manifest, manifest.files)


def test_until_it_is_published_a_checkpoint_is_not_there(checkpoints: Path) -> None:
    # Nor is it where there is no directory.
    checkpoint_files.sweep(checkpoints / "nowhere", ATTEMPT)
    assert checkpoint_files.published(checkpoints / "nowhere") == list(checkpoints.iterdir()) == []
    staging = stage(checkpoints, 5)
    assert checkpoint_files.published(checkpoints) == []
    assert checkpoint_files.newest_published(checkpoints) is None
    staging.discard()
    assert list(checkpoints.iterdir()) == []


def test_published_checkpoints_come_newest_first_by_number(checkpoints: Path) -> None:
    for step in (9, 100, 10):
        publish(checkpoints, step)
    assert [path.name for path in checkpoint_files.published(checkpoints)] == ["step-100", "step-10", "step-9"]
    assert checkpoint_files.newest_published(checkpoints) == checkpoints / "step-100"


def test_a_directory_without_a_manifest_is_no_checkpoint(checkpoints: Path) -> None:
    publish(checkpoints, 5)
    (checkpoints / "step-9").mkdir()
    (checkpoints / "step-9" / "__0_0.distcp").write_bytes(b"x")
    assert [path.name for path in checkpoint_files.published(checkpoints)] == ["step-5"]
    with pytest.raises(CheckpointError, match="was never published"):
        checkpoint_files.read_manifest(checkpoints / "step-9")


@needs_accounts
def test_what_belongs_to_somebody_else_is_no_checkpoint_of_this_run(checkpoints: Path) -> None:
    publish(checkpoints, 5)
    publish(checkpoints, 9)
    give(checkpoints / "step-9/MANIFEST.json", BOB)
    assert [path.name for path in checkpoint_files.published(checkpoints)] == ["step-5"]
    with pytest.raises(CheckpointError, match=f"belongs to the account {BOB}"):
        checkpoint_files.read_manifest(checkpoints / "step-9")


def test_a_checkpoint_that_was_copied_with_a_generous_umask_is_read(checkpoints: Path) -> None:
    publish(checkpoints, 5)
    (checkpoints / "step-5").chmod(0o777)
    (checkpoints / "step-5/MANIFEST.json").chmod(0o666)
    assert checkpoint_files.read_manifest(checkpoints / "step-5").step == 5


def test_publishing_a_step_again_replaces_it(checkpoints: Path) -> None:
    publish(checkpoints, 5, b"old")
    path = publish(checkpoints, 5, b"new", attempt="4711.1")
    assert (path / "__0_0.distcp").read_bytes() == b"new__0_0.distcp"
    manifest = checkpoint_files.read_manifest(path)
    checkpoint_files.verify_files(path, manifest, manifest.files)
    assert [entry.name for entry in checkpoints.iterdir()] == ["step-5"]


def test_a_manifest_that_cannot_be_written_leaves_the_old_checkpoint(
    checkpoints: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(checkpoints, 5, b"old")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    staging = stage(checkpoints, 5, b"new", "4711.1")
    monkeypatch.setattr(checkpoint_files, "write_json", full)
    with pytest.raises(OSError, match="No space left"):
        staging.publish(manifest_of(5, {}))
    staging.discard()
    [path] = checkpoint_files.published(checkpoints)
    checkpoint_files.verify_files(path, checkpoint_files.read_manifest(path), NAMES)
    assert (path / "__0_0.distcp").read_bytes() == b"old__0_0.distcp"


def test_a_changed_byte_is_found_by_its_hash_alone(checkpoints: Path) -> None:
    path = publish(checkpoints, 5, b"12345")
    manifest = checkpoint_files.read_manifest(path)
    content = bytearray((path / NAMES[0]).read_bytes())
    content[2] ^= 1
    (path / NAMES[0]).write_bytes(content)
    checkpoint_files.verify_files(path, manifest, [NAMES[1]])
    checkpoint_files.verify_files(path, manifest, NAMES, hashes=False)
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp has changed since it was written"):
        checkpoint_files.verify_files(path, manifest, NAMES)
    os.truncate(path / NAMES[0], 4)
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp has 4 bytes, but its manifest says 17"):
        checkpoint_files.verify_files(path, manifest, NAMES, hashes=False)
    (path / NAMES[0]).unlink()
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp is missing"):
        checkpoint_files.verify_files(path, manifest, NAMES, hashes=False)


def test_a_file_that_cannot_be_read_is_named_with_the_reason(
    checkpoints: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = publish(checkpoints, 5)

    def fail(_: Path) -> str:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(checkpoint_files, "hash_file", fail)
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp cannot be read: Input/output error"):
        checkpoint_files.verify_files(path, checkpoint_files.read_manifest(path), NAMES)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\x00" * 64])
def test_a_manifest_that_is_no_json_is_refused(checkpoints: Path, content: bytes) -> None:
    path = publish(checkpoints, 5)
    (path / "MANIFEST.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"MANIFEST\.json"):
        checkpoint_files.read_manifest(path)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"schema": 3}, "a newer slurmtrain wrote it"),
        *(({"schema": schema}, "it is not slurmtrain's") for schema in (1, "x", None)),
        *((change, "has changed since it was written") for change in (
            {"step": None}, {"step": "x"}, {"files": []}, {"files": {"a": 1}}, {"files": {"a": {"bytes": 1}}},
            {"seconds": {}}, {"files": {"../a": {"bytes": 1, "xxh3_128": ""}}}, {"metrics": {"a": "b"}}, {"files": 3},
            {"world_size": "many"},
        )),
    ],
)  # fmt: skip
def test_a_manifest_with_other_content_is_refused(checkpoints: Path, change: dict[str, object], why: str) -> None:
    path = publish(checkpoints, 5)
    data = json.loads((path / "MANIFEST.json").read_text())
    (path / "MANIFEST.json").write_text(json.dumps({**data, **change}))
    with pytest.raises(CheckpointError, match=rf"MANIFEST\.json.*{why}|{why}.*MANIFEST\.json"):
        checkpoint_files.read_manifest(path)


def test_what_the_next_attempts_sweep_publishes_first_stays(checkpoints: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    staging = stage(checkpoints, 5)
    rename = Path.rename

    def too_late(path: Path, target: Path) -> Path:
        monkeypatch.setattr(Path, "rename", rename)
        checkpoint_files.sweep(checkpoints, "4711.1")
        return path.rename(target)

    monkeypatch.setattr(Path, "rename", too_late)
    with pytest.raises(FileNotFoundError):
        staging.publish(manifest_of(5, {}))
    assert [entry.name for entry in checkpoints.iterdir()] == ["step-5"]


def gone(checkpoints: Path, keep: KeepSpec) -> list[str]:
    return [each.path.name for each in checkpoint_files.disposable_checkpoints(checkpoints, keep)]


def test_what_the_policy_does_not_keep_is_disposable_oldest_first(checkpoints: Path) -> None:
    for step in (1, 2, 10, 20):
        publish(checkpoints, step, metrics={"loss": 1 / step if step > 1 else 0.0})
    assert gone(checkpoints, KeepSpec(last=2)) == ["step-1", "step-2"]
    assert gone(checkpoints, KeepSpec(last=1, best=BestSpec(metric="loss"))) == ["step-2", "step-10"]
    assert gone(checkpoints, KeepSpec(last=1, every_steps=10)) == ["step-1", "step-2"]
    assert gone(checkpoints, KeepSpec(last=9)) == []
    assert gone(checkpoints, KeepSpec(last=1))[-1] == "step-10"
    assert [each.bytes for each in checkpoint_files.disposable_checkpoints(checkpoints, KeepSpec(last=3))] == [35]


def test_a_damaged_checkpoint_goes_first_once_there_is_a_newer_one(checkpoints: Path) -> None:
    publish(checkpoints, 5)
    publish(checkpoints, 10)
    aside = checkpoint_files.set_aside(checkpoints / "step-10")
    assert (aside.name, checkpoint_files.damaged(checkpoints)) == ("damaged-step-10", [aside])
    assert gone(checkpoints, KeepSpec(last=1)) == []
    publish(checkpoints, 15)
    assert gone(checkpoints, KeepSpec(last=1)) == ["damaged-step-10", "step-5"]


def test_two_damaged_checkpoints_of_one_step_are_both_put_aside(checkpoints: Path) -> None:
    names = [checkpoint_files.set_aside(publish(checkpoints, 5)).name for _ in range(3)]
    assert names == ["damaged-step-5", "damaged-step-5.1", "damaged-step-5.2"]
    assert checkpoint_files.published(checkpoints) == []


def test_what_dead_attempts_left_is_swept_and_nothing_else(checkpoints: Path) -> None:
    publish(checkpoints, 1)
    for attempt in ("4711.0", "4711.1", "4711.10"):
        stage(checkpoints, 2, attempt=attempt)
    (checkpoints / ".trash-step-0").mkdir()
    (checkpoints / "mine.txt").write_text("a user's file")
    checkpoint_files.sweep(checkpoints, "4711.1")
    assert sorted(entry.name for entry in checkpoints.iterdir()) == [".4711.1-step-2", "mine.txt", "step-1"]


def test_sweeping_publishes_what_only_lacks_its_name(checkpoints: Path) -> None:
    publish(checkpoints, 1)
    for step, content in ((1, b"late"), (2, b"new")):
        staging = stage(checkpoints, step, content)
        written = {name: content + name.encode() for name in NAMES}
        (staging.path / "MANIFEST.json").write_text(json.dumps(manifest_of(step, written).to_json()))
    checkpoint_files.sweep(checkpoints, "4711.1")
    assert sorted(entry.name for entry in checkpoints.iterdir()) == ["step-1", "step-2"]
    for path in checkpoint_files.published(checkpoints):
        checkpoint_files.verify_files(path, checkpoint_files.read_manifest(path), NAMES)
    assert (checkpoints / "step-1" / NAMES[0]).read_bytes().startswith(b"weights")


# --- rivals -----------------------------------------------------------------------------------------------------------


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
