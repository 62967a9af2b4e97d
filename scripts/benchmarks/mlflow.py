"""Logging of metrics while an MLflow server is up, slow or dead: slurmtrain's, compared with MLflow's own calls."""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from _measure import ROOT, Report, command, environment, run_quietly, say

sys.path.insert(0, str(ROOT / "tests"))
from helpers.mlflow_server import mlflow_server
from helpers.tracking_proxy import TrackingProxy, tracking_proxy

SCRIPTS = ROOT / "scripts" / "benchmarks"
SLOW_S = 0.2
PAUSE_S = 0.002
# How long MLflow's calls may wait for a server that is dead: they would wait for minutes.
CUT_OFF_S = 20.0
CALLS = ("log_metric", "log_batch", "asynchronous")
STATES = ("up", "slow", "dead")
METRICS_A_STEP = 2
AIM_US = 10.0


def run(arguments: argparse.Namespace) -> Report:
    rounds, steps, points = (1, 300, 4_000) if arguments.quick else (3, 1_000, 20_000)
    report = Report()
    with tempfile.TemporaryDirectory(prefix="slurmtrain-bench-") as name:
        bench = Bench(Path(name))
        with (
            mlflow_server(bench.folder, f"sqlite:///{bench.folder / 'mlflow.db'}") as server,
            tracking_proxy(server) as proxy,
        ):
            bench.proxy = proxy
            for state in STATES:
                measure_calls(bench, report, state, rounds, steps)
            measure_rates(bench, report, rounds, points)
    report.notes = [f"aim: run_log_..._us at most {AIM_US:g}, whatever the server does"]
    for state in STATES:
        median = report.figures[f"run_log_{state}_us"].median
        if median > AIM_US:
            report.failures.append(f"run.log takes {median:.1f} us (median) while the server is {state}")
    return report


class Bench:
    """A server behind a proxy, and a directory for runs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.proxy: TrackingProxy
        self._runs = 0

    @contextmanager
    def state(self, state: str) -> Iterator[None]:
        """The server is up, slow or dead meanwhile."""
        self.proxy.delay_s = SLOW_S if state == "slow" else 0.0
        if state == "dead":
            self.proxy.refuse_connections()
        try:
            yield
        finally:
            self.proxy.delay_s = 0.0
            if state == "dead":
                self.proxy.listen()

    def new_mlflow_run(self) -> str:
        """The id of a new run on the server."""
        request = urllib.request.Request(
            f"{self.proxy.uri}/api/2.0/mlflow/runs/create",
            json.dumps({"experiment_id": "0"}).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request) as answer:
            return str(json.load(answer)["run"]["info"]["run_id"])

    def slurmtrain(self, *words: str) -> str:
        """What a command prints."""
        return run_quietly(command(*words), SLURMTRAIN_RUNS=str(self.folder / "runs"))

    def submit(self, steps: int, pause_s: float) -> tuple[str, Path, Path]:
        """Submit a run that logs; returns its id, the file that makes it begin, and that with its results."""
        self._runs += 1
        go, out = self.folder / f"go-{self._runs}", self.folder / f"out-{self._runs}.json"
        spec = self.folder / "bench-mlflow.yaml"
        script = f"{SCRIPTS / '_mlflow_train.py'} --steps {steps} --pause {pause_s} --go {go} --out {out}"
        spec.write_text(
            json.dumps(
                {
                    "command": f"python {script}",
                    "checkpoint": {"every": {"minutes": 60}},
                    "tracking": {"mlflow": {"uri": self.proxy.uri}},
                }
            )
        )
        printed = json.loads(self.slurmtrain("submit", str(spec), "--executor", "local", "--json"))
        return str(printed["runs"][0]["id"]), go, out

    def calls(self, way: str, steps: int, pause_s: float, *, state: str = "up") -> tuple[list[float], float | None]:
        """Log to MLflow directly, one ``way``: the seconds of each step's calls, and of all, None if cut off."""
        mlflow_run = self.new_mlflow_run()
        with self.state(state):
            words = [way, self.proxy.uri, mlflow_run, str(steps), str(pause_s)]
            process = subprocess.Popen(
                # Safe path: this module is not the mlflow that the script imports.
                [sys.executable, "-P", str(SCRIPTS / "_mlflow_calls.py"), *words],
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                env=environment(MLFLOW_DISABLE_TELEMETRY="true"),
            )
            try:
                printed, _ = process.communicate(timeout=CUT_OFF_S if state == "dead" else None)
            except subprocess.TimeoutExpired:
                process.kill()
                printed, _ = process.communicate()
        lines = printed.splitlines()
        took = [float(line) for line in lines if not line.startswith("all ")]
        return took, next((float(line.split()[1]) for line in lines if line.startswith("all ")), None)


