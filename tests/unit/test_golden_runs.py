"""What commands say of the real runs in tests/golden/runs.tar.xz, which ``scripts/golden-runs`` has recorded.

The answers are kept in tests/golden/answers/; UPDATE_GOLDEN=1 writes them anew. Every run has ended, so that nothing in
them depends on when and where they are read, except for the path of the runs root and the time of the answer.
"""

from __future__ import annotations

import contextlib
import difflib
import io
import json
import os
import shutil
import sqlite3
import tarfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from slurmtrain.cli import main

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
ANSWERS = GOLDEN / "answers"
# What is asked about each run, and about several.
OF_EACH = {
    "show": ("show", "--json"),
    "checkpoints": ("checkpoints", "--all", "--json"),
    "verify": ("verify", "--json"),
    "metrics": ("plot", "--metric", "loss", "--all", "--json"),
    "logs": ("logs",),
}
OF_SEVERAL = {
    "status.json": ("status", "--all", "--no-fold", "--json"),
    "status.csv": ("status", "--all", "--no-fold", "--csv"),
    "compare.json": ("compare", "array*", "pack*", "--by", "loss", "--json"),
    "compare.csv": ("compare", "array*", "pack*", "--by", "loss", "--over", "seed", "--csv"),
    "compare-performance.json": ("compare", "completed", "preempted", "--performance", "--json"),
    "best.json": ("best", "search*", "--by", "loss", "--json"),
    "diff.json": ("diff", "completed", "forked", "--json"),
    "doctor.json": ("doctor", "crashed", "--json"),
    "tree.txt": ("status", "--all", "--tree", "--columns", "name,state"),
    "nodes.json": ("nodes", "--all", "--json"),
}


HOUR_AGO = time.time() - 3600


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The runs root, extracted, as somebody without settings sees it."""
    folder = tmp_path_factory.mktemp("golden")
    with tarfile.open(GOLDEN / "runs.tar.xz") as archive:
        # Filter "data" would make the private folders of runs readable. Python before 3.11.4 has no filters.
        archive.extraction_filter = getattr(tarfile, "tar_filter", None)
        for member in archive:
            member.linkname = member.linkname.replace("RUNS", str(folder / "runs"))
            archive.extract(member, folder)
    # What was just changed may change again, and a run that may is looked at again.
    for path in (folder / "runs").rglob("*/"):
        os.utime(path, (HOUR_AGO, HOUR_AGO))
    with pytest.MonkeyPatch.context() as patched:
        for name in [name for name in os.environ if name.startswith("SLURMTRAIN_")]:
            patched.delenv(name)
        patched.setenv("XDG_CONFIG_HOME", str(folder / "no-config"))
        yield folder / "runs"


@pytest.fixture(scope="module")
def tables(runs: Path) -> list[str]:
    """All rows of the registry, rebuilt from the run directories."""
    return rebuild(runs)


@pytest.fixture(scope="module")
def answers(runs: Path, tables: list[str]) -> dict[str, str]:
    """The answers by the names of their files, which UPDATE_GOLDEN=1 writes."""
    by_file = {name: call(runs, *question)[1] for name, question in OF_SEVERAL.items()}
    listed = json.loads(by_file["status.json"])["runs"]
    [search] = {run["sweep"] for run in listed if run["name"] == "search"}
    by_file |= {f"search-{command}.json": call(runs, command, search, "--json")[1] for command in ("status", "best")}
    counts: Counter[str] = Counter()
    for run in sorted(listed, key=lambda run: str(run["id"])):
        counts[run["name"]] += 1
        name = f"run-{run['name']}-{counts[run['name']]}.json"
        by_file[name] = written({kind: ask(runs, run["id"], *question) for kind, question in OF_EACH.items()})
    if os.environ.get("UPDATE_GOLDEN") == "1":
        shutil.rmtree(ANSWERS, ignore_errors=True)
        ANSWERS.mkdir()
        for name, text in by_file.items():
            (ANSWERS / name).write_text(text, newline="")
    return by_file


def ask(runs: Path, run_id: str, command: str, *options: str) -> Any:
    """What a command says of a run: JSON, or lines; with its exit code if that is not 0."""
    code, answer = call(runs, command, run_id, *options)
    shown = json.loads(answer) if "--json" in options and answer else answer.splitlines()
    return {"exit": code, "said": shown} if code else shown


def call(runs: Path, *arguments: str) -> tuple[int, str]:
    """The exit code of a command and what it prints, without what differs each time."""
    printed = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", newline="")
    with contextlib.redirect_stdout(printed), pytest.raises(SystemExit) as end:
        main(["--runs", str(runs), *arguments])
    printed.flush()
    text = printed.buffer.getvalue().decode().replace(str(runs), "RUNS")
    if "--json" in arguments and text:
        answer = json.loads(text)
        answer.pop("as_of", None)
        text = written(answer)
    return int(end.value.code or 0), text


def written(answer: Any) -> str:
    return json.dumps(answer, indent=1, ensure_ascii=False) + "\n"


def rebuild(runs: Path) -> list[str]:
    call(runs, "registry", "rebuild")
    with contextlib.closing(sqlite3.connect(runs / "registry.db")) as registry:
        return list(registry.iterdump())


def test_a_registry_that_is_rebuilt_again_has_the_same_rows(runs: Path, tables: list[str]) -> None:
    assert rebuild(runs) == tables


def test_every_answer_is_recorded(answers: dict[str, str]) -> None:
    assert answers.keys() == {path.name for path in ANSWERS.iterdir()}


@pytest.mark.parametrize("name", sorted(path.name for path in ANSWERS.iterdir()))
def test_an_answer_is_the_recorded_one(answers: dict[str, str], name: str) -> None:
    golden, now = (ANSWERS / name).read_bytes().decode(), answers.get(name, "")
    difference = "\n".join(difflib.unified_diff(golden.splitlines(), now.splitlines(), name, "now", lineterm="", n=5))
    if now != golden:
        pytest.fail(f"UPDATE_GOLDEN=1 writes the answers anew if this is meant:\n{difference}", pytrace=False)
