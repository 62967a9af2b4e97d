"""Whole-process times of commands by the number of runs, and how fast the registry takes in new lines.

Each run has three attempts and 102 points: 100,000 runs have 300,000 attempts and 10 million points. All have ended,
and their directories exist. The times are compared with importing SQLAlchemy, in turns.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sqlite3
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

from _many_runs import ATTEMPTS, METRICS, append_points, make_many_runs
from _measure import Report, command, in_turns, run_quietly, say, seconds_of

from slurmtrain.config import Config
from slurmtrain.model.run.layout import RunsRoot
from slurmtrain.ops.shared.observe import observe
from slurmtrain.ops.shared.workspace import Workspace

SIZES = (1000, 10_000, 100_000)
QUICK = (1000, 3000)
# One run in a hundred has such a learning rate.
RARE = "state = completed and params.lr < 0.00011"
QUESTIONS = {
    "status": ("status",),
    "show": ("show", "@last"),
    "where": ("status", "--where", RARE, "--sort", "-metrics.loss", "--limit", "20"),
    "best": ("best", "--by", "test_accuracy"),
}
AIMS = {"status": 1.8, "show": 2.5, "where": 2.5, "best": 2.5}
# New lines of so many runs that have ended, as after a restore.
GROWING, LINES = 200, 500
SETTLING_S = 5.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--folder", type=Path, help="where to make the runs; 100,000 take 10 GB and 1.7 million files")
    parser.add_argument("--size", type=int, action="append", help="how many runs (several times: each)")


def run(arguments: argparse.Namespace) -> Report:
    report = Report()
    sizes = arguments.size or (QUICK if arguments.quick else SIZES)
    folder = Path(tempfile.mkdtemp(prefix="slurmtrain-bench-", dir=arguments.folder))
    try:
        for size in sizes:
            _measure(report, folder / str(size), size, rounds=5 if arguments.quick else 15)
            shutil.rmtree(folder / str(size))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    report.notes.append("aims: status below 1.8 times importing sqlalchemy, the others below 2.5; ingest at least 0.4")
    return report


def _measure(report: Report, runs: Path, size: int, *, rounds: int) -> None:
    began = time.monotonic()
    ids = make_many_runs(runs, size)
    say(f"{size} runs made in {time.monotonic() - began:.1f} s")
    environment = {"SLURMTRAIN_RUNS": str(runs)}
    took = seconds_of(command("registry", "rebuild"), **environment)
    report.figure(f"rebuild_{size}_s", [took], "s")
    time.sleep(SETTLING_S)
    run_quietly(command("status"), **environment)  # notes which runs have settled
    measured = {"import_sqlalchemy": partial(seconds_of, [sys.executable, "-c", "import sqlalchemy"])}
    measured |= {name: partial(seconds_of, command(*words), **environment) for name, words in QUESTIONS.items()}
    times = in_turns(measured, rounds)
    for name, values in times.items():
        report.figure(f"{name}_{size}_ms", [value * 1000 for value in values], "ms")
    for name in QUESTIONS:
        report.ratio(f"{name}_{size}/import_sqlalchemy", times[name], times["import_sqlalchemy"])
    _measure_ingest(report, runs, ids[-GROWING:], size)


def _measure_ingest(report: Report, runs: Path, ids: list[str], size: int) -> None:
    """New lines of many runs, beside executemany of as many rows with what a row of the registry holds of a point."""
    ingest_s, raw_s, points = [], [], 0
    config = Config(runs=runs, executor=None, registry=runs / "registry.db", mlflow_uri=None)
    for _ in range(3):
        points = append_points(runs, ids, LINES)
        for each in ids:  # so that they are looked at, though they have ended
            os.utime(RunsRoot(runs).run(each).attempts)
        workspace = Workspace(config)
        began = time.perf_counter()
        observe(workspace, ids, ask_slurm=False)
        ingest_s.append(time.perf_counter() - began)
        workspace.store.close()
        raw_s.append(_raw_seconds(runs.parent / "raw.db", ids, points))
    report.figure(f"ingest_{size}_points_per_s", [points / each for each in ingest_s])
    report.figure(f"executemany_{size}_points_per_s", [points / each for each in raw_s])
    report.ratio(f"ingest_{size}/executemany", raw_s, ingest_s)


def _raw_seconds(path: Path, ids: list[str], points: int) -> float:
    """The time to insert this many rows, one a point, into a table with the same key as the points have."""
    rows = [
        (ids[index % len(ids)], index % ATTEMPTS, index // METRICS, "loss", index / 7, index * 1.5)
        for index in range(points)
    ]
    path.unlink(missing_ok=True)
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA synchronous=FULL")
    connection.execute("CREATE TABLE point (run_id, attempt, step, name, value, time)")
    began = time.perf_counter()
    with connection:
        connection.executemany("INSERT INTO point VALUES (?, ?, ?, ?, ?, ?)", rows)
    took = time.perf_counter() - began
    connection.close()
    return took
