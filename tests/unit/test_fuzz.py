"""scripts/fuzz: some cases, and what it takes for a bad one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path, PurePath

import pytest
from helpers.command_judge import Entry, judge, snapshot
from helpers.forked_commands import Ended
from helpers.sample_home import SampleHome, id_of

FUZZ = Path(__file__).resolve().parents[2] / "scripts" / "fuzz"
CASES, SEED = os.environ.get("TEST_FUZZ_CASES", "5"), os.environ.get("TEST_FUZZ_SEED", "14")


def test_no_command_stumbles_over_damaged_files() -> None:
    command = [sys.executable, str(FUZZ), "--cases", CASES, "--seed", SEED]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout == f"{CASES} cases of seed {SEED}, none bad\n"


RUN = f"project/runs/{id_of('completed')}"


@pytest.fixture
def home(tmp_path: Path) -> SampleHome:
    """A home with a file of each kind that a command must keep."""
    for name, content in (
        (f"{RUN}/journal/submit.jsonl", "{}\n"),
        (f"{RUN}/plan.json", "{}"),
        (f"{RUN}/checkpoints/step-40/weights", "40"),
        ("project/notes.txt", "mine"),
    ):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.write_text(content)
        path.chmod(0o600)
    return SampleHome(tmp_path)


def judged(home: SampleHome, *arguments: str, ended: Ended | None = None, **changes: Entry | None) -> list[str]:
    """The verdict on a command after which these paths were different. ``changes``: what is there then, by path."""
    before = snapshot(home.path)
    after = {**before, **{path: entry for path, entry in changes.items() if entry}}
    for path in [path for path, entry in changes.items() if entry is None]:
        del after[path]
    wrong = judge(arguments or ("status",), ended or ends(), home=home, before=before, after=after)
    return [each.partition(":")[0] for each in wrong]


def ends(code: int = 0, errors: bytes = b"", output: bytes = b"", *, hung: bool = False) -> Ended:
    return Ended(code, output, errors, 1.0, hung)


def file(content: bytes, mode: int = 0o600) -> Entry:
    return Entry(0o100000, mode, content)


def test_a_command_that_changes_nothing_and_ends_as_documented_is_good(home: SampleHome) -> None:
    assert judged(home) == []
    assert judged(home, ended=ends(code=130, output="ü\tx\n".encode())) == []
    lost = (
        b"Exception ignored in: <function f>\nTraceback (most recent call last):\n  File x\n    \nKeyboardInterrupt: \n"
    )
    assert judged(home, ended=ends(errors=lost)) == []


@pytest.mark.parametrize(
    ("ended", "category"),
    [
        (ends(code=1, errors=b"Traceback (most recent call last):\n  x\nKeyError: 'a'\n"), "traceback"),
        (ends(code=-11), "exit code"),
        (ends(code=120), "exit code"),
        (ends(code=-9, hung=True), "hang"),
        (ends(output=b"name \x1b[31mred"), "escape"),
        (ends(errors="a\x9b2J".encode()), "escape"),
    ],
)
def test_how_a_command_ends_can_be_bad(home: SampleHome, ended: Ended, category: str) -> None:
    assert judged(home, ended=ended) == [category]


def test_journals_may_grow_and_checkpoints_move_or_be_pruned_and_nothing_else(home: SampleHome) -> None:
    journal, plan, weights = f"{RUN}/journal/submit.jsonl", f"{RUN}/plan.json", f"{RUN}/checkpoints/step-40/weights"
    assert judged(home, **{journal: file(b"{}\n{}\n")}) == []
    assert judged(home, **{journal: file(b"{}")}) == ["lost"]
    assert judged(home, **{plan: file(b"{ }")}) == ["lost"]
    assert judged(home, **{"project/notes.txt": None}) == ["lost"]
    assert judged(home, **{weights: None}) == ["lost"]
    assert judged(home, **{weights: None, f"{RUN}/checkpoints.before-attempt-2/step-40/weights": file(b"40")}) == []
    # Even prune keeps the newest.
    assert judged(home, "prune", **{weights: None}) == ["lost"]


def test_the_directory_of_wandb_may_be_replaced_by_a_newer_one_of_the_same_run(home: SampleHome) -> None:
    old, newer = (f"project/runs/wandb/offline-run-2026112{day}_010203-{PurePath(RUN).name}" for day in (1, 2))
    (home.path / old).mkdir(parents=True, mode=0o700)
    (home.path / old / "run.wandb").write_bytes(b"old")
    gone: dict[str, Entry | None] = {old: None, f"{old}/run.wandb": None}
    assert judged(home, **gone) == ["lost", "lost"]
    assert judged(home, **gone, **{newer: Entry(0o040000, 0o700), f"{newer}/run.wandb": file(b"new")}) == []
    other = newer.replace(PurePath(RUN).name, "0000000000")
    assert judged(home, **gone, **{other: Entry(0o040000, 0o700)}) == ["lost", "lost"]


def test_new_files_must_be_private_and_needed(home: SampleHome) -> None:
    assert judged(home, **{f"{RUN}/journal/sync.jsonl": file(b"", mode=0o644)}) == ["mode"]
    assert judged(home, **{f"{RUN}/.plan.json.1.tmp": file(b"")}) == ["litter"]


def test_help_of_benchmarks_is_printed_without_installing_anything(tmp_path: Path) -> None:
    environ = {"PATH": os.defpath, "SLURMTRAIN_VENV": str(tmp_path / "venv"), "PYTHONDONTWRITEBYTECODE": "1"}
    # -S: as the Python of a fresh machine, which has no packages.
    command = [sys.executable, "-S", "-I", str(FUZZ.with_name("bench")), "--help"]
    ended = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith("usage: scripts/bench")
    assert not (tmp_path / "venv").exists()
