"""Faults of all kinds that rain on one run: it completes, with the weights of one that nothing disturbs."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time

from helpers.cluster import Cluster, ClusterSite
from helpers.cluster_runs import (
    PARAMS,
    SPOT,
    STEPS,
    TWO,
    digests,
    events,
    pid_of,
    preempt,
    watching,
)
from helpers.rare import rare
from helpers.site import PATIENCE_S, seldom, until

# For how long faults rain: longer by hand.
CHAOS_S = float(os.environ.get("TEST_CHAOS_S", "30"))


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
            saved, over = len(events(self.site, self.run_id, "saved")), seldom(self.over)
            # That a young batch job is missing on its node Slurm notices after more than a minute.
            until(
                lambda saved=saved, over=over: len(events(self.site, self.run_id, "saved")) > saved or over(),
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
        over = seldom(self.over)
        preempt(self.cluster, lambda: len(events(self.site, self.run_id, "end")) > before or over())

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


@rare
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
        ended = seldom(lambda: site.status(run_id)["state"] in over)
        until(ended, f"the end of the run after {faults}", patience_s=patience_s)
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
