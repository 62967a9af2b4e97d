"""Asking Slurm about nodes and jobs, and taking nodes from a job."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from .accounting import ACCOUNT
from .cluster import Cluster
from .errors import ClusterError, WrongInput
from .processes import Daemon, run, wait_until

RUN_ID = re.compile(r"[0-9a-hjkmnp-tv-z]{10}")


@dataclass(frozen=True)
class Job:
    """A job as squeue lists it."""

    id: str
    state: str
    partition: str
    nodes: str
    name: str

    @property
    def array(self) -> str:
        """The id of the whole array, of which the job may be a task."""
        return self.id.partition("_")[0]

    @property
    def run_id(self) -> str:
        """Of a run of slurmtrain, whose jobs are called <name>-<run id>; else empty."""
        last = self.name.rpartition("-")[2]
        return last if RUN_ID.fullmatch(last) else ""

    def is_meant_by(self, text: str) -> bool:
        """Whether a person may call it that."""
        own_name = self.name.removesuffix(f"-{self.run_id}") if self.run_id else self.name
        return text in (self.name, own_name) or (self.run_id != "" and self.run_id.startswith(text))


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
        return ", ".join(f"{name}, which is {node.state}" for name, node in waiting.items())

    wait_until(lacking, timeout, watched)


def _is_ready(node: Node, before: Node | None) -> bool:
    """One that was started must have registered since: the controller may not have noticed yet that it was gone."""
    return node.is_usable and (before is None or node.slurmd_start not in ("None", before.slurmd_start))


def resume(cluster: Cluster, node: str) -> None:
    """Tell Slurm to use a node again."""
    run(["scontrol", "update", f"nodename={node}", "state=resume"], environment=cluster.environment, check=False)


def job_counts(cluster: Cluster) -> dict[str, int]:
    """How many jobs are in each state."""
    return dict(Counter(job.state for job in jobs(cluster)))


def jobs(cluster: Cluster) -> list[Job]:
    """All jobs that wait or run. The name comes last, since it may hold anything."""
    listed = _ask(cluster, "squeue", "-h", "-a", "-o", "%i|%T|%P|%N|%j")
    if listed is None:
        raise ClusterError(f"Slurm does not answer; 'scripts/cluster up --name {cluster.name}' starts what is missing")
    return [Job(*fields) for line in listed.splitlines() if len(fields := line.split("|", 4)) == 5]


def find_running(cluster: Cluster, text: str) -> Job:
    """The one running job that is meant: by its id, or as the job of a run."""
    listed = jobs(cluster)
    by_id = re.fullmatch(r"\d+(_\d+)?", text) is not None and not RUN_ID.fullmatch(text)
    meant = [job for job in listed if (text in (job.id, job.array) if by_id else job.is_meant_by(text))]
    running = [job for job in meant if job.state == "RUNNING"]
    if len(running) == 1:
        return running[0]
    if running:
        raise WrongInput(f"'{text}' can mean several jobs: {', '.join(f'{job.id} ({job.name})' for job in running)}")
    if meant:
        job = meant[0]
        raise WrongInput(f"job {job.id} ({job.name}) is {job.state}: only a running job has nodes to lose")
    names = ", ".join(f"{job.id} ({job.name})" for job in listed if job.state == "RUNNING") or "none"
    raise WrongInput(f"'{text}' is no job and no run that is running; running: {names}")


def preempt(cluster: Cluster, job: Job, seconds: int) -> str:
    """Submit a job of higher rank onto exactly the job's nodes; returns its id once the job has to go."""
    if job.partition == "ondemand":
        raise WrongInput(f"job {job.id} is in the partition ondemand, which nothing preempts")
    before = _job_facts(cluster, job.id)
    if before.get("PreemptTime", "None") != "None":
        raise WrongInput(f"job {job.id} ({job.name}) is being preempted already")
    count = before.get("NumNodes", "1")
    options = {
        "partition": "ondemand",
        "account": ACCOUNT,
        "job-name": "preempt",
        "nodes": count,
        "nodelist": job.nodes,
        "time": str(seconds // 60 + 2),
        "chdir": "/",
        "output": "/dev/null",
        "wrap": f"sleep {seconds}",
    }
    arguments = [f"--{key}={value}" for key, value in options.items()]
    submitted = run(["sbatch", "--parsable", "--exclusive", *arguments], environment=cluster.environment)
    other = submitted.stdout.strip()
    try:
        wait_until(
            lambda: "" if _has_to_go(before, _job_facts(cluster, job.id)) else f"the preemption of job {job.id}", 90
        )
    except ClusterError:
        run(["scancel", other], environment=cluster.environment, check=False)
        raise
    return other


def _has_to_go(before: dict[str, str], now: dict[str, str]) -> bool:
    """Whether the preemption has begun, or was over before we looked."""
    return now != {} and any(now.get(key) != before.get(key) for key in ("JobState", "PreemptTime", "Restarts"))


def _job_facts(cluster: Cluster, job: str) -> dict[str, str]:
    output = _ask(cluster, "scontrol", "-o", "show", "job", job)
    return dict(re.findall(r"(\w+)=(\S*)", output or ""))


def _ask(cluster: Cluster, *arguments: str) -> str | None:
    """What one of Slurm's programs prints; None where Slurm does not answer."""
    try:
        return run(arguments, environment=cluster.environment, timeout=15).stdout
    except ClusterError:
        return None
