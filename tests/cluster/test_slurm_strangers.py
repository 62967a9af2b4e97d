"""A stranger on the network of a real cluster, who is no part of a run: nothing that he does changes how it goes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers import stranger
from helpers.cluster import Cluster, ClusterSite
from helpers.cluster_runs import TWO, events, until_trains
from helpers.site import PATIENCE_S

SECONDS = int(os.environ.get("TEST_STRANGER_S", "8"))
CONNECTIONS = 5000
STEP_MS = 50
# Long enough that the run is still training when the stranger gives up.
STEPS = 1000 * (SECONDS + 20) // STEP_MS
# A node that has no part in the run.
STRANGER = 3
# The ports that the kernel gives away, ip_local_port_range.
EPHEMERAL = range(32768, 61000)


class Stranger:
    """A process in the network namespace of a node that has no part in the run."""

    def __init__(self, cluster: Cluster, node: int) -> None:
        self._argv = ["ip", "netns", "exec", cluster.namespace(node), sys.executable, stranger.__file__]

    def recording(self, path: Path) -> subprocess.Popen[str]:
        argv = [*self._argv, "record", str(path)]
        process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        assert process.stdout.readline() == "recording\n"
        return process

    def attack(self, **plan: Any) -> dict[str, int]:
        argv = [*self._argv, "attack"]
        ended = subprocess.run(
            argv, input=json.dumps(plan), capture_output=True, text=True, timeout=SECONDS + PATIENCE_S, check=True
        )
        counts: dict[str, int] = json.loads(ended.stdout.splitlines()[-1])
        return counts


def listening(cluster: Cluster, node: int, uid: int) -> list[tuple[str, int]]:
    """The addresses in the fast network and ports at which a user's processes listen on a node."""
    fast = next(
        words[2].partition("/")[0]
        for line in cluster.inside(node, "ip", "-4", "-br", "addr").splitlines()
        if (words := line.split())[2:] and words[2].startswith("10.58.")
    )
    targets = set()
    for table in ("tcp", "tcp6"):
        for line in cluster.inside(node, "cat", f"/proc/net/{table}").splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and int(words[7]) == uid:
                targets.add((fast, int(words[1].rpartition(":")[2], 16)))
    return sorted(targets)


@pytest.mark.slow
def test_a_stranger_who_sends_garbage_replays_greetings_writes_to_stores_and_holds_connections_changes_nothing(
    site: ClusterSite, cluster: Cluster
) -> None:
    recorder = Stranger(cluster, 0).recording(site.path / "recorded.json")
    spec = site.light(
        params={"steps": STEPS, "step_ms": STEP_MS},
        resources=TWO,
        slurm={"nodelist": "node0,node1"},
        checkpoint={"every": {"steps": 100}},
    )
    run_id = site.submit(spec)
    until_trains(site, run_id, starts=1)
    recorder.communicate(timeout=PATIENCE_S)
    [ready] = [event for event in events(site, run_id, "rendezvous") if event["node"] == 0]
    targets = [target for node in (0, 1) for target in listening(cluster, node, site.person.uid)]
    master = (ready["master_addr"], ready["master_port"])
    assert master in targets
    recordings = json.loads((site.path / "recorded.json").read_text())
    recorded = [data for port, data in recordings if (master[0], port) in targets]
    # Those that slurmtrain chose: the agents' and that of the ranks' store. The kernel chose those of gloo.
    chosen = [target for target in targets if target[0] == master[0] and target[1] not in EPHEMERAL]
    assert len(chosen) == 2
    counts = Stranger(cluster, STRANGER).attack(
        targets=targets, flooded=chosen, seconds=SECONDS, idle=CONNECTIONS, recorded=recorded
    )
    assert min(counts.values()) > 0
    assert counts["idle"] > CONNECTIONS / 2
    site.until_state(run_id, "completed", "failed", "requeued", "lost", patience_s=2 * PATIENCE_S)
    run = site.show(run_id)
    assert (run["state"], run["step"], run["lost_steps"]) == ("completed", STEPS, 0), run["reason"]
    [attempt] = run["attempts"]
    assert attempt["restarts"] == []
    [refused] = [event for event in events(site, run_id, "refused") if event["node"] == 0]
    [address] = cluster.inside(STRANGER, "ip", "-4", "-br", "addr").split("10.58.")[1:]
    # The most frequent address is the first. Nodes of the run may follow, which have reached node 0 over two networks
    # at once, and given one connection up.
    assert refused["addresses"][0] == f"10.58.{address.partition('/')[0]}"
    assert refused["count"] > 0
    logs = [path for path in (site.runs / run_id).rglob("*") if path.suffix in (".err", ".out", ".log")]
    printed = "".join(path.read_text(errors="replace") for path in logs)
    assert f"refused a connection from {refused['addresses'][0]}" in printed
