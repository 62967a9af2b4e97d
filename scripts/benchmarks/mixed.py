"""Two nodes of which one has half or a quarter of a CPU: shares by their speeds, equal shares, and each node alone.

Both nodes are agents on this machine, with one process each, and a cgroup limits the second one; that takes root.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from _measure import ROOT, Report, command, in_turns, run_quietly, say

_PARTS = (0.5, 0.25)
# Shares have been chosen by then.
_SKIP = 60
# Samples of a step: so many that it computes much longer than it sends gradients, as on GPUs.
_BATCH = 4096


@dataclass(frozen=True)
class Bench:
    """A folder, and how many ``steps`` of ``batch`` samples a run has."""

    folder: Path
    steps: int
    batch: int

    def samples_per_s(self, parts: Sequence[float], mixed: bool) -> float:
        """The throughput of nodes that have these ``parts`` of a CPU, with shares by their speeds if ``mixed``."""
        out = self.folder / "out.json"
        spec = self.folder / "mixed.yaml"
        spec.write_text(
            json.dumps(
                {
                    "name": "bench-mixed",
                    "command": f"python {ROOT / 'scripts' / 'benchmarks' / '_mixed_train.py'}",
                    "workdir": str(self.folder),
                    "code": "none",
                    "resources": {"nodes": len(parts), "procs_per_node": 1, "mixed": mixed},
                    "params": {
                        "parts": list(parts), "steps": self.steps, "skip": _SKIP, "batch": self.batch, "out": str(out),
                    },
                    "tracking": {"mlflow": {"enabled": False}},
                }
            )
        )  # fmt: skip
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
    parser.add_argument("--steps", type=int, metavar="S", help="steps of a run (default: 160; 110 with --quick)")
    parser.add_argument("--rounds", type=int, metavar="R", help="runs of each kind (default: 3; 1 with --quick)")


def run(arguments: argparse.Namespace) -> Report:
    """Measure, and return the report."""
    if os.geteuid() != 0:
        print("bench: mixed limits processes by cgroups, which takes root", file=sys.stderr)
        sys.exit(2)
    rounds = arguments.rounds or (1 if arguments.quick else 3)
    steps = arguments.steps or (110 if arguments.quick else 160)
    report = Report()
    with tempfile.TemporaryDirectory(prefix="slurmtrain-bench-") as folder:
        bench = Bench(Path(folder), steps, _BATCH)
        # What this machine can do at most: two nodes that nothing limits share its memory and exchange gradients, too.
        whole = in_turns(
            {
                "both whole": partial(bench.samples_per_s, (1.0, 1.0), mixed=False),
                "whole alone": partial(bench.samples_per_s, (1.0,), mixed=False),
            },
            rounds,
            warm=0,
        )
        report.figure("1 and 1 CPU: equal", whole["both whole"], "samples/s")
        report.ratio("1 and 1 CPU: equal/sum of both alone", whole["both whole"], [2 * s for s in whole["whole alone"]])
        for part in _PARTS:
            speeds = in_turns(
                {
                    "balanced": partial(bench.samples_per_s, (1.0, part), mixed=True),
                    "equal": partial(bench.samples_per_s, (1.0, part), mixed=False),
                    "whole alone": partial(bench.samples_per_s, (1.0,), mixed=False),
                    "limited alone": partial(bench.samples_per_s, (part,), mixed=False),
                },
                rounds,
                warm=0,
            )
            say(f"{part}: {speeds}")
            name = f"1 and {part:g} CPU"
            for kind, values in speeds.items():
                report.figure(f"{name}: {kind}", values, "samples/s")
            both = [
                whole + limited for whole, limited in zip(speeds["whole alone"], speeds["limited alone"], strict=True)
            ]
            report.ratio(f"{name}: balanced/equal", speeds["balanced"], speeds["equal"])
            report.ratio(f"{name}: balanced/sum of both alone", speeds["balanced"], both)
        remove_cgroups()
    return report
