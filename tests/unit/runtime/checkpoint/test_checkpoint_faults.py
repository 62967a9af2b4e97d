"""What goes wrong with checkpoints: disks, processes, files, scripts, attempts. Training goes on, nothing is mixed.

Where a save fails, that is said, and the next one works; where a checkpoint is damaged, the one before is taken.
"""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import pickle
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from helpers.killpoints import heal, writers_that_fail
from helpers.ranks import Attempt, Pair, alone, listed
from helpers.site import until
from torch import nn
from torch.distributed.checkpoint import metadata
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex

from slurmtrain.errors import CheckpointError
from slurmtrain.model.spec.spec import KeepSpec
from slurmtrain.runtime.checkpoint import files
from slurmtrain.runtime.checkpoint.shard_plan import _info
from slurmtrain.runtime.job.process_group import RankGroup
from slurmtrain.system.files import write_json

NAMES = (".metadata", "__0_0.distcp", "__1_0.distcp")
MANIFEST = "MANIFEST.json"


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    pair = Pair()
    yield pair
    pair.close()


class Value:
    """An object with a state of any kind."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> Any:
        if isinstance(self.value, Exception):
            raise self.value
        return {"value": self.value}

    def load_state_dict(self, state: Any) -> None:
        self.value = state["value"]


def model(step: float = 0, width: int = 40) -> nn.Module:
    module = nn.Sequential(nn.Linear(width, width), nn.Linear(width, 2))
    fill(module, step)
    return module


def fill(module: nn.Module, step: float) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(step)


def value_of(module: nn.Module) -> set[float]:
    """Of all parameters: more than one value is a mixture."""
    return {float(value) for parameter in module.parameters() for value in parameter.detach().reshape(-1)}


def save_steps(attempt: Attempt, module: nn.Module, *steps: int) -> list[str]:
    problems = []
    for step in steps:
        fill(module, step)
        problems.append(attempt.save(step))
    return problems


def restored_step(root: Path, restart: int = 9, **more: Any) -> int:
    """The step that a new attempt goes on from, with everything as it was then; 0 for none."""
    module = model(-1)
    with Attempt(root, alone(), {"model": module}, restart=restart, **more) as attempt:
        restored = attempt.restore()
    if restored is None:
        return 0
    assert value_of(module) == {float(restored.step)}
    return restored.step


# --- disks ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one megabyte."""
    place = tmp_path / "disk"
    place.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(place)], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"file systems cannot be mounted here: {done.stderr.strip()}")
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
    assert value_of(module) == {4.0}


def test_on_a_full_disk_the_policy_lets_go_of_others_first(small_disk: Path) -> None:
    module = model(width=200)
    with Attempt(small_disk, alone(), {"model": module}, keep=KeepSpec(last=9)) as attempt:
        assert save_steps(attempt, module, 1, 2, 3, 4) == [""] * 4
    with Attempt(small_disk, alone(), {"model": module}, keep=KeepSpec(last=2), restart=1) as attempt:
        with (small_disk / "ballast").open("wb") as file:
            free = os.statvfs(small_disk).f_bavail * os.statvfs(small_disk).f_frsize
            file.write(bytes(free - 100_000))
        assert save_steps(attempt, module, 5) == [""]
    assert [event["step"] for event in attempt.events("pruned")] == [1, 2, 3]
    assert listed(small_disk) == ["step-4", "step-5"]


def test_in_a_read_only_directory_saves_fail_loudly_until_it_is_writable(tmp_path: Path) -> None:
    checkpoints = tmp_path / "checkpoints"
    checkpoints.mkdir()
    module = model()
    with Attempt(tmp_path, alone(), {"model": module}) as attempt:
        assert save_steps(attempt, module, 1) == [""]
        mount = ["mount", "--bind", str(checkpoints), str(checkpoints)]
        done = subprocess.run(mount, capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"file systems cannot be mounted here: {done.stderr.strip()}")
        try:
            subprocess.run(["mount", "-o", "remount,ro,bind", str(checkpoints)], check=True)
            [problem] = save_steps(attempt, module, 2)
            assert "read-only file system" in problem
            assert [event["reason"] for event in attempt.events("save_failed")] == [problem]
            # Reading goes on working.
            assert restored_step(tmp_path) == 1
            attempt.take_lease()
        finally:
            subprocess.run(["umount", "--lazy", str(checkpoints)], check=True)
        assert save_steps(attempt, module, 3) == [""]
    assert listed(tmp_path) == ["step-1", "step-3"]


