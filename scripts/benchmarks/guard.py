"""Whether launches, empty runs, status and steps are still as cheap as they were; exits 1 if not.

It takes less than five minutes, and has fewer rounds than the benchmarks whose functions it calls: its limits are above
what was measured, so that a regression of a fifth or more shows, and noise does not. Without a Slurm cluster (root, or
SLURM_CONF), launches are left out.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import launch
import status
import step
from _cluster import NoCluster, Recorder
from _measure import Report, command, cpu_seconds_of, in_turns, seconds_of, write_spec

NODES = 2
# Runs that have ended, for status.
ENDED = 1000
# Ratios that must not be exceeded, by name: a quarter more than was measured.
LIMITS = {
    "launch: session/torchrun": 0.72,
    "empty local run: CPU / import sqlalchemy": 7.5,
    "status of 1,000 runs / import sqlalchemy": 1.6,
    "step, lowest decile: session/torchrun": 1.05,
}
_SQLALCHEMY = [sys.executable, "-c", "import sqlalchemy"]


def run(arguments: argparse.Namespace) -> Report:
    rounds = 1 if arguments.quick else 3
    report = Report()
    with tempfile.TemporaryDirectory(prefix="slurmtrain-bench-") as path:
        folder = Path(path)
        measure_launch(rounds, report)
        measure_empty_run(folder, rounds + 2, report)
        measure_status(folder, rounds + 4, report)
        measure_step(folder, rounds, report)
    for name, limit in LIMITS.items():
        if name in report.ratios and report.ratios[name].median > limit:
            report.failures.append(f"{name} is {report.ratios[name].median:.2f}, and must be at most {limit:g}")
    report.notes += [f"limit: {name} at most {limit:g}" for name, limit in LIMITS.items()]
    return report


def measure_launch(rounds: int, report: Report) -> None:
    """From sbatch to the first step."""
    measured = Report()
    try:
        launch.measure_without_code(NODES, rounds, measured)
    except NoCluster as error:
        report.lack(f"launches were not measured: {error}")
        return
    size = f"{NODES}x1"
    for side in ("session", "torchrun"):
        report.figures[f"launch: {side}_s"] = measured.figures[f"{size} {side}: sbatch_to_first_step_s"]
    report.ratios["launch: session/torchrun"] = measured.ratios[f"{size} sbatch_to_first_step: session/torchrun"]


def measure_empty_run(folder: Path, rounds: int, report: Report) -> None:
    """The processor time of all processes of a local run that does nothing."""
    spec = write_spec(folder / "empty.yaml", command="python -c pass")
    submit = command("submit", str(spec), "--executor", "local", "--wait")
    took = in_turns(
        {
            "run": lambda: cpu_seconds_of(submit, SLURMTRAIN_RUNS=str(folder / "empty")),
            "sqlalchemy": lambda: cpu_seconds_of(_SQLALCHEMY),
        },
        rounds,
    )
    report.figure("empty local run: CPU", took["run"], "s")
    report.figure("import sqlalchemy: CPU", took["sqlalchemy"], "s")
    least(report, "empty local run: CPU / import sqlalchemy", took["run"], took["sqlalchemy"])


def measure_status(folder: Path, rounds: int, report: Report) -> None:
    """Whole processes of status, of runs that have ended."""
    root = status.Root(folder / "ended", ENDED, (), Recorder(folder))
    root.make()
    took = in_turns({"status": root.seconds, "sqlalchemy": lambda: seconds_of(_SQLALCHEMY)}, rounds)
    report.figure("status of 1,000 runs", took["status"], "s")
    report.figure("import sqlalchemy", took["sqlalchemy"], "s")
    least(report, "status of 1,000 runs / import sqlalchemy", took["status"], took["sqlalchemy"])


def measure_step(folder: Path, rounds: int, report: Report) -> None:
    """A step of training, in the steps that the machine disturbs least."""
    products, steps = step.products_for(step.STEP_S), 150
    took = in_turns(
        {
            "session": lambda: step.under_session(folder, steps, products)["step_lowest_decile_ms"],
            "torchrun": lambda: step.under_torchrun(folder, steps, products)["step_lowest_decile_ms"],
        },
        rounds,
        warm=0,
    )
    for side, values in took.items():
        report.figure(f"step, lowest decile: {side}", values, "ms")
    least(report, "step, lowest decile: session/torchrun", took["session"], took["torchrun"])


def least(report: Report, name: str, upper: Sequence[float], lower: Sequence[float]) -> None:
    """Report the quotient of the rounds that were disturbed least: there are few, and noise only adds to them."""
    report.ratio(name, [min(upper)], [min(lower)])
