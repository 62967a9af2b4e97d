"""``kill -9`` of every process of a run at a random step, then ``slurmtrain resume --wait``: is the end the same?

For each seed it compares the final weights, bit for bit, with those of a run that nothing interrupted, and the
``lost_steps`` that slurmtrain reports with the steps that were finished since the newest checkpoint at the kill.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from _measure import BENCHMARKS, Report, command, run_quietly, say, submit, wait_until, write_spec

from slurmtrain.model.run.layout import AttemptDir, RunDir, checkpoint_step
from slurmtrain.runtime.checkpoint.checkpoint_files import newest_published, sweep
from slurmtrain.system.process import Process, descendants

STEPS = 100
EVERY = 7
PAUSE_S = 0.02
PATIENCE_S = 120.0
POLL_S = 0.002


@dataclass(frozen=True)
class Outcome:
    """The outcome of one run that was killed."""

    same: bool
    lost: int
    lost_reported: int | None
    seconds: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seeds", type=int, metavar="N", help="how many runs to kill (default: 100; 5 with --quick)")


def run(arguments: argparse.Namespace) -> Report:
    seeds = arguments.seeds or (5 if arguments.quick else 100)
    outcomes = []
    with tempfile.TemporaryDirectory(prefix="slurmtrain-bench-") as folder:
        bench = Bench(Path(folder))
        expected = bench.uninterrupted()
        if bench.uninterrupted() != expected:
            sys.exit("bench: two runs that nothing interrupted differ, so no comparison means anything")
        for seed in range(seeds):
            outcomes.append(outcome := bench.killed_and_resumed(seed, expected))
            verdict = "the same" if outcome.same else "DIFFERENT"
            say(f"seed {seed}: {verdict}, lost {outcome.lost}, reported {outcome.lost_reported}")
    same = [outcome.same for outcome in outcomes]
    right = [outcome.lost == outcome.lost_reported for outcome in outcomes]
    report = Report()
    report.figure("seeds", [seeds])
    report.figure("same_final_weights", [sum(same)])
    report.figure("right_lost_steps", [sum(right)])
    report.figure("lost_steps", [outcome.lost for outcome in outcomes])
    report.figure("resume_to_end_s", [outcome.seconds for outcome in outcomes], "s")
    report.notes = [
        f"final weights bit for bit as uninterrupted: {sum(same)} of {seeds}; lost_steps right: {sum(right)} of {seeds}"
    ]
    for fault, well in (("other final weights", same), ("wrong lost_steps", right)):
        if bad := [str(seed) for seed, good in enumerate(well) if not good]:
            report.failures.append(f"{fault} with the seeds {', '.join(bad)}")
    return report


class Bench:
    """Runs of one runs root."""

    def __init__(self, folder: Path) -> None:
        self.runs = {"SLURMTRAIN_RUNS": str(folder / "runs")}
        self.spec = write_spec(
            folder / "resume.yaml",
            name="bench-resume",
            command=f"python {BENCHMARKS / '_resume_train.py'}",
            params={"steps": STEPS, "pause": PAUSE_S},
            resources={"procs_per_node": 2},
            checkpoint={"every": {"steps": EVERY}},
        )

    def uninterrupted(self) -> str:
        return final(Path(submit(self.spec, "local", "--wait", **self.runs)["dir"]))

    def killed_and_resumed(self, seed: int, expected: str) -> Outcome:
        directory, finished = self.killed(random.Random(seed))
        # Complete checkpoints that only lack their final name get it, as in `resume`.
        sweep(directory.checkpoints, attempt="")
        newest = newest_published(directory.checkpoints)
        goes_on_from = checkpoint_step(newest.name) or 0 if newest else 0
        began = time.monotonic()
        # Before its first checkpoint a run has nothing to continue from, and says so.
        fresh = [] if newest else ["--from-start"]
        reply = run_quietly(command("resume", directory.id, "--wait", "--json", *fresh), **self.runs)
        [resumed] = json.loads(reply)["runs"]
        same, lost = final(directory.path) == expected, finished - goes_on_from
        return Outcome(same, lost, resumed["lost_steps"], time.monotonic() - began)

    def killed(self, numbers: random.Random) -> tuple[RunDir, int]:
        """A run that was killed after a random step, and the last step that it finished."""
        step = numbers.randint(1, STEPS)
        while True:
            submitted = submit(self.spec, "local", **self.runs)
            attempt = RunDir(Path(submitted["dir"])).attempt(submitted["job_id"], 0)
            wait_for_step(attempt.metrics, 1)
            processes = processes_of(attempt)
            wait_for_step(attempt.metrics, step)
            for process in numbers.sample(processes, len(processes)):
                process.send(signal.SIGKILL)
            wait_until(
                lambda left=processes: not any(map(Process.alive, left)),
                "killed processes did not go",
                PATIENCE_S,
                POLL_S,
            )
            if not (attempt.run.path / "final.json").exists():
                return attempt.run, last_step(attempt.metrics)
            # It ended before it was killed: kill the next one earlier.
            step = numbers.randint(1, step)


def final(directory: Path) -> str:
    """The digest of the weights that a run ended with."""
    return str(json.loads((directory / "final.json").read_text())["sha256"])


def processes_of(attempt: AttemptDir) -> list[Process]:
    """The controller, the agent and the workers, as the journals name them, and everything below them."""
    entries = []
    for journal in [*attempt.run.journals.glob("*.jsonl"), attempt.node_journal(0)]:
        for event in map(json.loads, journal.read_text().splitlines()):
            entries += [event["process"]] if "process" in event else list(event.get("processes", {}).values())
    started = {Process.from_dict(one) for one in entries}
    return sorted({*started, *(below for one in started for below in descendants(one))}, key=lambda one: one.pid)


def last_step(metrics: Path) -> int:
    """The last finished step of an attempt: that of the last complete line."""
    lines = metrics.read_bytes().splitlines(keepends=True) if metrics.exists() else []
    return max((json.loads(line)["step"] for line in lines if line.endswith(b"\n")), default=0)


def wait_for_step(metrics: Path, step: int) -> None:
    wait_until(lambda: last_step(metrics) >= step, f"{metrics} did not come to step {step}", PATIENCE_S, POLL_S)
