"""From sbatch to the first training step on a real Slurm cluster, compared with a batch script that calls torchrun.

It needs root to start its own cluster with scripts/cluster, or SLURM_CONF to use an existing one.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path

from _cluster import Cluster, Recorder, cluster, required_cluster
from _measure import BENCHMARKS, Report, in_turns, run_quietly, say, submit, write_spec

from slurmtrain.model.run.layout import RunDir

NODES = (2, 4)
MINUTES = 10
PATIENCE_S = 240.0
POLL_S = 0.05
# The milestones of a launch, in this order; the torchrun side has no node agent.
_MARKS = ("submit", "sbatch", "srun", "agent", "rendezvous", "workers", "script", "imported", "joined", "first_step")
_TORCHRUN = """\
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
address=$(getent ahostsv4 "$first" | awk 'NR == 1 {{ print $1 }}')
port=$((20000 + SLURM_JOB_ID % 10000))
export OMP_NUM_THREADS=1
srun --kill-on-bad-exit=1 --cpus-per-task={procs} \\
  {python} -m torch.distributed.run --nnodes={nodes} --nproc-per-node={procs} {more} \\
  --rdzv-id="$SLURM_JOB_ID" --rdzv-backend=c10d --rdzv-endpoint="$address:$port" {script}
"""

Marks = Mapping[str, float]


@dataclass(frozen=True)
class Bench:
    """A cluster, and a folder that its nodes see; ``code``: whether runs get a copy of this repository."""

    cluster: Cluster
    folder: Path
    recorder: Recorder
    procs: int
    code: str = "snapshot"

    def session(self, nodes: int) -> Marks:
        """A run submitted with slurmtrain, whose script uses the library."""
        spec = write_spec(
            self.folder / "launch.yaml",
            name=self.cluster.job_name,
            command=shlex.join(["python", *self._script()]),
            resources={"nodes": nodes, "procs_per_node": self.procs, "time": f"00:{MINUTES}:00"},
            checkpoint={"every": {"minutes": 60}},
            code=self.code,
        )
        self._calm()
        launched = time.time()
        run = submit(spec, "slurm", **self._environment)
        directory = RunDir(Path(run["dir"]))
        marks = self._until_first_step(directory.path)
        journal = directory.attempt(run["job_id"], 0).node_journal(0)
        # When node 0's agent began, had found the others, and had started the workers.
        events = {event["kind"]: event["t"] for event in map(json.loads, journal.read_text().splitlines())}
        return {"submit": launched, **marks, **{kind: events[kind] for kind in ("agent", "rendezvous", "workers")}}

    def torchrun(self, nodes: int) -> Marks:
        """What a careful person writes by hand."""
        options = {"job-name": self.cluster.job_name, "time": MINUTES, "output": self.folder / "torchrun-%j.log"}
        batch = self.folder / "torchrun.sh"
        batch.write_text(batch_script(self._script(), nodes, self.procs, options))
        self._calm()
        job_id = run_quietly(["sbatch", "--parsable", str(batch)], **self._environment).strip()
        return self._until_first_step(self.folder / f"torchrun-{job_id}.log")

    def _script(self) -> list[str]:
        return [str(BENCHMARKS / "_train.py"), "--out", str(self.folder / "marks.json")]

    @property
    def _environment(self) -> dict[str, str]:
        runs = str(self.folder / "runs")
        return {"SLURM_CONF": self.cluster.conf, "SLURMTRAIN_RUNS": runs, **self.recorder.environment}

    def _calm(self) -> None:
        """Wait until nothing of the previous launch is left."""
        self.cluster.wait_until_free()
        (self.folder / "marks.json").unlink(missing_ok=True)
        self.recorder.take()

    def _until_first_step(self, logs: Path) -> Marks:
        """Wait for rank 0's marks. ``logs``: the file or directory to show if a job ends without any."""
        out = self.folder / "marks.json"
        began = time.monotonic()
        look_at = began + 30
        while not out.exists():
            now = time.monotonic()
            # Only if it takes long: queries cost machine time too.
            ended = now > look_at and not self.cluster.jobs() and not out.exists()
            if ended or now > began + PATIENCE_S:
                sys.exit(f"bench: no first step within {PATIENCE_S:.0f} s, or the job ended before:\n{tails(logs)}")
            look_at = now + 5 if now > look_at else look_at
            time.sleep(POLL_S)
        marks = json.loads(out.read_text())
        calls = dict(reversed(self.recorder.take()))
        took = marks["steps"][0][1] - calls["sbatch"]
        say(f"{logs.name}: {took:.2f} s from sbatch to the first step")
        return {
            "sbatch": calls["sbatch"],
            "srun": calls["srun"],
            "script": marks["started"],
            "imported": marks["imported"],
            "joined": marks["joined"],
            "first_step": marks["steps"][0][1],
        }


