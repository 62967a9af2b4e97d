"""A snapshot of a repository of 10,000 files: taken, taken again, copied for a run; and submit with and without one."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from _measure import ROOT, Report, command, in_turns, seconds_of

from slurmtrain.model.run.root import RunsRoot
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
        repository = Path(folder) / "home" / "repository"
        make_repository(repository)
        snapshots, submitting = Snapshots(Path(folder), repository), Submitting(Path(folder), repository)
        time.sleep(SETTLING_S)
        snapshots.first()
        times = in_turns(
            {
                "first": snapshots.first,
                "unchanged": snapshots.unchanged,
                "git_status": lambda: timed("git", "-C", repository, "status", "--porcelain"),
                "cp": snapshots.cp,
                "run_copy": snapshots.run_copy,
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


class Snapshots:
    """Snapshots of a repository, and copies of them, below a folder; each measure is in seconds."""

    def __init__(self, folder: Path, repository: Path) -> None:
        self.repository, self.folder = repository, folder
        self.runs = RunsRoot(folder / "runs")
        self.runs.path.mkdir()
        self.source = CodeSource(workdir=repository, spec=CodeSpec())

    def first(self) -> float:
        shutil.rmtree(self.runs.snapshots, ignore_errors=True)
        return self.unchanged()

    def unchanged(self) -> float:
        began = time.perf_counter()
        take(self.runs, self.source, NO_PYTHON)
        return time.perf_counter() - began

    def cp(self) -> float:
        shutil.rmtree(self.folder / "copy", ignore_errors=True)
        return timed("cp", "-r", self.repository, self.folder / "copy")

    def run_copy(self) -> float:
        snapshot, _ = take(self.runs, self.source, NO_PYTHON)
        run = self.runs.run("copy")
        shutil.rmtree(run.path, ignore_errors=True)
        run.path.mkdir()
        began = time.perf_counter()
        make_tree(run, snapshot)
        return time.perf_counter() - began


def timed(*command_line: str | Path) -> float:
    """How many seconds a command takes, whose output is discarded."""
    began = time.perf_counter()
    subprocess.run(command_line, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - began


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
