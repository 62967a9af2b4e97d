"""The default preflight on a real Slurm cluster and its scaling on simulated nodes.

The first part needs root to start its own cluster with scripts/cluster, or SLURM_CONF to use an existing one; without
either, only the simulation is measured. ``_preflight_agents.py`` says what is made up there.
"""

from __future__ import annotations

import argparse
import json
import math
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _cluster import Cluster, NoCluster, cluster
from _measure import ROOT, Report, command, environment, run_quietly, say

from slurmtrain.model.preflight.election import ALL_PAIRS
from slurmtrain.model.run.layout import AttemptDir, RunDir

AGENTS = ROOT / "scripts" / "benchmarks" / "_preflight_agents.py"
NODES = (1, 2, 4)
SIMULATED = (16, 64, 256)
# The constant part of the estimate for a real cluster is measured on this many nodes.
FIXED = 2
MINUTES = 10
PATIENCE_S = 240.0
POLL_S = 0.1
# More agents in one process answer more slowly, and less like real nodes.
MOST_A_PROCESS = 64


@dataclass(frozen=True)
class JobTiming:
    """One job: the longest seconds of a node, until the last had begun, and from the first agent's first word on."""

    seconds: float
    begun_after: float
    first_word: float


@dataclass(frozen=True)
class Bench:
    """A cluster, and a folder that its nodes see."""

    cluster: Cluster
    folder: Path

    def suite(self, nodes: int) -> JobTiming:
        """A run of the default suite that does nothing else. ``first_word``: seconds since an agent's first one."""
        spec = self.folder / "preflight.yaml"
        spec.write_text(
            json.dumps(
                {
                    "name": self.cluster.job_name,
                    "command": "true",
                    "resources": {"nodes": nodes, "procs_per_node": 1, "time": f"00:{MINUTES}:00"},
                    "tracking": {"mlflow": {"enabled": False}},
                }
            )
        )
        self.cluster.wait_until_free()
        environ = {"SLURM_CONF": self.cluster.conf, "SLURMTRAIN_RUNS": str(self.folder / "runs")}
        submitted = run_quietly(command("submit", str(spec), "--executor", "slurm", "--json"), **environ)
        [run] = json.loads(submitted)["runs"]
        journals = self._journals(RunDir(Path(run["dir"])).attempt(run["job_id"], 0), nodes)
        for events in journals:
            if events["preflight"]["status"] == "fail" or events["end"]["cause"] != "completed":
                sys.exit(f"bench: the preflight of {nodes} nodes did not pass: {events['end']['reason']}")
        verdicts = [events["preflight"] for events in journals]
        begun = [float(verdict["t"]) - float(verdict["seconds"]) for verdict in verdicts]
        last = max(float(verdict["t"]) for verdict in verdicts)
        return JobTiming(
            seconds=max(float(verdict["seconds"]) for verdict in verdicts),
            begun_after=max(begun) - min(begun),
            first_word=last - min(float(events["agent"]["t"]) for events in journals),
        )

    def _journals(self, attempt: AttemptDir, nodes: int) -> list[dict[str, Any]]:
        """The events of each node by kind, once all nodes have ended."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            journals = [_events(attempt.node_journal(node)) for node in range(nodes)]
            if all("end" in events for events in journals):
                return journals
            if time.monotonic() > deadline:
                sys.exit(f"bench: the preflight of {nodes} nodes did not end within {PATIENCE_S:.0f} s: {attempt.path}")
            time.sleep(POLL_S)


def _events(journal: Path) -> dict[str, Any]:
    try:
        lines = journal.read_text().splitlines(keepends=True)
    except FileNotFoundError:
        return {}
    events = [json.loads(line) for line in lines if line.endswith("\n")]
    return {event["kind"]: event for event in events}


@dataclass(frozen=True)
class SimulatedResult:
    """One simulated preflight. ``alone``: node 1, in a process of its own like node 0; ``other``: the mean of the rest.

    Of agents that share a process the kernel wakes up one for several, so that each has less to do than it would alone.
    """

    wall_s: float
    node0_cpu_ms: float
    alone_cpu_ms: float
    other_cpu_ms: float
    node0_sent: int
    other_sent: int
    connections: int
    warnings: Sequence[str]


def simulate(nodes: int) -> SimulatedResult:
    """Run the preflight of this many nodes on this machine."""
    firsts = [0, 1, *range(2, nodes, MOST_A_PROCESS)]
    shares = [(first, after - first) for first, after in zip(firsts, [*firsts[1:], nodes], strict=True)]
    secret, port = secrets.token_hex(32), "0"
    with ExitStack() as stack:
        processes = []
        for first, count in shares:
            argv = [sys.executable, str(AGENTS), str(nodes), str(first), str(count), secret, port]
            process = subprocess.Popen(
                argv, cwd=ROOT, env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            stack.callback(_end, process)
            processes.append(process)
            if first == 0:
                port = _line(process)
        for process in processes[1:]:
            _line(process)
        for process in processes:
            process.stdin.write("\n")
            process.stdin.flush()
        reports = [json.loads(_line(process)) for process in processes]
    agents = [agent for report in reports for agent in report["agents"]]
    if problems := [agent["problem"] for agent in agents if agent["problem"]]:
        sys.exit(f"bench: the simulated preflight of {nodes} nodes did not pass: {problems[0]}")
    return SimulatedResult(
        wall_s=reports[0]["wall_s"],
        node0_cpu_ms=reports[0]["cpu_s"] * 1e3,
        alone_cpu_ms=reports[1]["cpu_s"] * 1e3,
        other_cpu_ms=sum(report["cpu_s"] for report in reports[2:]) / (nodes - 2) * 1e3,
        node0_sent=agents[0]["sent"],
        other_sent=max(agent["sent"] for agent in agents[1:]),
        connections=max(agent["tests"] for agent in agents),
        warnings=[warning for agent in agents for warning in agent["warnings"]],
    )


def _line(process: subprocess.Popen[str]) -> str:
    line = process.stdout.readline()
    if not line:
        sys.exit("bench: a process of simulated nodes ended early; its messages stand above")
    return line.strip()


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--nodes", type=int, nargs="+", default=NODES, metavar="N", help="how many real nodes (default: 1, 2 and 4)"
    )
    parser.add_argument(
        "--simulated", type=int, nargs="+", default=SIMULATED, metavar="N",
        help="how many simulated nodes, 3 or more (default: 16, 64 and 256)",
    )  # fmt: skip
    parser.add_argument("--rounds", type=int, metavar="R", help="of each kind (default: 11; 2 with --quick)")
    parser.add_argument("--folder", metavar="DIR", help="where to write, seen by all nodes (default: a temporary one)")


def run(arguments: argparse.Namespace) -> Report:
    rounds = arguments.rounds or (2 if arguments.quick else 11)
    report = Report()
    try:
        with (
            cluster("preflight", max(arguments.nodes)) as real_cluster,
            tempfile.TemporaryDirectory(prefix="slurmtrain-bench-", dir=arguments.folder) as folder,
        ):
            bench = Bench(real_cluster, Path(folder))
            for nodes in arguments.nodes:
                measure_real(bench, nodes, rounds, report)
            real_cluster.wait_until_free()
        report.notes.append("the real nodes share this machine's cores")
        report.notes.append("aim: on 4 nodes at most 3 s")
    except NoCluster as error:
        report.notes.append(f"real nodes were not measured: {error}")
        say(f"bench: {report.notes[-1]}")
    measure_simulated(sorted(arguments.simulated), rounds, report)
    return report


def measure_real(bench: Bench, nodes: int, rounds: int, report: Report) -> None:
    """Run the suite once per round; the one before the first warms up the machine's caches."""
    timings = []
    for number in range(-1, rounds):
        timing = bench.suite(nodes)
        say(f"{nodes} nodes: {timing.seconds:.2f} s")
        if number >= 0:
            timings.append(timing)
    report.figure(f"{nodes}x1: first_word_to_verdict_s", [timing.first_word for timing in timings], "s")
    report.figure(f"{nodes}x1: suite_s", [timing.seconds for timing in timings], "s")
    report.figure(f"{nodes}x1: begun_after_s", [timing.begun_after for timing in timings], "s")