def batch_script(script: list[str], nodes: int, procs: int, options: Mapping[str, object], more: str = "") -> str:
    """What a careful person writes to start torchrun with a script; ``options``: sbatch's; ``more``: torchrun's."""
    sizes = {"nodes": nodes, "ntasks-per-node": 1, "cpus-per-task": procs}
    lines = [f"#SBATCH --{name}={value}" for name, value in {**options, **sizes}.items()]
    words = {"python": shlex.quote(sys.executable), "script": shlex.join(script), "more": more}
    return "\n".join(["#!/bin/bash", *lines, _TORCHRUN.format(nodes=nodes, procs=procs, **words)])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--nodes", type=int, nargs="+", default=NODES, metavar="N", help="how many nodes (default: 2 and 4)"
    )
    parser.add_argument("--procs", type=int, default=1, metavar="P", help="processes a node (default: 1)")
    parser.add_argument("--rounds", type=int, metavar="R", help="launches of each kind (default: 11; 2 with --quick)")


def run(arguments: argparse.Namespace) -> Report:
    rounds = arguments.rounds or (2 if arguments.quick else 11)
    report = Report()
    with set_up(required_cluster("launch", max(arguments.nodes)), arguments.procs) as bench:
        for nodes in arguments.nodes:
            measure(bench, nodes, rounds, report)
    report.notes = ["aim: sbatch_to_first_step: session/torchrun at most 0.65"]
    return report


def measure_without_code(nodes: int, rounds: int, report: Report) -> None:
    """The same of one process a node, without a copy of this repository. Raises NoCluster.

    How long that copy takes depends on the file system, and torchrun makes none.
    """
    with set_up(cluster("launch", nodes), 1, code="none") as bench:
        measure(bench, nodes, rounds, report)


@contextmanager
def set_up(entered: AbstractContextManager[Cluster], procs: int, code: str = "snapshot") -> Iterator[Bench]:
    """A cluster that is free before and after."""
    with entered as slurm, tempfile.TemporaryDirectory(prefix="slurmtrain-bench-") as path:
        yield Bench(slurm, Path(path), Recorder(Path(path)), procs, code)
        slurm.wait_until_free()


def measure(bench: Bench, nodes: int, rounds: int, report: Report) -> None:
    """Launch each side once per round, alternately; the first round warms up the machine's caches."""
    sides = {"session": bench.session, "torchrun": bench.torchrun}
    by_side = in_turns({name: partial(side, nodes) for name, side in sides.items()}, rounds)
    size = f"{nodes}x{bench.procs}"
    for name, launches in by_side.items():
        passed = [mark for mark in _MARKS if mark in launches[0]]
        for since in ("sbatch", "submit"):
            if since in passed:
                to_first = took(launches, since, "first_step")
                report.figure(f"{size} {name}: {since}_to_first_step_s", to_first, "s")
                if name != "torchrun":
                    by_hand = took(by_side["torchrun"], "sbatch", "first_step")
                    report.ratio(f"{size} {since}_to_first_step: {name}/torchrun", to_first, by_hand)
        for before, after in pairwise(passed):
            report.figure(f"{size} {name}: {before}..{after}_s", took(launches, before, after), "s")


def took(launches: list[Marks], since: str, until: str) -> list[float]:
    return [marks[until] - marks[since] for marks in launches]


def tails(logs: Path) -> str:
    """The last lines of a log, or of all logs in a directory."""
    files = [logs] if logs.is_file() else sorted([*logs.rglob("*.log"), *logs.rglob("*.out")])
    return "".join(
        f"{file}:\n" + "".join(f"  {line}\n" for line in file.read_text(errors="replace").splitlines()[-20:])
        for file in files
    )
