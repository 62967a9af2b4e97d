"""Seeing what a script saves, and that a save is under way."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from slurmtrain.plugins.drill.faults import OwnCheckpoints, SaveWatch
from slurmtrain.runtime.checkpoint.external import Search


def archive(path: Path) -> Path:
    """A file such as torch.save writes."""
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("archive/data.pkl", b"x" * 100)
    return path


def tear(path: Path) -> Path:
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    return path


def test_checkpoints_that_were_deleted_since_are_remembered(tmp_path: Path) -> None:
    own = OwnCheckpoints(Search(pattern=f"{tmp_path}/ckpt-*.pt"))
    for step in (5, 10):
        path = archive(tmp_path / f"ckpt-{step}.pt")
        os.utime(path, (step, step))
        own.look()
        path.unlink()
    own.look()
    assert [(save.name, save.step) for save in own.saves] == [("ckpt-5.pt", 5), ("ckpt-10.pt", 10)]


def test_a_file_that_was_written_again_counts_again(tmp_path: Path) -> None:
    own = OwnCheckpoints(Search(pattern=f"{tmp_path}/last.pt"))
    for second in (1, 2):
        os.utime(archive(tmp_path / "last.pt"), (second, second))
        own.look()
        own.look()
    assert [save.saved_at for save in own.saves] == [1.0, 2.0]


def test_without_a_pattern_there_is_nothing_to_see(tmp_path: Path) -> None:
    own = OwnCheckpoints(None)
    own.look()
    assert (own.saves, own.incomplete()) == ([], [])


@pytest.fixture
def watch(tmp_path: Path) -> SaveWatch:
    archive(tmp_path / "ckpt-5.pt")
    return SaveWatch(Search(pattern=f"{tmp_path}/ckpt-*.pt"), tmp_path)


def test_what_was_there_before_is_no_save_under_way(tmp_path: Path) -> None:
    tear(archive(tmp_path / "ckpt-5.pt"))
    assert SaveWatch(Search(pattern=f"{tmp_path}/ckpt-*.pt"), tmp_path).half_written() == []
    [problem] = OwnCheckpoints(Search(pattern=f"{tmp_path}/ckpt-*.pt")).incomplete()
    assert problem.startswith("ckpt-5.pt is not complete: ")


def test_a_file_without_its_end_is_half_written_until_it_has_one(tmp_path: Path, watch: SaveWatch) -> None:
    path = tear(archive(tmp_path / "ckpt-10.pt"))
    assert watch.half_written() == [str(path)]
    assert watch.still_half_written([str(path)]) == [str(path)]
    archive(path)
    assert watch.half_written() == []
    assert watch.still_half_written([str(path)]) == []


def test_a_name_that_is_temporary_is_half_written_until_it_is_renamed(tmp_path: Path, watch: SaveWatch) -> None:
    path = archive(tmp_path / "ckpt-10.pt.tmp")
    assert watch.half_written() == [str(path)]
    assert watch.still_half_written([str(path)]) == [str(path)]
    path.rename(tmp_path / "ckpt-10.pt")
    assert watch.half_written() == []
    assert watch.still_half_written([str(path)]) == []


def test_a_file_that_no_checkpoint_has_is_no_save(tmp_path: Path) -> None:
    watch = SaveWatch(Search(pattern=f"{tmp_path}/ckpt-*.pt"), tmp_path)
    with (tmp_path / "metrics.csv").open("w") as file:
        file.write("1")
        file.flush()
        assert watch.half_written([os.getpid()]) == []


def test_a_checkpoint_of_a_session_is_half_written_until_it_is_published(tmp_path: Path) -> None:
    watch = SaveWatch(None, tmp_path)
    staged = tmp_path / ".7.0-step-20"
    staged.mkdir()
    (staged / "__0_0.distcp").write_bytes(b"x")
    assert watch.half_written() == [str(staged)]
    staged.rename(tmp_path / "step-20")
    assert watch.half_written() == []


def test_a_file_of_any_format_is_half_written_while_a_rank_writes_to_it(tmp_path: Path) -> None:
    watch = SaveWatch(Search(pattern=f"{tmp_path}/*.txt"), tmp_path)
    writer = "import sys; file = open(sys.argv[1], 'w'); print(file.write('5'), flush=True); file.flush(); input()"
    path = tmp_path / "ckpt-5.txt"
    with subprocess.Popen(
        [sys.executable, "-c", writer, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:  # fmt: skip
        process.stdout.readline()
        assert watch.half_written([process.pid]) == [str(path)]
        process.kill()
    # Nothing in the file says that there was more to come.
    assert watch.still_half_written([str(path)]) == [str(path)]
