"""The cost of a session: the time of a step, and from submit to the first step, each compared with torchrun."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, fields
from itertools import pairwise
from pathlib import Path

import torch
from _measure import ROOT, Report, command, run_quietly, say

SCRIPT = ROOT / "scripts" / "benchmarks" / "_step_train.py"
PROCESSES = 2
STEP_S = 0.010
# The first steps of a run are left out: caches are cold, and ranks have not connected yet.
COLD = 20


@dataclass(frozen=True)
class Measured:
    """One run: a step, the time between the bodies of two steps, and the way to the first step.

    What a session does only now and then is in the means; the lowest decile is what the machine's noise disturbs least.
    """

    step_lowest_decile_ms: float
    step_median_ms: float
    step_mean_ms: float
    between_steps_lowest_decile_us: float
    between_steps_median_us: float
    between_steps_mean_us: float
    submit_to_first_step_s: float


def run(arguments: argparse.Namespace) -> Report:
    rounds, steps = (2, 150) if arguments.quick else (24, 300)
    results: dict[str, list[Measured]] = {"session": [], "torchrun": []}
    with tempfile.TemporaryDirectory(prefix="slurmtrain-bench-") as folder:
        work = products_for(STEP_S)
        say(f"a step computes {work} products")
        ways = {"session": under_session, "torchrun": under_torchrun}
        for number in range(rounds):
            for name in ways if number % 2 else reversed(ways):
                results[name].append(ways[name](Path(folder), steps, work))
                say(f"{name}: {results[name][-1]}")
    report = Report()
    for measure in fields(Measured):
        figure, _, unit = measure.name.rpartition("_")
        values = {name: [getattr(each, measure.name) for each in measured] for name, measured in results.items()}
        for name, samples in values.items():
            report.figure(f"{name}_{measure.name}", samples, unit)
        # Plain torchrun does nothing between two steps, so a ratio to it would be meaningless.
        if not figure.startswith("between_steps"):
            report.ratio(f"{figure}: session/torchrun", values["session"], values["torchrun"])
    report.notes = ["aims: step ratios at most 1.01, session_between_steps_median_us at most 25"]
    return report


def products_for(seconds: float) -> int:
    """How many products take this long on one thread: measured once, so that both sides do the same work."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    weight = torch.randn(256, 256) / 16
    took = []
    for _ in range(200):
        began = time.perf_counter()
        (weight @ weight).tanh()
        took.append(time.perf_counter() - began)
    torch.set_num_threads(threads)
    return max(1, round(seconds / statistics.median(took)))


def under_torchrun(folder: Path, steps: int, work: int) -> Measured:
    out = folder / "torchrun.json"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={PROCESSES}"]
    launched = time.time()
    run_quietly([*launcher, *script(steps, work, out)], OMP_NUM_THREADS="1")
    return read(out, launched)


def under_session(folder: Path, steps: int, work: int) -> Measured:
    out, spec = folder / "session.json", folder / "step.yaml"
    spec.write_text(
        json.dumps(
            {
                "name": "bench-step",
                "command": " ".join(["python", *script(steps, work, out)]),
                "resources": {"procs_per_node": PROCESSES},
                "checkpoint": {"every": {"minutes": 60}},
                "tracking": {"mlflow": {"enabled": False}},
            }
        )
    )
    launched = time.time()
    # Waiting processes take time from the ranks: torchrun's launcher waits by itself, here none is needed.
    run_quietly(command("submit", str(spec), "--executor", "local"), SLURMTRAIN_RUNS=str(folder / "runs"))
    while not out.exists():
        time.sleep(0.5)
    run_quietly(command("wait", "@last"), SLURMTRAIN_RUNS=str(folder / "runs"))
    return read(out, launched)


def script(steps: int, work: int, out: Path) -> list[str]:
    return [str(SCRIPT), "--steps", str(steps), "--work", str(work), "--out", str(out)]


def read(out: Path, launched: float) -> Measured:
    marks = json.loads(out.read_text())
    out.unlink()
    pairs = list(pairwise(marks[COLD:]))
    steps = [after_began - began for (began, _), (after_began, _) in pairs]
    between = [after_began - ended for (_, ended), (after_began, _) in pairs]
    return Measured(
        step_lowest_decile_ms=statistics.quantiles(steps, n=10)[0] * 1000,
        step_median_ms=statistics.median(steps) * 1000,
        step_mean_ms=statistics.fmean(steps) * 1000,
        between_steps_lowest_decile_us=statistics.quantiles(between, n=10)[0] * 1e6,
        between_steps_median_us=statistics.median(between) * 1e6,
        between_steps_mean_us=statistics.fmean(between) * 1e6,
        submit_to_first_step_s=marks[0][0] - launched,
    )
