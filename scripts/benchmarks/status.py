"""Whole-process time of ``slurmtrain status`` and its calls of Slurm's commands, by the number of runs.

All runs have ended and are known to the registry; or a tenth of them are jobs that wait in the queue of a real Slurm
cluster, which takes root, to start one with scripts/cluster, or SLURM_CONF.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from _cluster import Cluster, NoCluster, Recorder, cluster
from _measure import Report, command, in_turns, run_quietly, say, seconds_of, wait_until
from _runs import make_runs

from slurmtrain.model.run.layout import RunsRoot
from slurmtrain.registry.store import Store

# A tenth of the largest must fit into an array: Slurm's MaxArraySize is 1001 unless a site changes it.
SIZES = (10, 1000, 10_000)
SETTLING_S = 300.0


@dataclass
class Root:
    """A runs root, and the calls of Slurm's commands while its runs were listed."""

    runs: Path
    ended: int
    jobs: Sequence[str]
    recorder: Recorder
    conf: str = ""
    first_s: float = 0.0
    calls: list[list[str]] = field(default_factory=list)

    @property
    def environment(self) -> dict[str, str]:
        conf = {"SLURM_CONF": self.conf} if self.conf else {}
        return {"SLURMTRAIN_RUNS": str(self.runs), **conf, **self.recorder.environment}

    def make(self) -> None:
        """Create the runs; list them for the first time, which ingests them; repeat until the registry is done."""
        make_runs(self.runs, ended=self.ended, jobs=self.jobs)
        self.first_s = self.seconds()
        wait_until(self._settled, "the registry did not settle the runs that have ended", SETTLING_S)
        self.calls.clear()

    def seconds(self) -> float:
        self.recorder.take()
        took = seconds_of(command("status"), **self.environment)
        self.calls.append([name for name, _ in self.recorder.take()])
        return took

    def _settled(self) -> bool:
        run_quietly(command("status"), **self.environment)
        with Store(RunsRoot(self.runs).registry) as store:
            listed = store.listed()
        states = sorted(one.state for one in listed.values())
        if states != ["completed"] * self.ended + ["pending"] * len(self.jobs):
            sys.exit(f"bench: the runs that were made are not seen as they were meant: {states[:3]} ... {states[-3:]}")
        return sum(one.settled for one in listed.values()) == self.ended


def run(arguments: argparse.Namespace) -> Report:
    rounds = 3 if arguments.quick else 15
    report = Report()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="slurmtrain-bench-")))
        recorder = Recorder(folder)
        roots = {f"ended_{size}": Root(folder / f"ended-{size}", size, (), recorder) for size in SIZES}
        try:
            slurm = stack.enter_context(cluster("status", 1))
        except NoCluster as error:
            report.lack(f"runs that are open Slurm jobs were not measured: {error}")
        else:
            for size in SIZES:
                jobs = held_jobs(slurm, size // 10)
                name = f"open_{len(jobs)}_of_{size}"
                roots[name] = Root(folder / f"open-{size}", size - len(jobs), jobs, recorder, slurm.conf)
        for name, root in roots.items():
            root.make()
            say(f"{name}: made, and listed for the first time in {root.first_s:.2f} s")
        measured = {"import_sqlalchemy": partial(seconds_of, [sys.executable, "-c", "import sqlalchemy"])}
        times = in_turns({**measured, **{name: root.seconds for name, root in roots.items()}}, rounds)
    for name, values in times.items():
        report.figure(f"{name}_ms", [value * 1000 for value in values], "ms")
    for name, root in roots.items():
        report.figure(f"{name}_scheduler_calls", [len(calls) for calls in root.calls])
        expected = ["squeue"] if root.jobs else []
        if wrong := [calls for calls in root.calls if calls != expected]:
            report.failures.append(f"{name}: status called {wrong[0]}, where it should call {expected}")
        report.figure(f"{name}_first_status_s", [root.first_s], "s")
        report.ratio(f"{name}/import_sqlalchemy", times[name], times["import_sqlalchemy"])
    report.notes.append("aims: no call of Slurm's commands where all runs have ended, one of squeue elsewhere")
    return report


def held_jobs(slurm: Cluster, count: int) -> list[str]:
    """Ids of this many pending jobs, elements of a held array; they end with the benchmark."""
    options = ["--parsable", "--hold", f"--job-name={slurm.job_name}", "--chdir=/", "--output=/dev/null"]
    array = slurm.ask("sbatch", *options, f"--array=0-{count - 1}", "--wrap=true").strip().partition(";")[0]
    return [f"{array}_{task}" for task in range(count)]
