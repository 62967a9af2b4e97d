"""Disks that are full, read-only or broken, and quotas: a save fails and says so, and the next one works."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.killpoints import heal, writers_that_fail
from helpers.ranks import Attempt, alone, listed
from helpers.rare import drawn, rare
from helpers.small_model import model, restored_step, save_steps, values

from slurmtrain.model.spec.checkpoint import KeepSpec


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one megabyte."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m,mode=700", "none", str(place)], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"file systems cannot be mounted here: {mounted.stderr.strip()}")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)


def test_a_save_that_a_full_disk_has_no_room_for_fails_and_the_next_one_works(small_disk: Path) -> None:
    module = model(width=200)  # 160 KB
    with Attempt(small_disk, alone(), {"model": module}, keep=KeepSpec(last=9)) as attempt:
        assert save_steps(attempt, module, 1, 2) == ["", ""]
        ballast = small_disk / "ballast"
        with ballast.open("wb") as file:
            free = os.statvfs(small_disk).f_bavail * os.statvfs(small_disk).f_frsize
            file.write(bytes(free - 50_000))
        [problem] = save_steps(attempt, module, 3)
        assert re.match(r"it needs 0\.1\d MB, and 0\.0\d MB are free in ", problem)
        assert listed(small_disk) == ["step-1", "step-2"]
        assert [event["step"] for event in attempt.events("save_failed")] == [3]
        ballast.unlink()
        assert save_steps(attempt, module, 4) == [""]
    assert listed(small_disk) == ["step-1", "step-2", "step-4"]
    module = model(-1, width=200)
    with Attempt(small_disk, alone(), {"model": module}, restart=1) as attempt:
        restored = attempt.restore()
        assert restored is not None
    assert values(module) == {4.0}


def test_in_a_read_only_directory_saves_fail_loudly_until_it_is_writable(tmp_path: Path) -> None:
    checkpoints = tmp_path / "checkpoints"
    checkpoints.mkdir()
    module = model()
    with Attempt(tmp_path, alone(), {"model": module}) as attempt:
        assert save_steps(attempt, module, 1) == [""]
        mount = ["mount", "--bind", str(checkpoints), str(checkpoints)]
        mounted = subprocess.run(mount, capture_output=True, text=True)
        if mounted.returncode:
            pytest.skip(f"file systems cannot be mounted here: {mounted.stderr.strip()}")
        try:
            subprocess.run(["mount", "-o", "remount,ro,bind", str(checkpoints)], check=True)
            [problem] = save_steps(attempt, module, 2)
            assert "read-only file system" in problem
            assert [event["reason"] for event in attempt.events("save_failed")] == [problem]
            # Reading still works.
            assert restored_step(tmp_path) == 1
            attempt.take_lease()
        finally:
            subprocess.run(["umount", "--lazy", str(checkpoints)], check=True)
        assert save_steps(attempt, module, 3) == [""]
    assert listed(tmp_path) == ["step-1", "step-3"]


IO_ERROR = ("EIO", "input/output error")
FULL = ("ENOSPC", "no space left on the device")


@pytest.mark.parametrize(
    ("effect", "error", "problem"),
    [
        *((effect, *IO_ERROR) for effect in ("open", "fsync", "os.mkdir", "os.rename")),
        *(pytest.param(effect, *IO_ERROR, marks=rare) for effect in ("write", "half a write")),
        ("half a write", *FULL),
        pytest.param("fsync", *FULL, marks=rare),
        ("write", "EDQUOT", "disk quota exceeded"),
    ],
)
def test_a_disk_that_fails_fails_one_save_and_training_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, effect: str, error: str, problem: str
) -> None:
    fault = tmp_path / "fault"
    for name, value in writers_that_fail(fault, tmp_path / "run", effect=effect, action=error).items():
        monkeypatch.setenv(name, value)
    (tmp_path / "run").mkdir()
    module = model()
    with Attempt(tmp_path / "run", alone(), {"model": module}) as attempt:
        problems = save_steps(attempt, module, 1, 2)
        assert all(problem in text for text in problems), problems
        assert all(text.startswith("rank 0: ") for text in problems)
        assert listed(tmp_path / "run") == []
        heal(fault)
        assert save_steps(attempt, module, 3) == [""]
        assert [event["step"] for event in attempt.events("save_failed")] == [1, 2]
    assert listed(tmp_path / "run") == ["step-3"]
    assert restored_step(tmp_path / "run") == 3


@pytest.mark.parametrize("number", drawn([1, 2, 3, 4, 5], 3))
def test_after_a_failed_fsync_nothing_is_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """The fsyncs of a save: the rank's file, the index, the directory, the manifest, the directory again."""
    fault = tmp_path / "fault"
    run = tmp_path / "run"
    run.mkdir()
    for name, value in writers_that_fail(fault, run, effect="fsync", number=number, action="EIO").items():
        monkeypatch.setenv(name, value)
    module = model()
    with Attempt(run, alone(), {"model": module}) as attempt:
        [problem] = save_steps(attempt, module, 1)
        assert "input/output error" in problem
        assert listed(run) == []
        heal(fault)
        assert save_steps(attempt, module, 2) == [""]
    assert listed(run) == ["step-2"]
