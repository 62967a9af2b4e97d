"""The cost of a strategy: a step, its memory and its bytes, compared with the same written by hand in plain torch."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from _measure import ROOT, Report, run_quietly, say

SCRIPT = ROOT / "scripts" / "benchmarks" / "_strategies_train.py"
NAMES = (
    "ddp", "ddp-fp16-hook", "powersgd", "zero1", "zero2", "zero3", "offload", "hsdp", "tensor", "mesh", "pipeline",
)  # fmt: skip
PROCESSES = 4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", metavar="STRATEGY", choices=NAMES, help=f"one of {', '.join(NAMES)}")
    parser.add_argument("--turns", type=int, metavar="T", help="turns of each side (default: 20; 2 with --quick)")


def run(arguments: argparse.Namespace) -> Report:
    report = Report()
    turns = arguments.turns or (2 if arguments.quick else 20)
    with tempfile.TemporaryDirectory(prefix="slurmtrain-bench-") as folder:
        for name in [arguments.only] if arguments.only else NAMES:
            compare(report, Path(folder) / "out.json", name, turns)
    report.notes = ["aim: step ratios to torch by hand at most 1.02", f"{PROCESSES} processes of one thread, gloo"]
    return report


def compare(report: Report, out: Path, name: str, turns: int) -> None:
    """Add the figures of a strategy to the report."""
    more = {"ddp": ["--accelerate", "--lightning"], "zero3": ["--lightning"]}.get(name, [])
    sides = train(out, name, turns, *more)["sides"]
    for side, measured in sides.items():
        report.figure(f"{name}: {side}, step", [value * 1000 for value in measured["seconds"]], "ms")
        report.figure(f"{name}: {side}, sent in a step", [value / 1e6 for value in measured["bytes"]], "MB")
    # In processes of its own for each side, as memory is measured by its peak.
    for side in ("strategy", "hand"):
        report.figure(
            f"{name}: {side}, peak memory of rank 0", [train(out, name, 2, "--only", side)["peak_mib"]], "MiB"
        )
    for side in [side for side in sides if side != "strategy"]:
        report.ratio(f"{name}: step, strategy/{side}", sides["strategy"]["seconds"], sides[side]["seconds"])
    report.ratio(f"{name}: sent, strategy/hand", sides["strategy"]["bytes"], sides["hand"]["bytes"])
    peaks = [report.figures[f"{name}: {side}, peak memory of rank 0"].values for side in ("strategy", "hand")]
    report.ratio(f"{name}: memory, strategy/hand", *peaks)


def train(out: Path, name: str, turns: int, *more: str) -> Any:
    """Train under torchrun; returns what rank 0 has written."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={PROCESSES}"]
    words = ["--strategy", name, "--turns", str(turns), "--out", str(out), *more]
    run_quietly([*launcher, str(SCRIPT), *words], OMP_NUM_THREADS="1", PYTHONPATH=str(ROOT))
    say(f"{name} {' '.join(more)}: measured")
    return json.loads(out.read_text())