IO_ERROR = ("EIO", "input/output error")
FULL = ("ENOSPC", "no space left on the device")


@pytest.mark.parametrize(
    ("what", "how", "said"),
    [
        *((what, *IO_ERROR) for what in ("open", "write", "half a write", "fsync", "os.mkdir", "os.rename")),
        *((what, *FULL) for what in ("half a write", "fsync")),
        ("write", "EDQUOT", "disk quota exceeded"),
    ],
)
def test_a_disk_that_fails_fails_one_save_and_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, how: str, said: str
) -> None:
    fault = tmp_path / "fault"
    for name, value in writers_that_fail(fault, tmp_path / "run", what=what, how=how).items():
        monkeypatch.setenv(name, value)
    (tmp_path / "run").mkdir()
    module = model()
    with Attempt(tmp_path / "run", alone(), {"model": module}) as attempt:
        problems = save_steps(attempt, module, 1, 2)
        assert all(said in problem for problem in problems), problems
        assert all(problem.startswith("rank 0: ") for problem in problems)
        assert listed(tmp_path / "run") == []
        heal(fault)
        assert save_steps(attempt, module, 3) == [""]
        assert [event["step"] for event in attempt.events("save_failed")] == [1, 2]
    assert listed(tmp_path / "run") == ["step-3"]
    assert restored_step(tmp_path / "run") == 3


@pytest.mark.parametrize("number", [1, 2, 3, 4, 5])
def test_an_fsync_that_fails_never_publishes_what_is_not_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """The fsyncs of a save: the rank's file, the index, the directory, the manifest, the directory again."""
    fault = tmp_path / "fault"
    run = tmp_path / "run"
    run.mkdir()
    for name, value in writers_that_fail(fault, run, what="fsync", number=number, how="EIO").items():
        monkeypatch.setenv(name, value)
    module = model()
    with Attempt(run, alone(), {"model": module}) as attempt:
        [problem] = save_steps(attempt, module, 1)
        assert "input/output error" in problem
        assert listed(run) == []
        heal(fault)
        assert save_steps(attempt, module, 2) == [""]
    assert listed(run) == ["step-2"]


# --- processes --------------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("what", ["open", "half a write", "fsync", "os.rename", "write through a file"])
def test_a_writer_that_is_killed_at_work_fails_one_save_and_the_next_one_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    for name, value in writers_that_fail(tmp_path / "fault", run, what=what).items():
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
        assert attempt.saver.progress() == (1, 0)
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
    return problems, value_of(again)


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("when", ["preparing", "writing"])
def test_one_ranks_writer_that_is_killed_fails_at_most_one_save_on_both(
    tmp_path: Path, pair: Pair, victim: int, when: str
) -> None:
    (problems, one), (same, other) = pair.run(lose_a_writer, tmp_path, victim, when)
    assert problems == same
    assert problems[1:] == ["", ""]
    assert problems[0] in ("", f"rank {victim}: the process that writes checkpoints has ended (killed by signal 9)")
    assert one == other == {4.0}
    expected = ["step-3", "step-4"]
    if not (when == "preparing" and problems[0]):
        expected.insert(0, "step-1")
    assert listed(tmp_path) == expected
    for path in files.published(tmp_path / "checkpoints"):
        manifest = files.read_manifest(path)
        files.verify(path, manifest, manifest.files)


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


# --- damaged files ----------------------------------------------------------------------------------------------------


def save_two(ranks: RankGroup, root: Path) -> None:
    module = model()
    with Attempt(root, ranks, {"model": module, "own": Value(ranks.rank)}) as attempt:
        assert save_steps(attempt, module, 1, 2) == ["", ""]


