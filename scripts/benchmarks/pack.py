"""Small runs that share a job, compared with the same runs in jobs one after the other, on a real Slurm cluster.

Each run computes for some seconds on one core. It needs root to start its own cluster with scripts/cluster, or
SLURM_CONF to use an existing one.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from _cluster import Cluster, NoCluster, cluster
from _measure import Report, command, in_turns, say, seconds_of

# A whole number of steps, each as long as it takes: on fewer cores than runs, packed runs take longer.
_WORK = """
import time
begin = time.process_time()
while time.process_time() - begin < {seconds}:
    sum(range(10000))
"""


@dataclass(frozen=True)
class Bench:
    """A cluster, a folder, and the runs. ``count``: how many; ``seconds``: of a core that each needs."""

    cluster: Cluster
    folder: Path
    count: int
    seconds: float

    def packed(self) -> float:
        """All runs in one job."""
        return self._seconds(f"--pack={self.count}")

    def in_turn(self) -> float:
        """One job after the other."""
        return self._seconds("--parallel=1")

    def _seconds(self, option: str) -> float:
        """From the submission to the end of the last run."""
        (self.folder / "work.py").write_text(_WORK.format(seconds=self.seconds))
        spec = self.folder / "small.yaml"
        spec.write_text(
            json.dumps(
                {
                    "name": self.cluster.job_name,
                    "command": "python work.py",
                    "workdir": str(self.folder),
                    "resources": {"nodes": 1, "time": "00:10:00"},
                    "params": {"i": 0},
                    "sweep": {"params.i": list(range(self.count))},
                    "tracking": {"mlflow": {"enabled": False}},
                }
            )
        )
        variables = {"SLURM_CONF": self.cluster.conf, "SLURMTRAIN_RUNS": str(self.folder / "runs")}
        took = seconds_of(command("submit", str(spec), option, "--executor", "slurm", "--wait"), **variables)
        self.cluster.wait_until_free()
        subprocess.run(["rm", "-rf", str(self.folder / "runs")], check=True)
        return took


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this benchmark's options."""
    parser.add_argument("--count", type=int, metavar="N", help="how many runs (default: 4; 2 with --quick)")
    parser.add_argument("--seconds", type=float, metavar="S", help="of a core that each run needs (default: 5)")
    parser.add_argument("--rounds", type=int, metavar="R", help="sweeps of each kind (default: 3; 1 with --quick)")


def run(arguments: argparse.Namespace) -> Report:
    """Measure, and return the report."""
    rounds = arguments.rounds or (1 if arguments.quick else 3)
    count = arguments.count or (2 if arguments.quick else 4)
    report = Report()
    try:
        with cluster("pack", 1) as slurm, tempfile.TemporaryDirectory(prefix="slurmtrain-bench-") as folder:
            bench = Bench(slurm, Path(folder), count, arguments.seconds or 5.0)
            seconds = in_turns({"packed": bench.packed, "in turn": bench.in_turn}, rounds)
    except NoCluster as error:
        print(f"bench: pack needs a Slurm cluster: {error}", file=sys.stderr)
        sys.exit(2)
    for name, values in seconds.items():
        say(f"{name}: {values}")
        report.figure(f"{count} runs: {name.replace(' ', '_')}_s", values, "s")
    report.ratio(f"{count} runs: in turn/packed", seconds["in turn"], seconds["packed"])
    report.notes = ["the ratio is how many times more runs a node finishes in the same time"]
    return report
