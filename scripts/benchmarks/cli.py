"""Whole-process times of commands, beside those of Python and of the libraries that a command cannot do without."""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from pathlib import Path

from _measure import ROOT, Report, command, in_turns, run_quietly, say, seconds_of

from slurmtrain.model.ids import run_id
from slurmtrain.model.layout import RunDir, RunsRoot
from slurmtrain.model.plan import Plan
from slurmtrain.ops.submit import load
from slurmtrain.registry.store import Store
from slurmtrain.runtime.metrics import MetricsFile
from slurmtrain.system.files import DIRECTORY_MODE
from slurmtrain.system.journal import Journal
from slurmtrain.system.process import Process, myself

SPEC = ROOT / "experiments" / "digits" / "digits.yaml"
RUNS = 1000
# Of those, so many are under way; the others have ended.
UNDER_WAY = 2
STEPS = 20
SETTLING_S = 120.0
BARE = ("python", "import_click", "import_sqlalchemy")


def run(arguments: argparse.Namespace) -> Report:
    rounds = 5 if arguments.quick else 31
    with tempfile.TemporaryDirectory(prefix="slurmtrain-bench-") as folder:
        runs = Path(folder) / "runs"
        make_runs(runs)
        settle(runs)
        measured = {
            "python": [sys.executable, "-c", "pass"],
            "import_click": [sys.executable, "-c", "import click"],
            "import_sqlalchemy": [sys.executable, "-c", "import sqlalchemy"],
            "help": command("--help"),
            "render": command("render", str(SPEC)),
            "status_1000": command("status"),
            "status_1000_json": command("status", "--json"),
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
    report.notes = ["aims: help/import_click below 1.5, status_1000/import_sqlalchemy below 1.6"]
    return report


def make_runs(root: Path) -> None:
    """Run directories as submit, agent and session leave them, written with their own modules."""
    [planned] = load(SPEC, ["params.steps=20"], []).runs
    plan = json.dumps(planned.plan.to_json(), indent=1)
    now_ms, numbers = time.time_ns() // 1_000_000, random.Random(0)
    for index in range(RUNS):
        name = run_id(now_ms - (RUNS - index) * 60_000, numbers.getrandbits(10))
        run = RunsRoot(root).run(name)
        for folder in (run.journals, run.attempts, run.checkpoints):
            folder.mkdir(mode=DIRECTORY_MODE, parents=True)
        run.spec.write_text(SPEC.read_text())
        run.plan.write_text(plan)
        write_run(run, planned.plan, ended=index < RUNS - UNDER_WAY)


def write_run(run: RunDir, plan: Plan, *, ended: bool) -> None:
    """The journals of one attempt, as its writers write them but for the fsyncs."""
    job = {"job_id": f"local-{run.id[-6:]}", "restart": 0}
    attempt = run.attempt(job["job_id"], 0)
    attempt.path.mkdir(mode=DIRECTORY_MODE)
    attempt.plan.write_text(run.plan.read_text())
    here = myself()
    # No process of this boot started at its first clock tick, so one of the runs that have ended is never found alive.
    process = (Process(here.host, here.boot, here.pid, 1) if ended else here).plain()
    with Journal(run.journals / "created.jsonl", durable=False) as journal:
        facts = {"by": "bench@here", "git": None, "overrides": []}
        journal.write("created", name=plan.spec.name, plan_hash=plan.hash, executor="local", **facts)
    with Journal(run.journals / "submit.jsonl", durable=False) as journal:
        journal.write("submitting", **job, attempt=1, executor="local", overrides=[])
        journal.write("submitted", **job, process=process)
    with (
        Journal(attempt.node_journal(0), durable=False) as agent,
        Journal(attempt.rank_journal(0), durable=False) as rank,
    ):
        agent.write("agent", node=0, nodes=1, host=here.host, process=process, attempt=1)
        agent.write("rendezvous", node=0, master_addr="127.0.0.1", master_port=29500, interface="lo")
        agent.write("workers", processes={"0": process, "1": process}, resume_from=None)
        rank.write("session", step=0, world_size=2, device="cpu")
        rank.write("total", total_steps=STEPS)
        metrics = MetricsFile(attempt.metrics)
        for step in range(1, STEPS + 1 if ended else STEPS // 2):
            metrics.write(step, {"loss": 2.3 / step, "lr": 0.05, "test_accuracy": 1 - 0.5 / step})
        metrics.close()
        rank.write("saved", step=STEPS // 2, path=f"checkpoints/step-{STEPS // 2}", bytes=840_000, seconds=0.02)
        if ended:
            agent.write("end", cause="completed", reason="", failed_at=None, failures=[])


def settle(runs: Path) -> None:
    """Run status until the registry has taken in all runs, and knows those that ended to be settled."""
    began = time.monotonic()
    while True:
        looked = time.monotonic()
        run_quietly(command("status"), SLURMTRAIN_RUNS=str(runs))
        say(f"status took in what is new in {time.monotonic() - looked:.2f} s")
        with Store(RunsRoot(runs).registry) as store:
            listed = store.listed()
        states = sorted(one.run.state for one in listed.values())
        if states != ["completed"] * (RUNS - UNDER_WAY) + ["running"] * UNDER_WAY:
            sys.exit(f"bench: the runs that were made are not seen as they were meant: {states[:3]} ... {states[-3:]}")
        if sum(one.settled for one in listed.values()) == RUNS - UNDER_WAY:
            return
        if time.monotonic() - began > SETTLING_S:
            sys.exit(f"bench: the registry did not settle the runs that have ended within {SETTLING_S:.0f} s")
        time.sleep(0.5)