@pytest.fixture(scope="module")
def saved_by_two(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with checkpoints of two ranks at steps 1 and 2."""
    root = tmp_path_factory.mktemp("run")
    pair.run(save_two, root)
    return root


@pytest.fixture
def run(saved_by_two: Path, tmp_path: Path) -> Path:
    """A copy of it that may be damaged."""
    copied = tmp_path / "run"
    shutil.copytree(saved_by_two, copied)
    return copied


Damage = Callable[[Path], None]


def _flip(where: float) -> Damage:
    def flip(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[round(where * (len(data) - 1))] ^= 1 << 5
        path.write_bytes(data)

    return flip


def _resize(by: int) -> Damage:
    return lambda path: os.truncate(path, path.stat().st_size + by)


FLIPS: dict[str, Damage] = {f"a bit flipped at {where}": _flip(where) for where in (0.0, 0.01, 0.3, 0.5, 0.9, 1.0)}
SIZES: dict[str, Damage] = {
    "the last byte missing": _resize(-1),
    "most of it missing": lambda path: os.truncate(path, 10),
    "a byte more": _resize(1),
    "a page more": _resize(4096),
    "emptied": lambda path: os.truncate(path, 0),
    "removed": Path.unlink,
}


def look(root: Path, **more: Any) -> tuple[int, list[dict[str, Any]], list[dict[str, Any]]]:
    """Go on alone: the step, and what was journaled as rejected and as restored."""
    module, own = model(-1), Value("mine")
    with Attempt(root, alone(), {"model": module, "own": own}, restart=1, **more) as attempt:
        restored = attempt.restore()
        assert restored is not None
        assert value_of(module) == {float(restored.step)}
        return restored.step, attempt.events("rejected"), attempt.events("restored")


@pytest.mark.parametrize("damage", [*FLIPS, *SIZES])
@pytest.mark.parametrize("name", NAMES)
def test_a_damaged_file_is_found_and_the_checkpoint_before_is_taken(run: Path, name: str, damage: str) -> None:
    (FLIPS | SIZES)[damage](run / "checkpoints" / "step-2" / name)
    step, [rejected], [restored] = look(run)
    assert step == 1
    assert (restored["step"], restored["lost_steps"]) == (1, 1)
    assert (rejected["step"], rejected["path"]) == (2, "checkpoints/step-2")
    assert rejected["aside"] == "checkpoints/damaged-step-2"
    assert name in rejected["reason"]
    assert listed(run) == ["damaged-step-2", "step-1"]


@pytest.mark.parametrize("damage", SIZES)
@pytest.mark.parametrize("name", NAMES)
def test_sizes_alone_find_everything_but_a_flipped_bit(run: Path, name: str, damage: str) -> None:
    SIZES[damage](run / "checkpoints" / "step-2" / name)
    step, [rejected], _ = look(run, hashes=False)
    assert step == 1
    assert rejected["aside"] == "checkpoints/damaged-step-2"


def restore_on_both(ranks: RankGroup, root: Path) -> tuple[int, int]:
    module, own = model(-1), Value("mine")
    with Attempt(root, ranks, {"model": module, "own": own}, restart=1) as attempt:
        restored = attempt.restore()
        assert restored is not None
        assert value_of(module) == {float(restored.step)}
        assert own.value == ranks.rank
        return restored.step, restored.lost_steps


@pytest.mark.parametrize("name", NAMES)
def test_what_one_rank_finds_damaged_all_ranks_pass_over(run: Path, pair: Pair, name: str) -> None:
    _flip(0.5)(run / "checkpoints" / "step-2" / name)
    assert pair.run(restore_on_both, run) == [(1, 1)] * 2
    assert listed(run) == ["damaged-step-2", "step-1"]


@pytest.mark.parametrize("damage", [*FLIPS, *SIZES])
def test_a_damaged_manifest_is_found_and_the_checkpoint_before_is_taken(run: Path, damage: str) -> None:
    (FLIPS | SIZES)[damage](run / "checkpoints" / "step-2" / MANIFEST)
    module = model(-1)
    with Attempt(run, alone(), {"model": module, "own": Value(None)}, restart=1) as attempt:
        restored = attempt.restore()
        assert restored is not None
        # A byte of white space may be another one, and the manifest still say what it said.
        assert (restored.step, value_of(module)) in ((1, {1.0}), (2, {2.0}))
        if damage not in ("a bit flipped at 1.0", "the last byte missing"):
            assert restored.step == 1
            assert len(attempt.events("rejected")) == (damage != "removed")


@pytest.mark.parametrize("field", ["step", "world_size", "params", "metrics", "objects"])
def test_a_manifest_of_which_a_bit_was_flipped_within_a_value_is_found(run: Path, field: str) -> None:
    """It is JSON still, and says something else."""
    path = run / "checkpoints" / "step-2" / MANIFEST
    data = json.loads(path.read_text())
    changed = {"step": 3, "world_size": 3, "params": {"lr": 1}, "metrics": {"loss": 1.0}, "objects": {}}
    text = json.dumps({**data, field: changed[field]}, indent=1)
    assert text != path.read_text()
    path.write_text(text)
    step, [rejected], _ = look(run)
    assert step == 1
    assert MANIFEST in rejected["reason"]


def test_a_missing_shard_is_named(run: Path) -> None:
    (run / "checkpoints" / "step-2" / "__1_0.distcp").unlink()
    step, [rejected], _ = look(run)
    assert step == 1
    assert rejected["reason"].endswith("__1_0.distcp is missing")


def test_where_every_checkpoint_is_damaged_nobody_starts_again_silently(run: Path) -> None:
    for step in (1, 2):
        _flip(0.5)(run / "checkpoints" / f"step-{step}" / "__0_0.distcp")
    for restart in (1, 2):
        with Attempt(run, alone(), {"model": model(), "own": Value(None)}, restart=restart) as attempt:
            with pytest.raises(CheckpointError, match="no checkpoint can be restored") as error:
                attempt.restore()
            assert "--from-start" in str(error.value)
        assert attempt.events("rejected") == []
    assert listed(run) == ["step-1", "step-2"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"schema": "x"}, "it is no manifest of ours"),
        ({"schema": 3}, "a newer slurmtrain has written it"),
        ({"schema": 1}, "it is no manifest of ours"),
        ({"schema": None}, "it is no manifest of ours"),
        ({"files": 3}, "is not what was written"),
        ({"world_size": "many"}, "is not what was written"),
    ],
)
def test_a_manifest_of_another_kind_is_passed_over_and_put_aside(run: Path, change: dict[str, Any], said: str) -> None:
    path = run / "checkpoints" / "step-2" / MANIFEST
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    step, [rejected], [restored] = look(run)
    assert step == 1
    assert said in rejected["reason"]
    assert restored["lost_steps"] == 1
    assert (rejected["aside"], listed(run)) == ("checkpoints/damaged-step-2", ["damaged-step-2", "step-1"])


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "\0" * 64, '{"schema": 2', "[" * 100_000])
def test_a_manifest_that_is_no_json_is_passed_over(run: Path, text: str) -> None:
    (run / "checkpoints" / "step-2" / MANIFEST).write_text(text)
    step, [rejected], _ = look(run)
    assert step == 1
    assert MANIFEST in rejected["reason"]


@pytest.mark.parametrize("keep", [1, 2])
def test_what_is_saved_after_a_checkpoint_was_passed_over_is_not_pruned_for_it(run: Path, keep: int) -> None:
    path = run / "checkpoints" / "step-2" / MANIFEST
    (run / "checkpoints" / "step-2").rename(run / "checkpoints" / "step-1000")
    path = run / "checkpoints" / "step-1000" / MANIFEST
    path.write_text(json.dumps({**json.loads(path.read_text()), "schema": 3}))
    module = model(-1)
    with Attempt(run, alone(), {"model": module, "own": Value(None)}, restart=1, keep=KeepSpec(last=keep)) as attempt:
        restored = attempt.restore()
        assert restored is not None
        assert restored.step == 1
        assert save_steps(attempt, module, 5, 6, 7) == [""] * 3
    assert look_again(run) == 7


def look_again(run: Path) -> int:
    module = model(-1)
    with Attempt(run, alone(), {"model": module, "own": Value(None)}, restart=2) as attempt:
        restored = attempt.restore()
        assert restored is not None
        return restored.step


def test_a_file_that_cannot_be_read_is_passed_over_and_put_aside(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = files._hash

    def failing(path: Path) -> str:
        if path.parent.name == "step-2":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(path)

    monkeypatch.setattr(files, "_hash", failing)
    step, [rejected], _ = look(run)
    assert step == 1
    assert "Input/output error" in rejected["reason"]
    assert listed(run) == ["damaged-step-2", "step-1"]


# --- other models -----------------------------------------------------------------------------------------------------


def restoring(root: Path, **objects: Any) -> str:
    """What a script with these objects is told."""
    with Attempt(root, alone(), objects, restart=1) as attempt:
        with pytest.raises(CheckpointError) as error:
            attempt.restore()
        assert attempt.events("rejected") == []
    assert "step-2" in listed(root)
    return str(error.value)


def test_parameters_that_another_model_has_are_listed(run: Path) -> None:
    other = nn.Sequential(nn.Linear(40, 40), nn.LayerNorm(40), nn.Linear(40, 2, bias=False))
    said = restoring(run, model=other, own=Value(None))
    assert "does not fit what the script registered" in said
    assert "it has no 'model.2.weight'" in said
    assert "'model.1.weight' has shape 2x40, in the script 40" in said
    assert "'model.1.bias' has shape 2, in the script 40" in said


def test_of_many_differences_ten_are_listed_and_the_others_counted(run: Path) -> None:
    said = restoring(run, model=nn.Sequential(*(nn.Linear(2, 2) for _ in range(20))), own=Value(None))
    assert said.count("'model.") == 10
    # 36 parameters are new, and of the four that both have three are of other shapes.
    assert said.endswith("; and 29 more")


def test_an_object_that_the_checkpoint_has_not_is_named(run: Path) -> None:
    assert "it holds no 'average'" in restoring(run, model=model(), own=Value(None), average=Value(None))


def test_an_object_that_refuses_its_state_ends_restoring_with_its_reason(run: Path) -> None:
    class Refusing(Value):
        def load_state_dict(self, state: Any) -> None:
            raise RuntimeError("no such vocabulary")

        def reshard_state_dict(self, *_: Any) -> None:
            raise RuntimeError("no such vocabulary")

    assert "RuntimeError: no such vocabulary" in restoring(run, model=model(), own=Refusing(None))


# --- two attempts at once ---------------------------------------------------------------------------------------------


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
    assert files.read_manifest(tmp_path / "checkpoints" / "step-2").attempt == "1.1"


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


def test_all_ranks_of_a_lost_attempt_are_told(tmp_path: Path, pair: Pair) -> None:
    one, other = pair.run(fence, tmp_path)
    assert one == other
    assert "another attempt has taken over" in one
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
        staged = files.Staging(zombie.run.checkpoints, zombie.attempt.path.name, 5).path
        until((staged / "__0_0.distcp").exists, "the lost attempt's writing")
        files.sweep(living.run.checkpoints, living.attempt.path.name)
        with pytest.raises(CheckpointError):
            zombie.saver.finish()
        outcome = living.saver.finish()
        assert outcome is not None
        assert outcome.problem == ""
    files.sweep(living.run.checkpoints, "1.2")
    assert listed(tmp_path) == ["step-5"]


# --- scripts ----------------------------------------------------------------------------------------------------------


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


class Evil:
    """Runs a command when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.marker}",)


