"""Runs that Slurm, nodes and faults interrupt on a real cluster, and that go on by themselves."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from helpers.cluster import NODES, Cluster, ClusterSite
from helpers.site import PATIENCE_S, until

STEPS = int(os.environ.get("TEST_STEPS", "200"))
PARAMS = {"steps": STEPS, "step_ms": 50}
TWO = {"nodes": 2, "procs_per_node": 1, "time": "00:10:00"}
SPOT = {"partition": "spot"}
# From an interruption to the end: Slurm notices, the run starts again, and trains on, all of it on a busy machine.
TO_THE_END_S = 2 * PATIENCE_S
# How long the runs are, how often one is preempted, and for how long faults rain on one: more of it by hand.
PREEMPTIONS = int(os.environ.get("TEST_PREEMPTIONS", "1"))
CHAOS_S = float(os.environ.get("TEST_CHAOS_S", "30"))


def events(site: ClusterSite, run_id: str, *kinds: str) -> list[dict[str, Any]]:
    """What the agents and ranks have journaled of these kinds, in the order of time."""
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
    """Have a job of higher priority take all nodes that there are for a moment, and wait until it is ``preempted``."""
    options = ("--partition=ondemand", "--exclusive", f"--nodes={nodes}", "--time=1", "--output=/dev/null")
    job = cluster.slurm("sbatch", "--parsable", *options, "--wrap=sleep 1").strip()
    until(preempted, "the preemption")
    until(lambda: cluster.state(job) in ("COMPLETED", "COMPLETING", ""), "the job of higher priority")


def pid_of(site: ClusterSite, run_id: str, rank: int) -> int:
    """The process that is a rank now."""
    started = [event for event in events(site, run_id, "workers") if str(rank) in event["processes"]]
    return int(started[-1]["processes"][str(rank)]["pid"])


def until_trains(site: ClusterSite, run_id: str, *, starts: int) -> None:
    """Wait until the ranks of a run train, having been started so many times in all."""

    def trains() -> bool:
        begun = events(site, run_id, "total")
        step = max((e["step"] for e in events(site, run_id, "restored")), default=0)
        return len(begun) >= starts and site.step(run_id) > step

    until(trains, f"training of {run_id} after start {starts}")


@pytest.fixture(scope="module")
def undisturbed(shared_site: ClusterSite) -> str:
    """The hash of the weights that a run ends with which nothing disturbs."""
    spec = shared_site.light("undisturbed", params={**PARAMS, "step_ms": 0}, resources=TWO)
    run_id = shared_site.submit(spec, "--wait")
    [digest] = digests(shared_site, run_id)
    return digest


def test_preemptions_lose_no_step_and_each_is_requeued_within_its_grace(
    site: ClusterSite, cluster: Cluster, undisturbed: str
) -> None:
    run_id = site.submit(site.light(params=PARAMS, resources=TWO, slurm=SPOT, tracking={}))
    for number in range(1, PREEMPTIONS + 1):
        until_trains(site, run_id, starts=number)
        site.until_step(run_id, site.step(run_id) + random.Random(number).randrange(20))
        preempt(cluster, lambda number=number: len(events(site, run_id, "requeue")) >= number)
    until(lambda: site.status(run_id)["state"] == "completed", "the end of the run", patience_s=TO_THE_END_S)
    site.call("sync")
    run = site.show(run_id)
    assert (run["step"], run["lost_steps"]) == (STEPS, 0)
    assert [attempt["cause"] for attempt in run["attempts"]] == ["preempted"] * PREEMPTIONS + ["completed"]
    assert {attempt["job_id"] for attempt in run["attempts"]} == {run["job_id"]}
    firsts = [attempt["first_step"] for attempt in run["attempts"]]
    assert firsts[1:] == [attempt["last_step"] for attempt in run["attempts"][:-1]]
    assert digests(site, run_id) == {undisturbed}
    assert len(list((site.runs / run_id / "claims").glob("*.agent.json"))) == PREEMPTIONS
    for stopping, put in zip(events(site, run_id, "stopping")[::2], events(site, run_id, "requeue"), strict=False):
        assert put["cause"] == "preempted"
        assert put["t"] - stopping["t"] < 30
    assert run["mlflow_run_id"]


def test_a_rank_that_is_killed_and_one_that_is_stopped_are_started_again_in_place(
    site: ClusterSite, cluster: Cluster, undisturbed: str
) -> None:
    spec = site.light(
        params=PARAMS, resources=TWO, checkpoint={"every": {"steps": 20}}, requeue={"hang_after": 3, "backoff_s": 1}
    )
    run_id = site.submit(spec)
    until_trains(site, run_id, starts=1)
    until(lambda: events(site, run_id, "saved"), "a checkpoint")
    os.kill(pid_of(site, run_id, 1), signal.SIGKILL)
    until_trains(site, run_id, starts=2)
    until(lambda: len(events(site, run_id, "saved")) > 2, "more checkpoints")
    os.kill(pid_of(site, run_id, 1), signal.SIGSTOP)
    until(lambda: site.status(run_id)["state"] == "completed", "the end of the run", patience_s=TO_THE_END_S)
    run = site.show(run_id)
    [attempt] = run["attempts"]
    assert [restart["cause"] for restart in attempt["restarts"]] == ["crash", "hang"]
    assert "rank 1" in attempt["restarts"][1]["why"]
    assert "stopped" in attempt["restarts"][1]["why"]
    assert (run["step"], digests(site, run_id)) == (STEPS, {undisturbed})
    assert 0 < run["lost_steps"] < STEPS
    assert not cluster.jobs()


def test_a_run_with_a_spare_goes_on_when_a_node_dies(site: ClusterSite, cluster: Cluster, undisturbed: str) -> None:
    spec = site.light(params=PARAMS, resources={**TWO, "spares": 1}, checkpoint={"every": {"steps": 20}})
    run_id = site.submit(spec)
    until_trains(site, run_id, starts=1)
    until(lambda: events(site, run_id, "saved"), "a checkpoint")
    host = next(e["host"] for e in events(site, run_id, "agent") if e["node"] == 1)
    node = int(host.removeprefix("node"))
    cluster.script("kill-node", str(node))
    try:
        until(lambda: site.status(run_id)["state"] == "completed", "the end of the run", patience_s=TO_THE_END_S)
    finally:
        cluster.script("start-node", str(node))
    run = site.show(run_id)
    [attempt] = run["attempts"]
    [restart] = attempt["restarts"]
    assert (restart["cause"], restart["members"], restart["lost"]) == ("node_fail", [0, 2], [1])
    assert host in restart["why"]
    assert (run["step"], digests(site, run_id)) == (STEPS, {undisturbed})


def test_a_run_that_may_do_with_fewer_nodes_shrinks_when_one_dies_and_its_next_attempt_has_as_many_again(
    site: ClusterSite, cluster: Cluster
) -> None:
    steps = 4 * STEPS
    spec = site.light(
        params={**PARAMS, "steps": steps},
        resources={**TWO, "nodes": {"min": 1, "max": 2}},
        slurm=SPOT,
        checkpoint={"every": {"steps": 20}},
    )
    run_id = site.submit(spec)
    until_trains(site, run_id, starts=1)
    until(lambda: events(site, run_id, "saved"), "a checkpoint")
    host = next(e["host"] for e in events(site, run_id, "agent") if e["node"] == 1)
    node = host.removeprefix("node")
    # Not before the end it comes back: srun aborts a step that is missing on a node that has come back.
    cluster.script("kill-node", node)
    try:
        until_trains(site, run_id, starts=2)
        # Until Slurm has given it up, a job that was put back still ends there, while its next start begins.
        until(lambda: "down" in cluster.slurm("sinfo", "--noheader", f"--nodes={host}", "--format=%T"), "a dead node")
        preempt(cluster, lambda: events(site, run_id, "requeue"), NODES - 1)
        until(lambda: site.status(run_id)["state"] == "completed", "the end of the run", patience_s=TO_THE_END_S)
    finally:
        cluster.script("start-node", node)
    run = site.show(run_id)
    first, second = run["attempts"]
    [restart] = first["restarts"]
    assert (restart["cause"], restart["members"], restart["lost"]) == ("node_fail", [0], [1])
    assert (first["cause"], first["job_id"]) == ("preempted", second["job_id"])
    assert second["first_step"] == first["last_step"]
    assert [event["world_size"] for event in events(site, run_id, "session")] == [2, 1, 2]
    assert (run["step"], len(second["nodes"])) == (steps, 2)


def test_a_run_that_a_person_cancels_in_slurm_never_comes_back(site: ClusterSite, cluster: Cluster) -> None:
    run_id = site.submit(site.light(params=PARAMS, resources=TWO, slurm=SPOT))
    job = site.job(run_id)
    until_trains(site, run_id, starts=1)
    cluster.slurm("scancel", job)
    run = site.until_state(run_id, "cancelled")
    site.call("sync")
    site.call("watch", "--once")
    # Even Slurm's own way of starting it again finds that it is over.
    cluster.slurm("scontrol", "requeue", job, check=False)
    until(lambda: not cluster.jobs(), "the end of the job")
    site.call("sync")
    again = site.show(run_id)
    assert (again["state"], again["attempt"], again["step"]) == ("cancelled", 1, run["step"])
    assert len(again["attempts"]) == 1


def test_a_run_whose_job_may_not_be_put_back_is_submitted_again_by_the_watch(
    site: ClusterSite, cluster: Cluster, undisturbed: str
) -> None:
    run_id = site.submit(site.light(params=PARAMS, resources=TWO, slurm=SPOT))
    job = site.job(run_id)
    cluster.slurm("scontrol", "update", f"JobId={job}", "Requeue=0")
    with watching(site):
        until_trains(site, run_id, starts=1)
        preempt(cluster, lambda: events(site, run_id, "requeue_failed") or site.job(run_id) != job)
        until(lambda: site.job(run_id) != job, "another job")
        until(lambda: site.status(run_id)["state"] == "completed", "the end of the run", patience_s=TO_THE_END_S)
    run = site.show(run_id)
    assert [attempt["cause"] for attempt in run["attempts"]] == ["preempted", "completed"]
    assert (run["lost_steps"], digests(site, run_id)) == (0, {undisturbed})
    names = cluster.slurm(
        "sacct", "--noheader", "--allocations", "--format=JobName%60", "--starttime=now-1hour", "--parsable2"
    )
    assert sum(name.endswith(run_id) for name in names.split()) == 2


@contextlib.contextmanager
def watching(site: ClusterSite) -> Iterator[None]:
    """``slurmtrain watch`` runs meanwhile."""
    watch = site.start("watch", "--every", "10")
    try:
        yield
        assert watch.poll() is None
    finally:
        watch.terminate()
        watch.wait(PATIENCE_S)


class Chaos:
    """Faults of all kinds for one run, one after the other, each once the run trains and has saved since the last."""

    def __init__(self, site: ClusterSite, cluster: Cluster, run_id: str, seed: int) -> None:
        self.site = site
        self.cluster = cluster
        self.run_id = run_id
        self.random = random.Random(seed)
        self.faults = {
            "preempt": self.preempt,
            "kill a rank": lambda: self.signal_rank(signal.SIGKILL),
            "stop a rank": lambda: self.signal_rank(signal.SIGSTOP),
            "kill an agent": self.kill_agent,
            "kill all of a node's processes": self.kill_all,
            "kill a node": self.kill_node,
        }

    def rain(self, seconds: float) -> list[str]:
        """Do so for this long; returns what was done."""
        inflicted: list[str] = []
        kinds = list(self.faults)
        self.random.shuffle(kinds)
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not self.over():
            saved = len(events(self.site, self.run_id, "saved"))
            # That a young batch job is missing on its node Slurm notices after more than a minute.
            until(
                lambda saved=saved: self.over() or len(events(self.site, self.run_id, "saved")) > saved,
                f"a checkpoint after {inflicted}",
                patience_s=2 * PATIENCE_S,
            )
            if not self.over():
                kind = kinds[len(inflicted) % len(kinds)]
                self.faults[kind]()
                inflicted.append(kind)
        return inflicted

    def over(self) -> bool:
        return bool(self.site.status(self.run_id)["state"] in ("completed", "failed", "cancelled", "lost"))

    def node(self) -> int:
        """A node of the newest attempt."""
        agents = events(self.site, self.run_id, "agent")
        hosts = [event["host"] for event in agents if event["attempt"] == agents[-1]["attempt"]]
        return int(self.random.choice(hosts).removeprefix("node"))

    def preempt(self) -> None:
        before = len(events(self.site, self.run_id, "end"))
        preempt(self.cluster, lambda: self.over() or len(events(self.site, self.run_id, "end")) > before)

    def signal_rank(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid_of(self.site, self.run_id, self.random.randrange(2)), number)

    def kill_agent(self) -> None:
        agents = events(self.site, self.run_id, "agent")
        chosen = self.random.choice([event for event in agents if event["attempt"] == agents[-1]["attempt"]])
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(chosen["process"]["pid"]), signal.SIGKILL)

    def kill_all(self) -> None:
        self.cluster.kill_all_of(self.site.person.uid, self.node())

    def kill_node(self) -> None:
        node = str(self.node())
        self.cluster.script("kill-node", node)
        self.cluster.script("start-node", node)


def test_a_run_on_which_faults_rain_completes_with_the_right_weights(
    site: ClusterSite, cluster: Cluster, undisturbed: str
) -> None:
    patient = {"max_failures": 50, "max_node_failures": 50, "restarts_in_place": 2, "backoff_s": 0, "hang_after": 3}
    run_id = site.submit(
        site.light(params=PARAMS, resources=TWO, slurm=SPOT, checkpoint={"every": {"steps": 10}}, requeue=patient)
    )
    with watching(site):
        seed = int(os.environ.get("TEST_CHAOS_SEED", "1"))
        faults = Chaos(site, cluster, run_id, seed).rain(CHAOS_S)
        over = ("completed", "failed", "lost")
        patience_s = 2 * PATIENCE_S + STEPS * PARAMS["step_ms"] / 1000
        until(lambda: site.status(run_id)["state"] in over, f"the end of the run after {faults}", patience_s=patience_s)
    run = site.show(run_id)
    attempts = [(attempt["cause"], attempt["reason"]) for attempt in run["attempts"]]
    assert (run["state"], run["step"]) == ("completed", STEPS), (faults, attempts)
    assert digests(site, run_id) == {undisturbed}
    assert not cluster.jobs()
    jobs = cluster.slurm(
        "sacct", "--noheader", "--allocations", "--format=JobID,JobName%60", "--parsable2", "--allusers"
    )
    own = {line.split("|")[0] for line in jobs.splitlines() if line.endswith(run_id)}
    assert own == {attempt["job_id"] for attempt in run["attempts"]}
