"""Two nodes of which one has half or a quarter of a CPU: shares by their speeds, equal shares, and each node alone.

Both nodes are agents on this machine, with one process each, and a cgroup limits the second one; that takes root.
Processes that share a machine slow each other down, also if they have nothing to do with each other: so each node
trains alone twice, once while the other does so too, and once by itself.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from _measure import ROOT, Report, command, in_turns, run_quietly, say

_PARTS = (0.5, 0.25)
# Shares have been chosen by then.
_SKIP = 40
# Steps of a node that trains alone, of which the first few warm up; one with part of a CPU makes part of them.
_STEPS_ALONE = 40
_SKIP_ALONE = 4
# Samples of a step: so many that it computes much longer than it sends gradients, as on GPUs.
_BATCH = 16_384


@dataclass(frozen=True)
class Bench:
    """A folder, and how many ``steps`` of ``batch`` samples a run has."""

    folder: Path
    steps: int
    batch: int

    def samples_per_s(self, parts: Sequence[float], mixed: bool) -> float:
        """The throughput of nodes that have these ``parts`` of a CPU, with shares by their speeds if ``mixed``."""
        return self._train("both", parts, self.steps, _SKIP, mixed=mixed)

    def sum_at_once(self, parts: Sequence[float]) -> float:
        """The sum of the throughputs of nodes with these ``parts`` of a CPU, each in a run of its own, all at once.

        They train for about as long as each other.
        """
        with ThreadPoolExecutor(len(parts)) as pool:
            runs = [pool.submit(self.alone, part, f"node-{node}") for node, part in enumerate(parts)]
            return sum(each.result() for each in runs)

    def alone(self, part: float, name: str = "alone") -> float:
        """The throughput of a node that has this ``part`` of a CPU, in a run of this ``name``."""
        steps = _SKIP_ALONE + round(_STEPS_ALONE * part)
        return self._train(name, [part], steps, _SKIP_ALONE, mixed=False)

    def _train(self, name: str, parts: Sequence[float], steps: int, skip: int, *, mixed: bool) -> float:
        """Samples a second of a run of this ``name``, in its ``steps`` without those to ``skip`` at first."""
        out = self.folder / f"{name}.json"
        spec = self.folder / f"{name}.yaml"
        spec.write_text(
            json.dumps(
                {
                    "name": f"bench-{name}",
                    "command": f"python {ROOT / 'scripts' / 'benchmarks' / '_mixed_train.py'}",
                    "workdir": str(self.folder),
                    "code": "none",
                    "resources": {"nodes": len(parts), "procs_per_node": 1, "mixed": mixed},
                    "params": {
                        "parts": list(parts),
                        "steps": steps,
                        "skip": skip,
                        "batch": self.batch,
                        "out": str(out),
                    },
                    "tracking": {"mlflow": {"enabled": False}},
                }
            )
        )
        run_quietly(
            command("submit", str(spec), "--executor", "local", "--wait"), SLURMTRAIN_RUNS=str(self.folder / "runs")
        )
        speed: float = json.loads(out.read_text())["samples_per_s"]
        return speed


def remove_cgroups() -> None:
    """Remove the cgroups of processes that have ended: a process cannot remove its own."""
    for parent in (Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup")):
        for left in parent.glob("slurmtrain-bench-*"):
            with contextlib.suppress(OSError):
                left.rmdir()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this benchmark's options."""
    parser.add_argument("--steps", type=int, metavar="S", help="steps of a run (default: 120; 80 with --quick)")
    parser.add_argument("--rounds", type=int, metavar="R", help="runs of each kind (default: 3; 1 with --quick)")


def run(arguments: argparse.Namespace) -> Report:
    """Measure, and return the report."""
    if os.geteuid() != 0:
        print("bench: mixed limits processes by cgroups, which takes root", file=sys.stderr)
        sys.exit(2)
    rounds = arguments.rounds or (1 if arguments.quick else 3)
    steps = arguments.steps or (80 if arguments.quick else 120)
    report = Report()
    with tempfile.TemporaryDirectory(prefix="slurmtrain-bench-") as folder:
        bench = Bench(Path(folder), steps, _BATCH)
        for part in (1.0, *_PARTS):
            parts = (1.0, part)
            sides = {
                "equal": partial(bench.samples_per_s, parts, mixed=False),
                "each alone, at once": partial(bench.sum_at_once, parts),
                "first alone": partial(bench.alone, 1.0),
                "second alone": partial(bench.alone, part),
            }
            if part < 1:
                sides = {"balanced": partial(bench.samples_per_s, parts, mixed=True), **sides}
            speeds = in_turns(sides, rounds, warm=0)
            say(f"{part}: {speeds}")
            name = f"1 and {part:g} CPU"
            for kind, values in speeds.items():
                report.figure(f"{name}: {kind}", values, "samples/s")
            alone = [
                first + second for first, second in zip(speeds["first alone"], speeds["second alone"], strict=True)
            ]
            for kind in [kind for kind in ("balanced", "equal") if kind in speeds]:
                report.ratio(f"{name}: {kind}/each alone, at once", speeds[kind], speeds["each alone, at once"])
                report.ratio(f"{name}: {kind}/sum of both alone", speeds[kind], alone)
            if part < 1:
                report.ratio(f"{name}: balanced/equal", speeds["balanced"], speeds["equal"])
        remove_cgroups()
    return report