def test_a_state_that_cannot_be_loaded_safely_ends_the_first_save(tmp_path: Path) -> None:
    with (
        Attempt(tmp_path, alone(), {"own": Value(Evil(tmp_path / "marker"))}) as attempt,
        pytest.raises(CheckpointError, match="cannot be loaded with weights_only=True"),
    ):
        attempt.save(1)
    assert not (tmp_path / "marker").exists()
    assert listed(tmp_path) == []


def unsafe_on_one(ranks: RankGroup, root: Path) -> str:
    own = Value(1 if ranks.rank == 0 else object())
    with Attempt(root, ranks, {"own": own}) as attempt, pytest.raises(CheckpointError) as error:
        attempt.save(1)
    return str(error.value)


def test_a_state_that_is_unsafe_on_one_rank_ends_the_first_save_on_both(tmp_path: Path, pair: Pair) -> None:
    one, other = pair.run(unsafe_on_one, tmp_path)
    assert one == other
    assert one.startswith("rank 1: ")


@pytest.mark.parametrize("value", [float("inf"), float("nan"), -float("inf")])
def test_metrics_that_are_no_numbers_do_not_fail_a_save(tmp_path: Path, value: float) -> None:
    module = model()
    with Attempt(tmp_path, alone(), {"model": module}) as attempt:
        assert attempt.save(1, loss=value, accuracy=0.5) == ""
    assert files.read_manifest(tmp_path / "checkpoints" / "step-1").metrics == {"accuracy": 0.5}


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
    assert files.read_manifest(tmp_path / "checkpoints" / "step-3").saved_at < now - 80_000
    assert listed(tmp_path) == ["step-2", "step-3"]
    assert restored_step(tmp_path) == 3


