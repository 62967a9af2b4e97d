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
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from _cluster import Cluster, NoCluster, Recorder, cluster
from _measure import ROOT, Report, command, run_quietly, say

from slurmtrain.model.run.layout import AttemptDir, RunDir

SCRIPT = ROOT / "scripts" / "benchmarks" / "_launch_train.py"
NODES = (2, 4)
MINUTES = 10
PATIENCE_S = 240.0
POLL_S = 0.05
# The milestones of a launch, in this order; the torchrun side has no node agent.
_MARKS = ("submit", "sbatch", "srun", "agent", "rendezvous", "workers", "script", "imported", "joined", "first_step")
_AGENT = ("agent", "rendezvous", "workers")
_BATCH = """\
#!/bin/bash
#SBATCH --job-name={name}
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task={procs}
#SBATCH --time={minutes}
#SBATCH --output={folder}/torchrun-%j.log
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
address=$(getent ahostsv4 "$first" | awk 'NR == 1 {{ print $1 }}')
port=$((20000 + SLURM_JOB_ID % 10000))
export OMP_NUM_THREADS=1
srun --kill-on-bad-exit=1 --cpus-per-task={procs} \\
  {python} -m torch.distributed.run --nnodes={nodes} --nproc-per-node={procs} \\
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
        return self._submitted(nodes, self._script())

    def no_session(self, nodes: int) -> Marks:
        """A run submitted with slurmtrain, whose script does not use the library."""
        return self._submitted(nodes, [*self._script(), "--without-session"])

    def torchrun(self, nodes: int) -> Marks:
        """What a careful person writes by hand."""
        batch = self.folder / "torchrun.sh"
        batch.write_text(
            _BATCH.format(
                name=self.cluster.job_name, nodes=nodes, procs=self.procs, minutes=MINUTES, folder=self.folder,
                python=shlex.quote(sys.executable), script=shlex.join(self._script()),
            )
        )  # fmt: skip
        self._calm()
        job_id = self._run(["sbatch", "--parsable", str(batch)]).strip()
        return self._until_first_step(self.folder / f"torchrun-{job_id}.log")

    def _submitted(self, nodes: int, script: list[str]) -> Marks:
        spec = self.folder / "launch.yaml"
        spec.write_text(
            json.dumps(
                {
                    "name": self.cluster.job_name,
                    "command": shlex.join(["python", *script]),
                    "resources": {"nodes": nodes, "procs_per_node": self.procs, "time": f"00:{MINUTES}:00"},
                    "checkpoint": {"every": {"minutes": 60}},
                    "tracking": {"mlflow": {"enabled": False}},
                    "code": self.code,
                }
            )
        )
        self._calm()
        launched = time.time()
        [run] = json.loads(self._run(command("submit", str(spec), "--executor", "slurm", "--json")))["runs"]
        directory = RunDir(Path(run["dir"]))
        marks = self._until_first_step(directory.path)
        return {"submit": launched, **marks, **events(directory.attempt(run["job_id"], 0))}

    def _script(self) -> list[str]:
        return [str(SCRIPT), "--out", str(self.folder / "marks.json")]

    def _run(self, argv: list[str]) -> str:
        variables = {"SLURM_CONF": self.cluster.conf, "SLURMTRAIN_RUNS": str(self.folder / "runs")}
        return run_quietly(argv, **variables, **self.recorder.environment)

    def _calm(self) -> None:
        """Wait until nothing of the previous launch is left."""
        self.cluster.wait_until_free()
        (self.folder / "marks.json").unlink(missing_ok=True)
        self.recorder.take()

    def _until_first_step(self, logs: Path) -> Marks:
        """Wait for rank 0's marks. ``logs``: the file or directory to show if a job ends without any."""
        out = self.folder / "marks.json"
        deadline = time.monotonic() + PATIENCE_S
        look_at = time.monotonic() + 30
        while not out.exists():
            now = time.monotonic()
            # Only if it takes long: queries cost machine time too.
            ended = now > look_at and not self.cluster.jobs() and not out.exists()
            if ended or now > deadline:
                sys.exit(f"bench: no first step within {PATIENCE_S:.0f} s, or the job ended before:\n{tails(logs)}")
            look_at = now + 5 if now > look_at else look_at
            time.sleep(POLL_S)
        marks = json.loads(out.read_text())
        calls = dict(reversed(self.recorder.take()))
        return {
            "sbatch": calls["sbatch"],
            "srun": calls["srun"],
            "script": marks["started"],
            "imported": marks["imported"],
            "joined": marks["joined"],
            "first_step": marks["stepped"],
        }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--nodes", type=int, nargs="+", default=NODES, metavar="N", help="how many nodes (default: 2 and 4)"
    )
    parser.add_argument("--procs", type=int, default=1, metavar="P", help="processes a node (default: 1)")
    parser.add_argument("--rounds", type=int, metavar="R", help="launches of each kind (default: 11; 2 with --quick)")
    parser.add_argument(
        "--no-session", action="store_true", help="also measure slurmtrain with a script that does not use the library"
    )
    parser.add_argument("--folder", metavar="DIR", help="where to write, seen by all nodes (default: a temporary one)")


