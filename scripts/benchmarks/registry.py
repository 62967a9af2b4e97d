"""Whole-process times of commands by the number of runs, and how fast the registry takes in new lines.

Each run has three attempts and 102 points: 100,000 runs have 300,000 attempts and 10 million points. All have ended,
and their directories exist. The times are compared with importing SQLAlchemy, in turns.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import sqlalchemy as sa
from _many_runs import ATTEMPTS, METRICS, append_points, make_many_runs, remove_many_runs
from _measure import Report, command, environment, in_turns, run_quietly, say, seconds_of

from slurmtrain.config import Config
from slurmtrain.model.run.root import RunsRoot
from slurmtrain.ops.shared.observe import observe
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.registry.ingest import ingest
from slurmtrain.registry.store import Store

T = TypeVar("T")

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
# So many runs are taken in by an empty registry.
NEW = 1000
INGEST_ROUNDS = 5
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
            remove_many_runs(folder / str(size))
    finally:
        for size in sizes:
            remove_many_runs(folder / str(size))
        shutil.rmtree(folder, ignore_errors=True)
    report.notes.append("aims: status below 1.8 times importing sqlalchemy, the others below 2.5; ingest at least 0.4")
    return report


def _measure(report: Report, runs: Path, size: int, *, rounds: int) -> None:
    began = time.monotonic()
    ids = make_many_runs(runs, size)
    say(f"{size} runs made in {time.monotonic() - began:.1f} s")
    settings = {"SLURMTRAIN_RUNS": str(runs)}
    _rebuild(report, size, settings)
    time.sleep(SETTLING_S)
    run_quietly(command("status"), **settings)  # notes which runs have settled
    measured = {"import_sqlalchemy": partial(seconds_of, [sys.executable, "-c", "import sqlalchemy"])}
    measured |= {name: partial(seconds_of, command(*words), **settings) for name, words in QUESTIONS.items()}
    times = in_turns(measured, rounds)
    for name, values in times.items():
        report.figure(f"{name}_{size}_ms", [value * 1000 for value in values], "ms")
    for name in QUESTIONS:
        report.ratio(f"{name}_{size}/import_sqlalchemy", times[name], times["import_sqlalchemy"])
    _measure_ingest(report, runs, ids, size)


def _rebuild(report: Report, size: int, settings: dict[str, str]) -> None:
    """The time and the memory of a rebuild: the largest of its processes."""
    began = time.perf_counter()
    process = subprocess.Popen(
        command("registry", "rebuild"), env=environment(**settings), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    assert process.stderr is not None
    errors = process.stderr.read().decode(errors="replace")
    _, status, used = os.wait4(process.pid, 0)
    if status:
        sys.exit(f"bench: the rebuild failed:\n{errors}")
    report.figure(f"rebuild_{size}_s", [time.perf_counter() - began], "s")
    report.figure(f"rebuild_{size}_memory_mb", [used.ru_maxrss / 1024], "MB")


def _measure_ingest(report: Report, runs: Path, ids: list[str], size: int) -> None:
    """How fast many points of few runs, and many small runs of which nothing is known, are taken in: CPU time.

    Compared with inserting the rows that it writes into the same tables, alone and with parsing the same lines; with
    inserting a row for each point, though the registry has none.
    """
    grown, new = ids[-GROWING:], ids[-NEW:]
    points = GROWING * LINES * METRICS
    of_points, of_runs = _Times(), _Times()
    plain: list[float] = []
    for number in range(INGEST_ROUNDS):
        lines = append_points(runs, grown, LINES, before=number * LINES)
        for each in grown:  # so that they are looked at, though they have ended
            os.utime(RunsRoot(runs).run(each).attempts)
        of_points.measure(partial(_observe, runs, grown), lines, _scratch(runs, f"grown-{number}.db"))
        plain.append(_seconds_of_points(_scratch(runs, "points.db"), ids, points))
    # Not those that have grown: as small as the others.
    new = ids[: min(NEW, size - GROWING)]
    lines = [line for each in new for path in (runs / each).rglob("*.jsonl") for line in path.read_text().splitlines()]
    for number in range(INGEST_ROUNDS):
        of_runs.measure(partial(_ingest, runs, new, number), lines, _scratch(runs, f"new-{number}.db"))
    report.figure(f"ingest_{size}_points_per_s", [points / each for each in of_points.ingest])
    report.figure(f"ingest_{size}_runs_per_s", [len(new) / each for each in of_runs.ingest])
    of_points.report(report, f"ingest_{size}_points")
    report.ratio(f"ingest_{size}_points/executemany_points", plain, of_points.ingest)
    of_runs.report(report, f"ingest_{size}_runs")


class _Times:
    """CPU seconds of each round: taking lines in, inserting the rows that it writes, and parsing the lines."""

    def __init__(self) -> None:
        self.ingest: list[float] = []
        self.rows: list[float] = []
        self.rows_and_json: list[float] = []

    def measure(self, take_in: Callable[[], float], lines: Sequence[str], other: Path) -> None:
        """``take_in``: returns its seconds. ``lines``: what it takes in. ``other``: a registry for its rows."""
        written: list[tuple[str, Sequence[Any]]] = []

        def note(_: object, __: object, statement: str, rows: Sequence[Any], *___: object) -> None:
            if statement.startswith("INSERT"):
                written.append((statement, rows if isinstance(rows, list) else [rows]))

        sa.event.listen(sa.Engine, "before_cursor_execute", note)
        self.ingest.append(take_in())
        sa.event.remove(sa.Engine, "before_cursor_execute", note)
        self.rows.append(_seconds_of_rows(other, written))
        self.rows_and_json.append(self.rows[-1] + _cpu_seconds(lambda: [json.loads(line) for line in lines])[0])

    def report(self, report: Report, name: str) -> None:
        """Enter the ratios."""
        report.ratio(f"{name}/executemany_rows", self.rows, self.ingest)
        report.ratio(f"{name}/executemany_rows_and_json", self.rows_and_json, self.ingest)


def _cpu_seconds(action: Callable[[], T]) -> tuple[float, T]:
    """The CPU time of an action, in seconds, and its result. Other work on the machine does not count."""
    gc.collect()
    gc.disable()
    try:
        began = time.process_time()
        result = action()
        return time.process_time() - began, result
    finally:
        gc.enable()


def _scratch(runs: Path, name: str) -> Path:
    """A file beside the runs root, for this root alone: other sizes must not meet each other's rows."""
    return runs.parent / f"{runs.name}-{name}"


