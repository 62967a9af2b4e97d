"""Asking Slurm about nodes and jobs, and taking nodes from a job."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from .accounting import ACCOUNT
from .cluster import Cluster
from .processes import ClusterError, Daemon, WrongInput, run, wait_until

RUN_ID = re.compile(r"[0-9a-hjkmnp-tv-z]{10}")


class Job(NamedTuple):
    """A job as squeue lists it."""

    id: str
    state: str
    partition: str
    nodes: str
    name: str

    def is_meant_by(self, text: str) -> bool:
        """Whether a person may call it that: by its id, or as the job of a run, which is called <name>-<run id>."""
        own_name, _, run_id = self.name.rpartition("-")
        of_run = RUN_ID.fullmatch(run_id) is not None and (text == own_name or run_id.startswith(text))
        # A few digits are a job's id.
        of_run = of_run and (not text.isdecimal() or text == run_id)
        return of_run or text in (self.id, self.id.partition("_")[0], self.name)


@dataclass(frozen=True)
class Node:
    """A node as the controller knows it."""

    state: str
    slurmd_start: str

    @property
    def is_lost(self) -> bool:
        """Whether it does not answer."""
        return self.state.endswith("*") or "not_responding" in self.state

    @property
    def is_usable(self) -> bool:
        """Whether it answers and Slurm has not given it up; a person may have drained it."""
        return not self.is_lost and not self.state.startswith(("down", "unknown", "error", "fail"))


MISSING = Node("unknown", "None")


def nodes(cluster: Cluster) -> dict[str, Node]:
    """All nodes; none where the controller does not answer."""
    output = _ask(cluster, "scontrol", "-o", "show", "node") or ""
    facts = [dict(re.findall(r"(\w+)=(\S*)", line)) for line in output.splitlines()]
    return {fact["NodeName"]: Node(fact["State"].lower(), fact["SlurmdStartTime"]) for fact in facts if "State" in fact}


def wait_for_nodes(
    cluster: Cluster, names: list[str], timeout: float, started: Mapping[str, Node], watched: Mapping[Path, Daemon]
) -> None:
    """Wait until Slurm can use all these nodes; ``started`` is what the controller knew of those just started."""

    def lacking() -> str:
        current = nodes(cluster)
        states = {name: current.get(name, MISSING) for name in names}
        waiting = {name: node for name, node in states.items() if not _is_ready(node, started.get(name))}
        for name, node in waiting.items():
            # It answers, but Slurm had given it up.
            if node.state.startswith("down") and not node.is_lost:
                resume(cluster, name)
        listed = ", ".join(f"{name}, which is {node.state}" for name, node in waiting.items())
        return f"{listed} (a firewall of this machine must accept what comes from 10.57.0.0/16)" if listed else ""

    wait_until(lacking, timeout, watched)


def _is_ready(node: Node, before: Node | None) -> bool:
    """One that was started must have registered since: the controller may not have noticed yet that it was gone."""
    return node.is_usable and (before is None or node.slurmd_start not in ("None", before.slurmd_start))


def resume(cluster: Cluster, node: str) -> None:
    """Tell Slurm to use a node again."""
    run(["scontrol", "update", f"nodename={node}", "state=resume"], environment=cluster.environment, check=False)


def jobs(cluster: Cluster) -> list[Job]:
    """All jobs that wait or run. The name comes last, since it may hold anything."""
    listed = _ask(cluster, "squeue", "-h", "-a", "-o", "%i|%T|%P|%N|%j")
    if listed is None:
        raise ClusterError(f"Slurm does not answer; 'scripts/cluster up --name {cluster.name}' starts what is missing")
    return [Job(*fields) for line in listed.splitlines() if len(fields := line.split("|", 4)) == 5]


def find_running(cluster: Cluster, text: str) -> Job:
    """The one running job that is meant: by its id, or as the job of a run."""
    listed = jobs(cluster)
    running = [job for job in listed if job.state == "RUNNING" and job.is_meant_by(text)]
    if len(running) == 1:
        return running[0]
    if running:
        raise WrongInput(f"'{text}' can mean several jobs: {', '.join(f'{job.id} ({job.name})' for job in running)}")
    names = ", ".join(f"{job.id} ({job.name}), {job.state}" for job in listed) or "none"
    raise WrongInput(f"'{text}' is no job and no run that is running; there are {names}")


def preempt(cluster: Cluster, job: Job, seconds: int) -> str:
    """Submit a job of higher rank onto exactly the job's nodes; returns its id once the job has to go."""
    if job.partition == "ondemand":
        raise WrongInput(f"job {job.id} is in the partition ondemand, which nothing preempts")
    before = _job_facts(cluster, job.id)
    if before.get("PreemptTime", "None") != "None":
        raise WrongInput(f"job {job.id} ({job.name}) is being preempted already")
    options = {
        "partition": "ondemand",
        "account": ACCOUNT,
        "job-name": "preempt",
        "nodes": before.get("NumNodes", "1"),
        "nodelist": job.nodes,
        "time": str(seconds // 60 + 2),
        "chdir": "/",
        "output": "/dev/null",
        "wrap": f"sleep {seconds}",
    }
    arguments = [f"--{key}={value}" for key, value in options.items()]
    submitted = run(["sbatch", "--parsable", "--exclusive", *arguments], environment=cluster.environment)
    other = submitted.stdout.strip()

    def lacking() -> str:
        now = _job_facts(cluster, job.id)
        # It has begun, or was over before we looked.
        gone = now != {} and any(now.get(key) != before.get(key) for key in ("JobState", "PreemptTime", "Restarts"))
        return "" if gone else f"the preemption of job {job.id}"

    try:
        wait_until(lacking, 90)
    except ClusterError:
        run(["scancel", other], environment=cluster.environment, check=False)
        raise
    return other


def _job_facts(cluster: Cluster, job: str) -> dict[str, str]:
    output = _ask(cluster, "scontrol", "-o", "show", "job", job)
    return dict(re.findall(r"(\w+)=(\S*)", output or ""))


def _ask(cluster: Cluster, *arguments: str) -> str | None:
    """What one of Slurm's programs prints; None where Slurm does not answer."""
    try:
        return run(arguments, environment=cluster.environment, timeout=15).stdout
    except ClusterError:
        return None
