"""Two-node runs on the cluster that train for a while: their journals, and ways to interrupt them."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from typing import Any

from helpers.cluster import NODES, Cluster, ClusterSite
from helpers.site import PATIENCE_S, until

STEPS = int(os.environ.get("TEST_STEPS", "200"))
PARAMS = {"steps": STEPS, "step_ms": 50}
TWO = {"nodes": 2, "procs_per_node": 1, "time": "00:10:00"}
SPOT = {"partition": "spot"}


def events(site: ClusterSite, run_id: str, *kinds: str) -> list[dict[str, Any]]:
    """Events of these kinds from the agents' and ranks' journals, in order of time."""
    parsed = []
    for path in (site.runs / run_id).glob("attempts/*/*.jsonl"):
        if path.name != "metrics.jsonl":
            lines = path.read_text().split("\n")[:-1]
            parsed += [{**json.loads(line), "file": path.name, "attempt": path.parent.name} for line in lines]
    return sorted((event for event in parsed if event["kind"] in kinds), key=lambda event: float(event["t"]))


def digests(site: ClusterSite, run_id: str) -> set[str]:
    """The hashes of the final weights that ranks have printed."""
    return {line.split()[1] for line in site.printed(run_id) if line.startswith("weights ")}


def preempt(cluster: Cluster, preempted: Callable[[], Any], nodes: int = NODES) -> None:
    """Let a job of higher priority take all nodes for a moment, and wait until the run is ``preempted``."""
    options = ("--partition=ondemand", "--exclusive", f"--nodes={nodes}", "--time=1", "--output=/dev/null")
    job = cluster.slurm("sbatch", "--parsable", *options, "--wrap=sleep 1").strip()
    until(preempted, "the preemption")
    until(lambda: cluster.state(job) in ("COMPLETED", "COMPLETING", ""), "the job of higher priority")


def pid_of(site: ClusterSite, run_id: str, rank: int) -> int:
    """The current process of a rank."""

    def started() -> list[dict[str, Any]]:
        return [event for event in events(site, run_id, "workers") if str(rank) in event["processes"]]

    # A rank can be faster than the journal of its agent.
    return int(until(started, f"the start of rank {rank}")[-1]["processes"][str(rank)]["pid"])


def until_trains(site: ClusterSite, run_id: str, *, starts: int) -> None:
    """Wait until the ranks of a run train after this many starts in total."""

    def trains() -> bool:
        begun = events(site, run_id, "total")
        step = max((e["step"] for e in events(site, run_id, "restored")), default=0)
        return len(begun) >= starts and site.step(run_id) > step

    until(trains, f"training of {run_id} after start {starts}")


@contextlib.contextmanager
def watching(site: ClusterSite) -> Iterator[None]:
    """Run ``slurmtrain watch`` within this context."""
    watch = site.start("watch", "--every", "10")
    try:
        yield
        assert watch.poll() is None
    finally:
        watch.terminate()
        watch.wait(PATIENCE_S)
