"""Saves that fail, because of disks, writers or states: they say so, and the next one works."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.killpoints import heal, writers_that_fail
from helpers.ranks import Attempt, Pair, alone, listed
from helpers.rare import drawn, rare
from helpers.small_model import Value, fill, model, restored_step, save_steps, values

from slurmtrain.errors import CheckpointError
from slurmtrain.model.experiment.checkpoint import KeepSpec
from slurmtrain.model.interruption.interval import Publication
from slurmtrain.runtime.checkpoint import checkpoint_files
from slurmtrain.runtime.job.process_group import RankGroup


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
        assert re.match(r"it needs 0\.1\d MB, but only 0\.0\d MB are free in ", problem)
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


def writer_of(attempt: Attempt) -> int:
    process = attempt.saver._writer._process
    assert process is not None
    return process.pid


def stop_the_writer(attempt: Attempt) -> None:
    """Let a writer that has done all that was ordered do nothing more, until it is killed."""
    while attempt.saver._writer.busy:
        attempt.saver.progress()
    os.kill(writer_of(attempt), signal.SIGSTOP)
    os.waitid(os.P_PID, writer_of(attempt), os.WSTOPPED | os.WNOWAIT)


def test_a_writer_that_is_killed_while_it_has_nothing_to_do_costs_nothing(tmp_path: Path) -> None:
    module = model()
    with Attempt(tmp_path, alone(), {"model": module}) as attempt:
        assert save_steps(attempt, module, 1) == [""]
        first = writer_of(attempt)
        os.kill(first, signal.SIGKILL)
        os.waitid(os.P_PID, first, os.WEXITED | os.WNOWAIT)
        assert save_steps(attempt, module, 2) == [""]
        assert writer_of(attempt) != first
        assert attempt.events("save_failed") == []
    assert listed(tmp_path) == ["step-1", "step-2"]


@pytest.mark.parametrize("effect", drawn(["open", "half a write", "fsync", "os.rename", "write through a file"], 3))
def test_a_writer_that_is_killed_at_work_fails_one_save_and_the_next_one_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, effect: str
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    for name, value in writers_that_fail(tmp_path / "fault", run, effect=effect).items():
        monkeypatch.setenv(name, value)
    module = model()
    with Attempt(run, alone(), {"model": module}) as attempt:
        assert save_steps(attempt, module, 1) == [
            "rank 0: the process that writes checkpoints has ended (killed by signal 9)"
        ]
        [failed] = attempt.events("save_failed")
        assert (failed["step"], failed["why"]) == (1, "steps")
        assert "killed by signal 9" in failed["reason"]
        assert listed(run) == []
        assert save_steps(attempt, module, 2) == [""]
    assert listed(run) == ["step-2"]
    assert restored_step(run) == 2


def test_a_writer_that_is_killed_while_a_save_is_under_way_does_not_hang_training(tmp_path: Path) -> None:
    module = model()
    with Attempt(tmp_path, alone(), {"model": module}) as attempt:
        assert save_steps(attempt, module, 1) == [""]
        stop_the_writer(attempt)
        assert attempt.begin(2) is None
        assert attempt.saver.progress() == (True, Publication.NONE)
        os.kill(writer_of(attempt), signal.SIGKILL)
        outcome = attempt.saver.finish()
        assert outcome is not None
        assert "killed by signal 9" in outcome.problem
        assert save_steps(attempt, module, 3) == [""]
    assert listed(tmp_path) == ["step-1", "step-3"]


def lose_a_writer(ranks: RankGroup, root: Path, victim: int, when: str) -> tuple[list[str], set[float]]:
    """Saves on two ranks; one's writer is killed: while it provides memory, or while it should write."""
    module = model()
    with Attempt(root, ranks, {"model": module, "own": Value(ranks.rank)}, keep=KeepSpec(last=9)) as attempt:
        if when == "preparing":
            attempt.saver.prepare()
            if ranks.rank == victim:
                os.kill(writer_of(attempt), signal.SIGKILL)
            problems = save_steps(attempt, module, 1)
        else:
            save_steps(attempt, module, 1)
            if ranks.rank == victim:
                stop_the_writer(attempt)
            fill(module, 2)
            assert attempt.begin(2) is None
            if ranks.rank == victim:
                os.kill(writer_of(attempt), signal.SIGKILL)
            outcome = attempt.saver.finish()
            assert outcome is not None
            problems = [outcome.problem]
        problems += save_steps(attempt, module, 3, 4)
    again = model(-1)
    with Attempt(root, ranks, {"model": again, "own": Value(None)}, restart=1) as attempt:
        restored = attempt.restore()
        assert restored is not None
        assert (restored.step, restored.lost_steps) == (4, 0)
    return problems, values(again)


