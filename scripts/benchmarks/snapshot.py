"""A snapshot of a repository of 10,000 files: taken, taken again, and copied for a run; compared with git and cp."""

from __future__ import annotations

import argparse
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from _measure import Report, in_turns

from slurmtrain.model.run.layout import RunsRoot
from slurmtrain.model.spec.code.section import CodeSpec
from slurmtrain.runtime.code.tree import make_tree
from slurmtrain.snapshots.selection import CodeSource
from slurmtrain.snapshots.store import take

FILES = 10_000
EACH_DIRECTORY = 50
CONTENT = "loss = model(batch)\n" * 100
# Hashes of files that have just been written are not kept.
SETTLING_S = 3.0
NO_PYTHON = Path("/nowhere/bin/python")


def run(arguments: argparse.Namespace) -> Report:
    with tempfile.TemporaryDirectory(prefix="slurmtrain-bench-") as folder:
        repository, copy = Path(folder) / "home" / "repository", Path(folder) / "copy"
        make_repository(repository)
        runs = RunsRoot(Path(folder) / "runs")
        runs.path.mkdir()
        source = CodeSource(workdir=repository, spec=CodeSpec())
        time.sleep(SETTLING_S)

        def unchanged() -> None:
            take(runs, source, NO_PYTHON)

        def first() -> None:
            shutil.rmtree(runs.snapshots, ignore_errors=True)
            unchanged()

        def copied() -> None:
            snapshot, _ = take(runs, source, NO_PYTHON)
            began = time.perf_counter()
            make_tree(runs.run("copy"), snapshot)
            copies.append(time.perf_counter() - began)
            shutil.rmtree(runs.run("copy").path)

        copies: list[float] = []
        first()
        measures: dict[str, Callable[[], object]] = {
            "first": first,
            "unchanged": unchanged,
            "git_status": lambda: subprocess.run(["git", "-C", repository, "status", "--porcelain"], check=True),
            "cp": lambda: subprocess.run(["cp", "-r", repository, copy], check=True),
        }

        def seconds(measure: Callable[[], object]) -> float:
            shutil.rmtree(copy, ignore_errors=True)
            began = time.perf_counter()
            measure()
            return time.perf_counter() - began

        def copy_seconds() -> float:
            runs.run("copy").path.mkdir()
            copied()
            return copies[-1]

        times = in_turns(
            {
                **{name: lambda measure=measure: seconds(measure) for name, measure in measures.items()},
                "run_copy": copy_seconds,
            },
            3 if arguments.quick else 15,
        )
    report = Report()
    for name, values in times.items():
        report.figure(f"{name}_ms", [value * 1000 for value in values], "ms")
    report.ratio("first/cp", times["first"], times["cp"])
    report.ratio("unchanged/git_status", times["unchanged"], times["git_status"])
    report.ratio("run_copy/cp", times["run_copy"], times["cp"])
    return report


def make_repository(root: Path) -> None:
    """Commit files in directories of a repository."""
    for number in range(FILES):
        directory = root / f"package{number // EACH_DIRECTORY}"
        directory.mkdir(parents=True, exist_ok=True)
        (directory / f"module{number}.py").write_text(f"{CONTENT}# {number}\n")
    identity = ("-c", "user.name=bench", "-c", "user.email=bench@localhost")
    for words in (("init", "--quiet"), ("add", "."), (*identity, "commit", "--quiet", "--message", "all")):
        subprocess.run(["git", "-C", root, *words], check=True)