# --- quota ------------------------------------------------------------------------------------------------------------


def test_a_quota_lets_go_of_what_the_policy_does_not_keep_before_a_save(tmp_path: Path) -> None:
    module = model(width=200)
    with Attempt(tmp_path, alone(), {"model": module}, keep=KeepSpec(last=9)) as attempt:
        assert save_steps(attempt, module, 1, 2, 3) == [""] * 3
    with Attempt(tmp_path, alone(), {"model": module}, keep=KeepSpec(last=1), quota=600_000, restart=1) as attempt:
        assert save_steps(attempt, module, 4) == [""]
    assert [event["step"] for event in attempt.events("pruned")] == [1, 2, 3]
    assert attempt.events("over_quota") == []


def test_a_quota_that_is_too_small_is_warned_of_once_and_nothing_is_lost(tmp_path: Path) -> None:
    module = model(width=200)
    with Attempt(tmp_path, alone(), {"model": module}, keep=KeepSpec(last=2), quota=300_000) as attempt:
        assert save_steps(attempt, module, 1, 2, 3) == [""] * 3
        [warned] = attempt.events("over_quota")
        assert warned["quota"] == 300_000
        assert warned["taken"] + warned["bytes"] > 300_000
    assert listed(tmp_path) == ["step-2", "step-3"]


