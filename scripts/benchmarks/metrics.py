"""Reading the whole curve of a run: from its history in columns, and from the metrics files of its attempts.

A run of four attempts, of which each trains 100 steps again that the one before had logged. Both sides give the same.
"""

from __future__ import annotations

import argparse
import json
import os
import struct
import tempfile
import time
from pathlib import Path

from _measure import Report, say

from slurmtrain.model.metrics.curves import Points
from slurmtrain.model.run.layout import RunDir
from slurmtrain.model.run.root import RunsRoot
from slurmtrain.model.run.run import Attempt, Run
from slurmtrain.ops.history import read_history

POINTS = 10_000_000
QUICK_POINTS = 200_000
ATTEMPTS = 4
TRAINED_AGAIN = 100


def run(arguments: argparse.Namespace) -> Report:
    report = Report()
    points, rounds = (QUICK_POINTS, 2) if arguments.quick else (POINTS, 3)
    with tempfile.TemporaryDirectory() as folder:
        root = RunsRoot(Path(folder))
        trained, directory = write_run(root, points)
        history = root.history(trained.id)
        say(f"{points} points, {json_bytes(directory) / 1e6:.0f} MB of JSON lines")
        parsing, reading = [], []
        for _ in range(rounds):
            history.unlink(missing_ok=True)
            seconds, parsed = timed(trained, directory)
            parsing.append(seconds)
            seconds, read = timed(trained, directory)
            reading.append(seconds)
            if parsed != read or len(read) != points:
                report.failures.append("the history gives other points than the metrics files")
        report.figure("parse_s", parsing, "s")
        report.figure("history_s", reading, "s")
        report.figure("history_bytes_per_point", [history.stat().st_size / points])
        report.figure("json_bytes_per_point", [json_bytes(directory) / points])
        report.ratio("parse / history", parsing, reading)
    return report


def timed(trained: Run, directory: RunDir) -> tuple[float, Points]:
    began = time.perf_counter()
    points = read_history(trained, directory, ["loss"]).curves["loss"].kept
    return time.perf_counter() - began, points


def json_bytes(directory: RunDir) -> int:
    return sum(path.stat().st_size for path in directory.attempts.glob("*/metrics.jsonl"))


def write_run(root: RunsRoot, points: int) -> tuple[Run, RunDir]:
    each = points // ATTEMPTS
    directory = root.run("0123456789")
    attempts = [
        Attempt(number=number + 1, job_id="1", restart=number, first_step=max(0, number * each - TRAINED_AGAIN))
        for number in range(ATTEMPTS)
    ]
    for number, attempt in enumerate(attempts):
        path = directory.attempt("1", number).metrics
        path.parent.mkdir(parents=True, mode=0o700)
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600), "w") as file:
            for step in range((attempt.first_step or 0) + 1, (number + 1) * each + 1):
                # As losses are: numbers of 32 bits.
                [loss] = struct.unpack("f", struct.pack("f", 1 / (step + number)))
                line = {"t": 1.7e9 + 1e6 * number + step / 10, "step": step, "metrics": {"loss": loss}}
                file.write(json.dumps(line, separators=(",", ":")) + "\n")
    finished = Run(id="0123456789", name="r", state="completed", reason="", executor="slurm", attempts=attempts)
    return finished, directory
