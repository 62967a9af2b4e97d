"""The cost of a session: the time of a step, and from submit to the first step, each compared with torchrun."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

import torch
from _measure import BENCHMARKS, Report, command, in_turns, run_quietly, say, submit, wait_until, write_spec

PROCESSES = 2
STEP_S = 0.010
PATIENCE_S = 600.0
# The first steps of a run are left out: caches are cold, and ranks have not connected yet.
COLD = 20
# One run: a step, the time between the bodies of two steps, and the way to the first step, by name.
Measured = dict[str, float]


def run(arguments: argparse.Namespace) -> Report:
    rounds, steps = (2, 150) if arguments.quick else (24, 300)
    with tempfile.TemporaryDirectory(prefix="slurmtrain-bench-") as folder:
        products = products_for(STEP_S)
        say(f"a step computes {products} products")
        sides = {"session": under_session, "torchrun": under_torchrun}
        ways = {name: lambda side=side: side(Path(folder), steps, products) for name, side in sides.items()}
        results = in_turns(ways, rounds, warm=0)
    report = Report()
    for measure in results["session"][0]:
        figure, _, unit = measure.rpartition("_")
        values = {name: [each[measure] for each in measured] for name, measured in results.items()}
        for name, samples in values.items():
            report.figure(f"{name}_{measure}", samples, unit)
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


def under_torchrun(folder: Path, steps: int, products: int) -> Measured:
    out = folder / "torchrun.json"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={PROCESSES}"]
    launched = time.time()
    run_quietly([*launcher, *script(steps, products, out)], OMP_NUM_THREADS="1")
    return read(out, launched)


def under_session(folder: Path, steps: int, products: int) -> Measured:
    out, runs = folder / "session.json", str(folder / "runs")
    spec = write_spec(
        folder / "step.yaml",
        name="bench-step",
        command=" ".join(["python", *script(steps, products, out)]),
        resources={"procs_per_node": PROCESSES},
        checkpoint={"every": {"minutes": 60}},
    )
    launched = time.time()
    # Waiting processes take time from the ranks: torchrun's launcher waits by itself, here none is needed.
    submit(spec, "local", SLURMTRAIN_RUNS=runs)
    wait_until(out.exists, "the run did not end", PATIENCE_S)
    run_quietly(command("wait", "@last"), SLURMTRAIN_RUNS=runs)
    return read(out, launched)


def script(steps: int, products: int, out: Path) -> list[str]:
    return [str(BENCHMARKS / "_train.py"), f"--steps={steps}", f"--products={products}", f"--out={out}"]


def read(out: Path, launched: float) -> Measured:
    """The figures of a run. What a session does only now and then is in the means; noise disturbs the lowest decile
    least."""
    marks = json.loads(out.read_text())["steps"]
    out.unlink()
    pairs = list(pairwise(marks[COLD:]))
    measured = {}
    for name, unit, factor, seconds in (
        ("step", "ms", 1e3, [after - before for (before, _), (after, _) in pairs]),
        ("between_steps", "us", 1e6, [after - ended for (_, ended), (after, _) in pairs]),
    ):
        measured[f"{name}_lowest_decile_{unit}"] = statistics.quantiles(seconds, n=10)[0] * factor
        measured[f"{name}_median_{unit}"] = statistics.median(seconds) * factor
        measured[f"{name}_mean_{unit}"] = statistics.fmean(seconds) * factor
    measured["submit_to_first_step_s"] = marks[0][0] - launched
    say(f"{out.stem}: {measured}")
    return measured