def measure_simulated(sizes: Sequence[int], rounds: int, report: Report) -> None:
    """Each size once a round, in turns; the least beside the others."""
    results: dict[int, list[SimulatedResult]] = {size: [] for size in sizes}
    for number in range(rounds):
        for size in sizes if number % 2 else reversed(sizes):
            met = simulate(size)
            say(f"{size} simulated nodes: {met.wall_s:.2f} s, node 0 computed {met.node0_cpu_ms:.0f} ms")
            results[size].append(met)
    units = {"wall_s": "s", "node0_cpu_ms": "ms", "alone_cpu_ms": "ms", "other_cpu_ms": "ms"}
    names = [*units, "node0_sent", "other_sent", "connections"]
    values = {
        size: {name: [getattr(met, name) for met in several] for name in names} for size, several in results.items()
    }
    for size in sizes:
        for name in names:
            report.figure(f"{size} simulated: {name}", values[size][name], units.get(name, ""))
    least, *more = sizes
    for name in names:
        for size in more:
            report.ratio(f"{name}: {size}/{least}", values[size][name], values[least][name])
    if more:
        _grow(least, more[-1], values, report)
    _estimate(values, report)
    if warnings := [warning for several in results.values() for met in several for warning in met.warnings]:
        report.notes.append(f"{len(warnings)} findings of simulated nodes were no pass, as {warnings[0]}")
    report.notes.append("what simulated nodes measure of themselves is made up; their probes are given 60 s")
    report.notes.append("aim: what nodes but node 0 do, and connections, grow no faster than log(nodes) from 16 on")


def _grow(least: int, most: int, values: dict[int, dict[str, list[float]]], report: Report) -> None:
    """Node 0's work for each node more; and whether any node connects to more others than it should."""
    pairs = zip(values[most]["node0_cpu_ms"], values[least]["node0_cpu_ms"], strict=True)
    report.figure("simulated: node0_cpu_ms_a_node", [(high - low) / (most - least) for high, low in pairs], "ms")
    connections = {size: max(values[size]["connections"]) for size in (least, most)}
    allowed = math.log(most) / math.log(least)
    if least >= ALL_PAIRS and connections[most] > allowed * connections[least]:
        report.failures.append(
            f"with {most} nodes one connects {connections[most]} times, with {least} {connections[least]}"
        )


def _estimate(values: dict[int, dict[str, list[float]]], report: Report) -> None:
    """What a cluster with a node for each agent would take: what few nodes take, and what the two ends compute."""
    name = f"{FIXED}x1: suite_s"
    if name not in report.figures:
        return
    fixed = report.figures[name].median
    for size, measured in values.items():
        computed = zip(measured["node0_cpu_ms"], measured["alone_cpu_ms"], strict=True)
        report.figure(f"{size} estimated: suite_s", [fixed + sum(pair) / 1e3 for pair in computed], "s")
    report.notes.append(f"estimated: what {FIXED} real nodes take ({fixed:.2f} s), node 0's CPU and another node's")