def measure_calls(bench: Bench, report: Report, state: str, rounds: int, steps: int) -> None:
    """How long training waits in a step, in each way."""
    ours: list[float] = []
    theirs: dict[str, list[float]] = {way: [] for way in CALLS}
    for _ in range(rounds):
        run_id, go, out = bench.submit(steps, PAUSE_S)
        with bench.state(state):
            go.touch()
            wait_for(out)
        bench.slurmtrain("wait", run_id)
        ours.append(statistics.median(json.loads(out.read_text())) * 1e6)
        for way in CALLS:
            # Each call that waits does so for 200 ms, or until it is cut off.
            count = steps if state == "up" or way == "asynchronous" else 5
            took, _ = bench.calls(way, min(count, 300), PAUSE_S, state=state)
            theirs[way].append((statistics.median(took) if took else CUT_OFF_S) * 1e6)
        others = ", ".join(f"{way} {values[-1]:.0f} us" for way, values in theirs.items())
        say(f"{state}: run.log {ours[-1]:.1f} us, {others}")
    report.figure(f"run_log_{state}_us", ours, "us")
    for way, values in theirs.items():
        cut = " (cut off)" if values[-1] >= CUT_OFF_S * 1e6 else ""
        report.figure(f"{way}_{state}_us", values, f"us{cut}")
        report.ratio(f"run_log/{way}, {state}", ours, values)


def measure_rates(bench: Bench, report: Report, rounds: int, points: int) -> None:
    """How many points a second arrive: the whole of a ``sync``, and MLflow's calls after its import."""
    for state in ("up", "slow"):
        ways: dict[str, Callable[[], float]] = {"sync": lambda state=state: rate_of_sync(bench, state, points)}
        for way, part in (("log_batch_of_1000", 1), ("asynchronous", 10), ("log_metric", 100)):
            count = max(points // part // (50 if state == "slow" and part > 1 else 1), METRICS_A_STEP * 10)
            ways[way] = lambda state=state, way=way, count=count: rate_of_calls(bench, state, way, count)
        for way, measure in ways.items():
            values = [measure() for _ in range(rounds)]
            say(f"{state}: {way} sends {statistics.median(values):.0f} points/s")
            report.figure(f"{way}_{state}_points_per_s", values, "1/s")


def rate_of_calls(bench: Bench, state: str, way: str, points: int) -> float:
    _, seconds = bench.calls(way, points // METRICS_A_STEP, 0.0, state=state)
    assert seconds is not None
    return points / seconds


def rate_of_sync(bench: Bench, state: str, points: int) -> float:
    """Points a second of a ``sync`` that finds them all unsent, since the server was dead while they were logged."""
    with bench.state("dead"):
        run_id, go, _ = bench.submit(points // METRICS_A_STEP, 0.0)
        go.touch()
        bench.slurmtrain("wait", run_id)
    with bench.state(state):
        began = time.perf_counter()
        bench.slurmtrain("sync")
        return points / (time.perf_counter() - began)


def wait_for(path: Path) -> None:
    while not path.exists():
        time.sleep(0.05)