def _observe(runs: Path, ids: list[str]) -> float:
    """The time in which a command takes in what is new in runs that it knows."""
    workspace = Workspace(Config(runs=runs, executor=None, registry=runs / "registry.db", mlflow_uri=None))
    took, _ = _cpu_seconds(lambda: observe(workspace, ids, ask_slurm=False))
    workspace.store.close()
    return took


def _ingest(runs: Path, ids: list[str], number: int) -> float:
    """The time in which one process takes in runs of which the registry knows nothing."""
    directories = [RunsRoot(runs).run(each) for each in ids]

    def take_in() -> None:
        with store.begin() as transaction:
            ingest(transaction, directories, dead=True)

    with Store(_scratch(runs, f"ingest-{number}.db")) as store:
        return _cpu_seconds(take_in)[0]


def _seconds_of_rows(path: Path, statements: Sequence[tuple[str, Sequence[Any]]]) -> float:
    """The time of plain ``executemany`` calls on a new registry, which are on disk then."""
    Store(path).close()
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA synchronous=FULL")

        def insert() -> None:
            with connection:
                for statement, rows in statements:
                    connection.executemany(statement, rows)

        return _cpu_seconds(insert)[0]


def _seconds_of_points(path: Path, ids: list[str], points: int) -> float:
    """The time to insert this many rows, one a point, into a table without a key."""
    rows = [
        (ids[index % len(ids)], index % ATTEMPTS, index // METRICS, "loss", index / 7, index * 1.5)
        for index in range(points)
    ]
    path.unlink(missing_ok=True)
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA synchronous=FULL")
        connection.execute("CREATE TABLE point (run_id, attempt, step, name, value, time)")

        def insert() -> None:
            with connection:
                connection.executemany("INSERT INTO point VALUES (?, ?, ?, ?, ?, ?)", rows)

        return _cpu_seconds(insert)[0]
