"""A snapshot of a repository of 10,000 files: taken, taken again, copied for a run; and submit with and without one."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from _measure import ROOT, Report, command, in_turns, seconds_of

from slurmtrain.model.run.layout import RunsRoot
from slurmtrain.model.spec.code.section import CodeSpec
from slurmtrain.runtime.code.tree import make_tree
from slurmtrain.snapshots.selection import CodeSource
from slurmtrain.snapshots.store import take

sys.path.insert(0, str(ROOT / "tests"))
from helpers.fakeslurm import PARTITIONS, SlurmCommands

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

        submitting = Submitting(Path(folder), repository)
        times = in_turns(
            {
                **{name: lambda measure=measure: seconds(measure) for name, measure in measures.items()},
                "run_copy": copy_seconds,
                **{f"submit_{name}": lambda name=name: submitting.seconds(name) for name in SUBMISSIONS},
            },
            3 if arguments.quick else 15,
        )
    report = Report()
    for name, values in times.items():
        report.figure(f"{name}_ms", [value * 1000 for value in values], "ms")
    report.ratio("first/cp", times["first"], times["cp"])
    report.ratio("unchanged/git_status", times["unchanged"], times["git_status"])
    report.ratio("run_copy/cp", times["run_copy"], times["cp"])
    report.ratio("submit_first/submit_without", times["submit_first"], times["submit_without"])
    report.ratio("submit_unchanged/submit_without", times["submit_unchanged"], times["submit_without"])
    return report


# By the line of the spec: a first submission stores the snapshot, which the one after it finds.
SUBMISSIONS = {"without": "code: none", "first": "", "unchanged": ""}


class Submitting:
    """Whole processes of submit in a repository; programs that answer at once take the place of Slurm's."""

    def __init__(self, folder: Path, repository: Path) -> None:
        slurm = SlurmCommands(folder / "bin")
        for name in ("squeue", "sacct", "scancel", "srun"):
            slurm.replies(name)
        slurm.replies("scontrol", PARTITIONS)
        slurm.replies("sinfo", "".join(f"n{i}|spot|idle|8|16000|(null)|(null)\n" for i in range(4)))
        slurm.replies("sbatch", "Submitted batch job 8\n")
        self.runs = RunsRoot(folder / "submitted")
        path = f"{slurm.path}{os.pathsep}{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        self.environ = {"SLURMTRAIN_RUNS": str(self.runs.path), "PATH": path}
        self.specs = {name: folder / f"{name}.yaml" for name in SUBMISSIONS}
        for name, line in SUBMISSIONS.items():
            self.specs[name].write_text(f"name: {name}\ncommand: python -c pass\nworkdir: {repository}\n{line}\n")

    def seconds(self, name: str) -> float:
        if name == "first":
            shutil.rmtree(self.runs.snapshots, ignore_errors=True)
        return seconds_of(command("submit", str(self.specs[name]), "--executor", "slurm"), **self.environ)


def make_repository(root: Path) -> None:
    """Commit files in directories of a repository."""
    for number in range(FILES):
        directory = root / f"package{number // EACH_DIRECTORY}"
        directory.mkdir(parents=True, exist_ok=True)
        (directory / f"module{number}.py").write_text(f"{CONTENT}# {number}\n")
    # Without the garbage collection that git would start beside the measurement.
    identity = ("-c", "user.name=bench", "-c", "user.email=bench@localhost", "-c", "gc.auto=0")
    for words in (("init", "--quiet"), ("add", "."), (*identity, "commit", "--quiet", "--message", "all")):
        subprocess.run(["git", "-C", root, *words], check=True)
