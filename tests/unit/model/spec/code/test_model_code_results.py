"""Which places a command writes to by relative paths."""

from __future__ import annotations

import pytest

from slurmtrain.model.spec.command_files import DIRECTORY, FILE, UNKNOWN, result_places

ROOT, WORKDIR = "/home/me/repo", "/home/me/repo/sub"


@pytest.mark.parametrize(
    ("words", "places"),
    [
        ("--output-dir out", [("sub/out", DIRECTORY)]),
        ("--output_dir=out/v1.5", [("sub/out/v1.5", DIRECTORY)]),
        ("--savedir a --workdir b", [("sub/a", DIRECTORY), ("sub/b", DIRECTORY)]),
        ("--out out/", [("sub/out", DIRECTORY)]),
        ("--out out/{run_id}/last", [("sub/out", DIRECTORY)]),
        ("--save best.pt", [("sub/best.pt", FILE)]),
        ("--save ckpts", [("sub/ckpts", UNKNOWN)]),
        ("-o ../out/", [("out", DIRECTORY)]),
        ("--output-dir ../../shared", [("../shared", DIRECTORY)]),
        ("--out x.csv --out x.csv", [("sub/x.csv", FILE)]),
    ],
)
def test_places_are_named_by_options(words: str, places: list[tuple[str, str]]) -> None:
    assert result_places(["python", "train.py", *words.split()], None, WORKDIR, ROOT) == places


@pytest.mark.parametrize(
    "words",
    ["--output-dir .", "--output-dir ..", "--output-dir ../../../x", "--output-dir {run_dir}/out", "--out /abs/x",
     "--output-dir ~/x", "--config c.yaml", "--data data"],
)  # fmt: skip
def test_what_is_elsewhere_or_the_working_directory_itself_is_no_place(words: str) -> None:
    assert result_places(["python", "train.py", *words.split()], None, WORKDIR, ROOT) == []


@pytest.mark.parametrize(
    ("pattern", "path"),
    [
        ("out/ckpt-*.pt", "sub/out"),
        ("out/run-?/ckpt-*.pt", "sub/out"),
        ("a/b/{name}/last.pt", "sub/a/b"),
        ("*.pt", None),
        ("{checkpoint_dir}/x-*", None),
        ("/scratch/x-*", None),
    ],
)
def test_a_pattern_of_checkpoints_names_its_directory(pattern: str, path: str | None) -> None:
    assert result_places(["python"], pattern, WORKDIR, ROOT) == ([(path, DIRECTORY)] if path else [])