# --- malice -----------------------------------------------------------------------------------------------------------


def forge(directory: Path, name: str, content: bytes) -> None:
    """Put content into a checkpoint's file, and make its manifest say so."""
    manifest = files.read_manifest(directory)
    (directory / name).write_bytes(content)
    told = {**manifest.files, name: (len(content), xxhash.xxh3_128(content).hexdigest())}
    write_json(directory / MANIFEST, replace(manifest, files=told).to_json())


def index_of(directory: Path) -> Metadata:
    loaded: Metadata = pickle.loads((directory / ".metadata").read_bytes())
    return loaded


@pytest.fixture
def target(run: Path) -> Path:
    """A checkpoint, with no other to go on from instead."""
    files.delete(run / "checkpoints" / "step-1")
    return run / "checkpoints" / "step-2"


def refused(run: Path, marker: Path, **objects: Any) -> str:
    """Restoring fails, and what lay in wait did not run; what is said."""
    objects = objects or {"model": model(), "own": Value(None)}
    with Attempt(run, alone(), objects, restart=1) as attempt, pytest.raises(CheckpointError) as error:
        attempt.restore()
    assert not marker.exists()
    return str(error.value)


def test_an_index_that_would_run_something_is_refused_and_does_not(run: Path, target: Path, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    forge(target, ".metadata", pickle.dumps(Evil(marker)))
    assert "no index of a checkpoint" in refused(run, marker)
    pickle.loads(pickle.dumps(Evil(marker)))
    assert marker.exists(), "the test is of no use"


def test_an_index_that_would_run_something_is_passed_over_for_the_checkpoint_before(run: Path, tmp_path: Path) -> None:
    forge(run / "checkpoints" / "step-2", ".metadata", pickle.dumps(Evil(tmp_path / "marker")))
    step, [rejected], _ = look(run)
    assert step == 1
    assert "no index of a checkpoint" in rejected["reason"]
    assert not (tmp_path / "marker").exists()


@pytest.mark.parametrize("field", ["planner_data", "storage_data", "state_dict_metadata", "storage_meta", "version"])
def test_something_that_would_run_within_an_index_does_not(run: Path, target: Path, tmp_path: Path, field: str) -> None:
    marker = tmp_path / "marker"
    index = index_of(target)
    setattr(index, field, Evil(marker))
    forge(target, ".metadata", pickle.dumps(index))
    assert "has no place in it" in refused(run, marker)


@pytest.mark.parametrize(
    "content",
    [
        b"cbuiltins\neval\n(V1\ntR.",
        b"ctorch\nload\n(V/etc/passwd\ntR.",
        b"ctorch.serialization\nload\n.",
        b"ctorch\nSize\n(cbuiltins\nprint\ntR.",
        b"cbuiltins\ngetattr\n(ctorch\nSize\nVmro\ntR.",
        b"cbuiltins\ngetattr\n(ctorch.distributed.checkpoint.metadata\n_MEM_FORMAT_ENCODING\nVmro\ntR.",
        b"ctorch\n_C\n.",
        b"",
        b".",
        b"\x80\x04N.",
        b"\x80\x05" + b"(" * 10_000,
        b"\x80\x04\x95" + b"\xff" * 8 + b".",
    ],
)
def test_a_pickle_of_another_kind_is_no_index(run: Path, target: Path, tmp_path: Path, content: bytes) -> None:
    forge(target, ".metadata", content)
    assert "no index of a checkpoint" in refused(run, tmp_path / "marker")


def test_an_enumeration_is_read_as_other_versions_of_python_pickle_it(run: Path, target: Path) -> None:
    class Pickler(pickle.Pickler):
        def reducer_override(self, obj: Any) -> Any:
            if isinstance(obj, metadata._MEM_FORMAT_ENCODING):
                return getattr, (metadata._MEM_FORMAT_ENCODING, obj.name)
            return NotImplemented

    content = io.BytesIO()
    Pickler(content).dump(index_of(target))
    assert b"getattr" in content.getvalue()
    forge(target, ".metadata", content.getvalue())
    assert look(run)[0] == 2


def test_an_index_that_leads_out_of_the_checkpoint_is_refused(run: Path, target: Path, tmp_path: Path) -> None:
    index = index_of(target)
    for key, info in index.storage_data.items():
        index.storage_data[key] = type(info)("../../../" + info.relative_path, info.offset, info.length)
    forge(target, ".metadata", pickle.dumps(index))
    assert "it leads to" in refused(run, tmp_path / "marker")


def put(directory: Path, name: str, content: bytes) -> None:
    """Have the index say that something lies behind everything else in rank 0's file."""
    index, file = index_of(directory), directory / "__0_0.distcp"
    before = file.read_bytes()
    index.storage_data[MetadataIndex(name)] = _info(0, len(before), len(content))
    index.state_dict_metadata[name] = BytesStorageMetadata()
    forge(directory, "__0_0.distcp", before + content)
    forge(directory, ".metadata", pickle.dumps(index))


def saved(value: Any, tmp_path: Path) -> bytes:
    torch.save(value, tmp_path / "value")
    return (tmp_path / "value").read_bytes()


@pytest.mark.parametrize("name", ["shared", "ranks.0", "ranks.1"])
@pytest.mark.parametrize("form", ["torch", "pickle"])
def test_a_value_that_would_run_something_is_refused_and_does_not(
    run: Path, target: Path, tmp_path: Path, name: str, form: str
) -> None:
    marker = tmp_path / "marker"
    put(target, name, saved(Evil(marker), tmp_path) if form == "torch" else pickle.dumps(Evil(marker)))
    assert "weights_only" in refused(run, marker) or "Unpickling" in refused(run, marker)


@pytest.mark.parametrize("name", ["model.0.weight", "optimizer.state.model.0.weight.exp_avg"])
def test_a_tensor_that_is_told_to_be_a_value_does_not_run(saved_by_two: Path, tmp_path: Path, name: str) -> None:
    """torch.distributed.checkpoint itself would unpickle it with nothing forbidden."""
    marker, run = tmp_path / "marker", tmp_path / "run"
    module = model(1)
    optimizer = torch.optim.AdamW(module.parameters())
    module(torch.ones(1, 40)).sum().backward()
    optimizer.step()
    with Attempt(run, alone(), {"model": module, "optimizer": optimizer}) as attempt:
        assert attempt.save(1) == ""
    put(run / "checkpoints" / "step-1", name, saved(Evil(marker), tmp_path))
    other = model(2)
    objects = {"model": other, "optimizer": torch.optim.AdamW(other.parameters())}
    # A state of an optimizer may be missing, a parameter may not.
    refuses = contextlib.nullcontext() if name.startswith("optimizer") else pytest.raises(CheckpointError)
    with Attempt(run, alone(), objects, restart=1) as attempt, refuses:
        attempt.restore()
    assert not marker.exists()


def test_a_tensor_whose_bytes_would_run_something_does_not(run: Path, target: Path, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    index, file = index_of(target), target / "__0_0.distcp"
    before, evil = file.read_bytes(), saved(Evil(marker), tmp_path)
    for key in index.storage_data:
        if key.fqn.startswith("model."):
            index.storage_data[key] = _info(0, len(before), len(evil))
    forge(target, "__0_0.distcp", before + evil)
    forge(target, ".metadata", pickle.dumps(index))
    assert "it cannot be read" in refused(run, marker)
    assert not marker.exists()