def run(arguments: argparse.Namespace) -> Report:
    rounds = arguments.rounds or (2 if arguments.quick else 11)
    report = Report()
    try:
        with set_up(max(arguments.nodes), arguments.procs, arguments.folder) as bench:
            for nodes in arguments.nodes:
                measure(bench, nodes, rounds, report, no_session=arguments.no_session)
    except NoCluster as error:
        print(f"bench: launch needs a Slurm cluster: {error}", file=sys.stderr)
        sys.exit(2)
    report.notes = ["aim: sbatch_to_first_step: session/torchrun at most 0.65"]
    return report


@contextmanager
def set_up(nodes: int, procs: int, folder: str | None = None, code: str = "snapshot") -> Iterator[Bench]:
    """A cluster with this many nodes, free before and after. Raises NoCluster."""
    with (
        cluster("launch", nodes) as slurm,
        tempfile.TemporaryDirectory(prefix="slurmtrain-bench-", dir=folder) as path,
    ):
        yield Bench(slurm, Path(path), Recorder(Path(path)), procs, code)
        slurm.wait_until_free()


def measure(bench: Bench, nodes: int, rounds: int, report: Report, *, no_session: bool) -> None:
    """Launch each side once per round, alternately; the first round warms up the machine's caches."""
    sides = {"session": bench.session, "torchrun": bench.torchrun}
    if no_session:
        sides["no_session"] = bench.no_session
    by_side: dict[str, list[Marks]] = {name: [] for name in sides}
    size = f"{nodes}x{bench.procs}"
    for number in range(-1, rounds):
        for name in sides if number % 2 else reversed(sides):
            marks = sides[name](nodes)
            say(f"{size} {name}: {marks['first_step'] - marks['sbatch']:.2f} s from sbatch to the first step")
            if number >= 0:
                by_side[name].append(marks)
    for name, launches in by_side.items():
        report.figure(f"{size} {name}: sbatch_to_first_step_s", took(launches, "sbatch", "first_step"), "s")
        if name != "torchrun":
            report.figure(f"{size} {name}: submit_to_first_step_s", took(launches, "submit", "first_step"), "s")
    for name, launches in by_side.items():
        passed = [mark for mark in _MARKS if mark in launches[0]]
        for before, after in pairwise(passed):
            report.figure(f"{size} {name}: {before}..{after}_s", took(launches, before, after), "s")
    by_hand = took(by_side["torchrun"], "sbatch", "first_step")
    for name in by_side:
        if name != "torchrun":
            for since in ("sbatch", "submit"):
                ratio = f"{size} {since}_to_first_step: {name}/torchrun"
                report.ratio(ratio, took(by_side[name], since, "first_step"), by_hand)


def took(launches: list[Marks], since: str, until: str) -> list[float]:
    return [marks[until] - marks[since] for marks in launches]


def events(attempt: AttemptDir) -> Marks:
    """When node 0's agent began, had found the others, and had started the workers."""
    lines = map(json.loads, attempt.node_journal(0).read_text().splitlines())
    times = {event["kind"]: float(event["t"]) for event in lines}
    return {kind: times[kind] for kind in _AGENT}


def tails(logs: Path) -> str:
    """The last lines of a log, or of all logs in a directory."""
    files = [logs] if logs.is_file() else sorted([*logs.rglob("*.log"), *logs.rglob("*.out")])
    return "".join(
        f"{file}:\n" + "".join(f"  {line}\n" for line in file.read_text(errors="replace").splitlines()[-20:])
        for file in files
    )