@pytest.mark.parametrize(
    ("victim", "when"),
    [
        (0, "writing"),
        (1, "preparing"),
        *(pytest.param(*each, marks=rare) for each in ((0, "preparing"), (1, "writing"))),
    ],
)
def test_one_ranks_writer_that_is_killed_fails_at_most_one_save_on_both(
    tmp_path: Path, pair: Pair, victim: int, when: str
) -> None:
    (problems, first), (same, second) = pair.run(lose_a_writer, tmp_path, victim, when)
    assert problems == same
    assert problems[1:] == ["", ""]
    assert problems[0] in ("", f"rank {victim}: the process that writes checkpoints has ended (killed by signal 9)")
    assert first == second == {4.0}
    expected = ["step-3", "step-4"]
    if not (when == "preparing" and problems[0]):
        expected.insert(0, "step-1")
    assert listed(tmp_path) == expected
    for path in checkpoint_files.published(tmp_path / "checkpoints"):
        manifest = checkpoint_files.read_manifest(path)
        checkpoint_files.verify_files(path, manifest, manifest.files)


def test_a_writer_works_in_a_process_with_many_open_files(tmp_path: Path) -> None:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 2000:
        pytest.skip("so many files may not be opened here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (2000, hard))
    opened = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        module = model()
        with Attempt(tmp_path, alone(), {"model": module}) as attempt:
            assert save_steps(attempt, module, 1) == [""]
    finally:
        for handle in opened:
            os.close(handle)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_without_python_for_the_writer_a_save_fails_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.executable", "/nonexistent/python")
    module = model()
    with Attempt(tmp_path, alone(), {"model": module}) as attempt:
        [problem] = save_steps(attempt, module, 1)
        assert "no such file" in problem
        monkeypatch.undo()
        assert save_steps(attempt, module, 2) == [""]


def raise_on_one(ranks: RankGroup, root: Path, raising: int) -> tuple[list[str], list[dict[str, Any]]]:
    module, own = model(), Value(0)
    with Attempt(root, ranks, {"model": module, "own": own}) as attempt:
        problems = save_steps(attempt, module, 1)
        if ranks.rank == raising:
            own.value = RuntimeError("the tokenizer is busy")
        problems += save_steps(attempt, module, 2)
        own.value = 0
        problems += save_steps(attempt, module, 3)
        return problems, attempt.events("save_failed") if ranks.rank == 0 else []


@pytest.mark.parametrize("raising", [0, 1])
def test_a_state_dict_that_raises_on_one_rank_fails_the_save_on_both(tmp_path: Path, pair: Pair, raising: int) -> None:
    (problems, [failed]), (same, _) = pair.run(raise_on_one, tmp_path, raising)
    assert problems == same
    assert problems == ["", f"rank {raising}: RuntimeError: the tokenizer is busy", ""]
    assert (failed["step"], failed["reason"]) == (2, problems[1])
    assert listed(tmp_path) == ["step-1", "step-3"]


def test_a_state_dict_that_raises_in_preparation_fails_nothing_yet(tmp_path: Path) -> None:
    own = Value(RuntimeError("not ready"))
    with Attempt(tmp_path, alone(), {"own": own}) as attempt:
        attempt.saver.prepare()
        assert attempt.events("save_failed") == []
        own.value = 1
        assert attempt.save(1) == ""


def unsafe_on_one(ranks: RankGroup, root: Path) -> str:
    own = Value(1 if ranks.rank == 0 else object())
    with Attempt(root, ranks, {"own": own}) as attempt, pytest.raises(CheckpointError) as error:
        attempt.save(1)
    return str(error.value)


def test_a_state_that_is_unsafe_on_one_rank_ends_the_first_save_on_both(tmp_path: Path, pair: Pair) -> None:
    first, second = pair.run(unsafe_on_one, tmp_path)
    assert first == second
    assert first.startswith("rank 1: ")


def test_metrics_that_are_no_numbers_do_not_fail_a_save(tmp_path: Path) -> None:
    figures = {"loss": float("inf"), "nan": float("nan"), "less": -float("inf"), "accuracy": 0.5}
    with Attempt(tmp_path, alone(), {"model": model()}) as attempt:
        assert attempt.save(1, **figures) == ""
    assert checkpoint_files.read_manifest(tmp_path / "checkpoints" / "step-1").metrics == {"accuracy": 0.5}


def test_a_clock_that_goes_backwards_changes_nothing_but_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = model()
    now = time.time()
    with Attempt(tmp_path, alone(), {"model": module}, keep=KeepSpec(last=2)) as attempt:
        assert save_steps(attempt, module, 1, 2) == ["", ""]
    # The clock that counts is the writer's.
    (tmp_path / "back").mkdir()
    (tmp_path / "back" / "sitecustomize.py").write_text(
        "import time\nreal = time.time\ntime.time = lambda: real() - 86400\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'back'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    with Attempt(tmp_path, alone(), {"model": module}, keep=KeepSpec(last=2), restart=1) as attempt:
        assert save_steps(attempt, module, 3) == [""]
    assert checkpoint_files.read_manifest(tmp_path / "checkpoints" / "step-3").saved_at < now - 80_000
    assert listed(tmp_path) == ["step-2", "step-3"]
    assert restored_step(tmp_path) == 3
