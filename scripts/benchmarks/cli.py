"""Whole-process times of commands, compared with Python and the libraries that every command needs."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from _measure import Report, command, in_turns, run_quietly, say, seconds_of
from _runs import SPEC, make_runs

from slurmtrain.model.run.root import RunsRoot
from slurmtrain.registry.store import Store

RUNS = 1000
# Of those, how many are active; the others have ended.
UNDER_WAY = 2
SETTLING_S = 120.0
# How many runs are compared with each other, as in a small sweep.
COMPARED = 6
# What people ask and do about some of the runs, all of which are of one name.
QUESTIONS = {
    "status_where": ("status", "--where", "params.lr<0.5 and state=completed", "--sort", "-metrics.loss"),
    "status_csv": ("status", "--csv"),
    "show": ("show", "@last"),
    "logs": ("logs", "@last"),
    "checkpoints": ("checkpoints", "@last"),
    "best": ("best", "digits*", "--by", "metrics.test_accuracy"),
    "tag": ("tag", "@last", "seen"),
    "note": ("note", "@last", "seen"),
    "archive": ("archive", "@last"),
}
BARE = ("python", "import_click", "import_sqlalchemy")


def run(arguments: argparse.Namespace) -> Report:
    rounds = 5 if arguments.quick else 31
    with tempfile.TemporaryDirectory(prefix="slurmtrain-bench-") as folder:
        runs = Path(folder) / "runs"
        make_runs(runs, ended=RUNS - UNDER_WAY, running=UNDER_WAY)
        newest = settle(runs)[-COMPARED:]
        measured = {
            "python": [sys.executable, "-c", "pass"],
            "import_click": [sys.executable, "-c", "import click"],
            "import_sqlalchemy": [sys.executable, "-c", "import sqlalchemy"],
            "help": command("--help"),
            "render": command("render", str(SPEC)),
            "status_1000": command("status"),
            "status_1000_json": command("status", "--json"),
            **{f"{name}_1000": command(*words) for name, words in QUESTIONS.items()},
            "compare_1000": command("compare", *newest, "--by", "metrics.test_accuracy"),
        }
        times = in_turns(
            {name: lambda argv=argv: seconds_of(argv, SLURMTRAIN_RUNS=str(runs)) for name, argv in measured.items()},
            rounds,
        )
    report = Report()
    for name, values in times.items():
        report.figure(f"{name}_ms", [value * 1000 for value in values], "ms")
    for name in measured:
        if name not in BARE:
            for bare in BARE:
                report.ratio(f"{name}/{bare}", times[name], times[bare])
    report.notes = ["aims: help/import_click below 1.5, status_1000/import_sqlalchemy below 1.6, all others below 2"]
    return report


def settle(runs: Path) -> list[str]:
    """Run status until the registry has ingested all runs, and has settled those that ended; returns their ids."""
    began = time.monotonic()
    while True:
        looked = time.monotonic()
        run_quietly(command("status"), SLURMTRAIN_RUNS=str(runs))
        say(f"status took in what is new in {time.monotonic() - looked:.2f} s")
        with Store(RunsRoot(runs).registry) as store:
            listed = store.listed()
        states = sorted(one.state for one in listed.values())
        if states != ["completed"] * (RUNS - UNDER_WAY) + ["running"] * UNDER_WAY:
            sys.exit(f"bench: the runs that were made are not seen as they were meant: {states[:3]} ... {states[-3:]}")
        if sum(one.settled for one in listed.values()) == RUNS - UNDER_WAY:
            return list(listed)
        if time.monotonic() - began > SETTLING_S:
            sys.exit(f"bench: the registry did not settle the runs that have ended within {SETTLING_S:.0f} s")
        time.sleep(0.5)
