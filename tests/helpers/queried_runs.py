"""Runs that differ in what queries are about: parameters, metrics, states, tags, sweeps, nodes and ages."""

from __future__ import annotations

import time
from typing import Any

from helpers.simulated_run import ELSEWHERE, SimulatedRun
from slurmtrain.ops.shared.workspace import Workspace

DAY_S = 86_400.0
SWEEP = "00000000sw"


def write_run(workspace: Workspace, number: int, name: str = "cnn", **facts: Any) -> SimulatedRun:
    """A run with this number as its id, which was submitted ``days_ago``.

    ``facts``: ``params``, ``metrics``, ``state`` (completed, failed, running, pending,
    created), ``tags``, ``sweep``, ``host``,
    ``archived``, ``days_ago``, ``spec`` (further keys of its spec), ``git``, ``versions``, ``resources``, and
    ``history``: what it had logged before, a mapping of metrics for each step.
    """
    params = facts.get("params", {})
    now = time.time() - facts.get("days_ago", 1) * DAY_S
    spec = {"name": name, "params": params, **facts.get("spec", {})}
    sim = SimulatedRun(
        workspace.root.run(f"{number:010d}"), spec=spec, executor="local", job=f"local-{number}", now=now
    )
    created = {key: facts.get(key) for key in ("sweep", "git", "search")} | {"resources": facts.get("resources", {})}
    sim.created(name=name, params=params, command="python x.py", **created)
    if tags := facts.get("tags"):
        sim.command("tags", add=tags)
    if facts.get("archived"):
        sim.command("archived", archived=True)
    state = facts.get("state", "completed")
    if state == "created":
        return sim
    sim.submitted(process=ELSEWHERE)
    if state == "pending":
        return sim
    sim.started(host=facts.get("host", "n1"))
    if versions := facts.get("versions"):
        sim.node("preflight", findings=[{"check": "versions", "status": "pass", "summary": "", "evidence": versions}])
    for step, logged in enumerate(facts.get("history", ()), 1):
        sim.reached(step, **logged)
    if metrics := facts.get("metrics"):
        sim.reached(100, **metrics)
    return sim if state == "running" else sim.ended({"completed": "completed", "failed": "oom"}[state])


def write_sweep(workspace: Workspace) -> None:
    """Six runs of a sweep over ``lr`` and ``seed``, whose accuracy is best for 0.1; the last one still runs."""
    for number, (lr, seed) in enumerate(((lr, seed) for lr in (0.01, 0.1, 1.0) for seed in (0, 1)), 1):
        write_run(
            workspace,
            number,
            params={"lr": lr, "seed": seed, "epochs": 10},
            metrics={"acc": {0.01: 0.5, 0.1: 0.9, 1.0: 0.7}[lr] + seed / 100, "loss": lr},
            state="running" if number == 6 else "completed",
            sweep=SWEEP,
            days_ago=7 - number,
        )
