"""Submitting a sweep of a thousand runs to a real Slurm cluster, compared with other ways to get a thousand jobs.

All of them are held, so that none ever starts. It needs root to start its own cluster with scripts/cluster, or
SLURM_CONF to use an existing one.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from _cluster import Cluster, Recorder, required_cluster
from _measure import Report, command, in_turns, say, seconds_of, write_spec

# So many single calls of sbatch stand for all of them, which would take minutes a round.
_SINGLE = 50
_MAP_ARRAY = """
import sys, submitit
executor = submitit.SlurmExecutor(folder=sys.argv[1])
executor.update_parameters(job_name=sys.argv[2], time=5, additional_parameters={"hold": True})
executor.map_array(abs, range(int(sys.argv[3])))
"""


@dataclass
class Bench:
    """A cluster, a folder, and how many elements are submitted.

    ``place``: where the next submission goes. What was submitted before stays until the end: file systems such as ext4
    take longer to make files for some seconds after many were deleted.
    """

    cluster: Cluster
    folder: Path
    recorder: Recorder
    count: int
    place: int = 0

    def submit(self, *, free: bool = True) -> float:
        """Submit a sweep with slurmtrain."""
        spec = write_spec(
            self.folder / "sweep.yaml",
            name=self.cluster.job_name,
            command="true",
            resources={"nodes": 1, "time": "00:05:00"},
            slurm={"hold": True},
            params={"i": 0},
            sweep={"params.i": list(range(self.count))},
        )
        return self._seconds(command("submit", str(spec), "--executor", "slurm", "--yes"), free=free)

    def array(self) -> float:
        """Submit a bare job array."""
        return self._sbatch(f"--array=0-{self.count - 1}")

    def map_array(self) -> float:
        """Submit the same number of calls with submitit."""
        logs = self.folder / f"submitit-{self.place}"
        return self._seconds([sys.executable, "-c", _MAP_ARRAY, str(logs), self.cluster.job_name, str(self.count)])

    def single(self) -> float:
        """Submit a job for each, one after the other."""
        calls = min(self.count, _SINGLE)
        took = sum(self._sbatch(free=False) for _ in range(calls))
        self._free()
        return took / calls * self.count

    def recorded(self) -> tuple[Counter[str], float, Counter[str]]:
        """Slurm's commands that a submission calls; how long ``status`` of it takes, and what that calls."""
        self.recorder.take()
        self.submit(free=False)
        calls = Counter(name for name, _ in self.recorder.take())
        took = self._seconds(command("status"))
        return calls, took, Counter(name for name, _ in self.recorder.take())

    def _sbatch(self, *options: str, free: bool = True) -> float:
        shared = ["--hold", f"--job-name={self.cluster.job_name}", "--output=/dev/null", "--time=5", "--wrap=true"]
        return self._seconds(["sbatch", *shared, *options], free=free)

    def _seconds(self, argv: list[str], *, free: bool = True) -> float:
        variables = {"SLURM_CONF": self.cluster.conf, "SLURMTRAIN_RUNS": str(self.folder / f"runs-{self.place}")}
        took = seconds_of(argv, **variables, **self.recorder.environment)
        if free:
            self._free()
        return took

    def _free(self) -> None:
        """Empty the queue, and go on in an empty runs root."""
        self.cluster.cancel()
        self.cluster.wait_until_free()
        self.place += 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this benchmark's options."""
    parser.add_argument("--count", type=int, metavar="N", help="how many elements (default: 1000; 50 with --quick)")
    parser.add_argument("--rounds", type=int, metavar="R", help="submissions of each kind (default: 5; 1 with --quick)")


def run(arguments: argparse.Namespace) -> Report:
    """Submit in each way once a round, alternately."""
    rounds = arguments.rounds or (1 if arguments.quick else 5)
    count = arguments.count or (50 if arguments.quick else 1000)
    report = Report(notes=["aim: submit less a second/array at most 2"])
    with required_cluster("sweep", 2) as slurm, tempfile.TemporaryDirectory(prefix="slurmtrain-bench-") as folder:
        bench = Bench(slurm, Path(folder), Recorder(Path(folder)), count)
        ways = {"submit": bench.submit, "array": bench.array, "map_array": bench.map_array, "single": bench.single}
        seconds = in_turns(ways, rounds)
        calls, took, queries = bench.recorded()
    for name, values in seconds.items():
        say(f"{name}: {values}")
        report.figure(f"{count} elements: {name}_s", values, "s")
        if name != "submit":
            report.ratio(f"{count} elements: submit/{name}", seconds["submit"], values)
    beyond = [max(0.0, value - 1.0) for value in seconds["submit"]]
    report.ratio(f"{count} elements: submit less a second/array", beyond, seconds["array"])
    report.figure("sbatch calls of submit", [calls["sbatch"]])
    report.figure(f"{count} elements: status_s", [took], "s")
    report.figure("squeue calls of status", [queries["squeue"]])
    if calls["sbatch"] != 1 or queries["squeue"] != 1:
        report.failures.append(f"one sbatch and one squeue were expected: {dict(calls)}, {dict(queries)}")
    return report
