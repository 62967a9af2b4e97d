"""Checkpoints of scripts that bring their own."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from helpers.accounts import BOB, give, needs_accounts
from safetensors.torch import save_file

from slurmtrain.model.run.layout import RunDir
from slurmtrain.runtime.checkpoint.external import ExternalCheckpoint, Search, absolute, find_checkpoints, newest


def put(path: Path, content: bytes = b"x", at: int = 1000) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    os.utime(path, (at, at))
    return path


def newest_path(folder: Path, pattern: str) -> Path | None:
    candidate = newest(Search(pattern=str(folder / pattern)))
    return candidate.path if candidate else None


@pytest.mark.parametrize(
    ("files", "pattern", "newest"),
    [
        ({}, "*.pt", None),
        # The highest number wins over the clock and over the alphabet, the latest where a name has none.
        ({"ckpt-9.pt": 3000, "ckpt-10.pt": 2000, "ckpt-2.pt": 4000}, "ckpt-*.pt", "ckpt-10.pt"),
        ({"ckpt-9.pt": 1000, "last.pt": 2000, "first.pt": 500}, "*.pt", "last.pt"),
        ({"a/b/ckpt-3.pt": 1000}, "**/ckpt-*.pt", "a/b/ckpt-3.pt"),
        # Files that are being written, by their names.
        *(({"ckpt-1.pt": 1000, f"ckpt-2.pt{ending}": 1000}, "ckpt-*", "ckpt-1.pt")
          for ending in (".tmp", ".part", ".partial", ".incomplete", "~")),
    ],
)  # fmt: skip
def test_the_newest_file_that_a_pattern_names_is_found(
    tmp_path: Path, files: dict[str, int], pattern: str, newest: str | None
) -> None:
    for name, at in files.items():
        put(tmp_path / name, at=at)
    # A link that leads nowhere is passed over.
    (tmp_path / "ckpt-99.pt").symlink_to(tmp_path / "gone")
    assert newest_path(tmp_path, pattern) == (tmp_path / newest if newest else None)


@needs_accounts
def test_one_that_somebody_else_has_put_there_is_passed_over(tmp_path: Path) -> None:
    own = put(tmp_path / "ckpt-9.pt")
    own.chmod(0o666)
    give(put(tmp_path / "ckpt-10.pt"), BOB)
    assert newest_path(tmp_path, "ckpt-*.pt") == own
    theirs, _ = find_checkpoints(Search(pattern=str(tmp_path / "ckpt-*.pt")))
    assert f"belongs to the account {BOB}" in str(theirs.problem)


def test_a_checkpoint_is_described_with_its_format_step_size_and_time(tmp_path: Path) -> None:
    put(tmp_path / "run7-epoch=2-step=300.h5", b"12345", at=1234)
    candidate = newest(Search(pattern=str(tmp_path / "*.h5")))
    assert candidate == ExternalCheckpoint(
        path=tmp_path / "run7-epoch=2-step=300.h5", format="other", step=300, bytes=5, saved_at=1234.0
    )


@pytest.mark.parametrize("name", ["ckpt-40.h5", "ckpt-40.pt2", "step-40.mp4"])
def test_a_number_in_the_ending_of_a_name_is_no_step(tmp_path: Path, name: str) -> None:
    put(tmp_path / name)
    candidate = newest(Search(pattern=str(tmp_path / "*")))
    assert candidate is not None
    assert candidate.step == 40


def test_directories_are_found_too_with_all_their_bytes(tmp_path: Path) -> None:
    put(tmp_path / "out" / "step-5" / "a.bin", b"123")
    put(tmp_path / "out" / "step-5" / "sub" / "b.bin", b"45")
    candidate = newest(Search(pattern=str(tmp_path / "out" / "step-*")))
    assert candidate is not None
    assert (candidate.step, candidate.bytes) == (5, 5)


RUN = RunDir(Path("/runs/0001"))


@pytest.mark.parametrize(
    ("pattern", "path"),
    [
        ("out/*.pt", "/job dir/out/*.pt"),
        ("/abs/*.pt", "/abs/*.pt"),
        ("{run_dir}/out/*.pt", "/runs/0001/out/*.pt"),
        ("{checkpoint_dir}/*.pt", "/runs/0001/checkpoints/*.pt"),
        ("~/out/*.pt", "/home/me/out/*.pt"),
    ],
)
def test_a_pattern_counts_from_the_working_directory(monkeypatch: pytest.MonkeyPatch, pattern: str, path: str) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert absolute(pattern, "/job dir", RUN) == path


def test_brackets_and_stars_in_directories_of_the_run_are_no_pattern(tmp_path: Path) -> None:
    workdir, run = tmp_path / "exp[1]", RunDir(tmp_path / "runs[*]" / "0001")
    in_workdir = put(workdir / "out" / "ckpt-1.pt")
    in_run = put(run.checkpoints / "ckpt-2.pt")
    for pattern, path in {"out/*.pt": in_workdir, "{checkpoint_dir}/*.pt": in_run, "{run_dir}/*/*.pt": in_run}.items():
        candidate = newest(Search(pattern=absolute(pattern, str(workdir), run)))
        assert candidate is not None, pattern
        assert candidate.path == path


# --- steps that a checkpoint does not tell under a usual name ---


def test_a_key_of_the_spec_is_looked_up_inside_files_of_each_kind(tmp_path: Path) -> None:
    torch.save({"trainer": {"n.done": 70}, "weights": torch.zeros(2)}, tmp_path / "a.pt")
    save_file({"w": torch.zeros(1)}, tmp_path / "b.safetensors", metadata={"done": "71"})
    put(tmp_path / "dir" / "model.bin")
    put(tmp_path / "dir" / "trainer.json", json.dumps({"at": {"updates": 72.0}}).encode())
    steps = {
        pattern: newest(Search(pattern=str(tmp_path / pattern), step=key)).step  # type: ignore[union-attr]
        for pattern, key in (("a.pt", "trainer.n.done"), ("b.*", "done"), ("dir", "at.updates"), ("d*r", "weights"))
    }
    assert steps == {"a.pt": 70, "b.*": 71, "dir": 72, "d*r": None}


def test_the_step_of_nanogpt_is_read_without_a_key(tmp_path: Path) -> None:
    torch.save(
        {"model": {}, "iter_num": 300, "best_val_loss": 1.5, "config": {"max_iters": 5000}}, tmp_path / "ckpt.pt"
    )
    candidate = newest(Search(pattern=str(tmp_path / "*.pt")))
    assert candidate is not None
    assert (candidate.step, candidate.step_from) == (300, None)


def test_a_step_that_nothing_tells_is_the_one_logged_when_it_was_saved(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    for number, begin in enumerate((0, 5000)):
        lines = [{"t": 1000.0 * number + step / 10, "step": begin + step, "metrics": {}} for step in range(1, 5001)]
        content = "".join(json.dumps(line) + "\n" for line in lines).encode()
        put(run.attempt("7", number).metrics, content).chmod(0o600)
    for name, at in (("first", 0), ("second", 300), ("third", 700), ("fourth", 1200), ("last", 9000)):
        put(tmp_path / f"{name}.bin", at=at)
    checkpoints = find_checkpoints(Search(pattern=str(tmp_path / "*.bin"), run=run))
    assert [(each.path.stem, each.step, each.step_from) for each in checkpoints] == [
        ("last", 10000, "log"), ("fourth", 7000, "log"), ("third", 5000, "log"), ("second", 3000, "log"),
        ("first", None, None),
    ]  # fmt: skip
