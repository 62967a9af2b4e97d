"""Why a run waits, or is as it is: each of Slurm's reasons made for real, and answered by one ``why``."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from helpers.cluster import USER, Cluster, ClusterSite
from helpers.cluster_runs import SPOT, preempt
from helpers.rare import rare
from helpers.site import ONE_PROCESS, seldom, until

EXCLUSIVE: dict[str, Any] = {**SPOT, "exclusive": True}


def submit(site: ClusterSite, name: str, nodes: int = 1, **slurm: Any) -> str:
    """Submit a run that does nothing for a long time."""
    keys = {"resources": {**ONE_PROCESS, "nodes": nodes}, "slurm": {**EXCLUSIVE, **slurm}}
    return site.submit(site.commanding("sleep 600", name, **keys))


def explained(site: ClusterSite, run_id: str, words: str) -> list[str]:
    """What ``why`` prints, once its first line has these words: Slurm looks at jobs one after the other."""

    def lines() -> list[str]:
        printed = site.call("why", run_id).stdout.splitlines()
        return printed if words in printed[0] else []

    return [*until(seldom(lines), f"{words} of {run_id}")]


@pytest.fixture
def busy(site: ClusterSite) -> str:
    """A run that has two of the four nodes for itself."""
    run_id = submit(site, "busy", 2)
    site.until_state(run_id, "running")
    return run_id


def test_waiting_runs_say_why_and_what_would_start_sooner(site: ClusterSite, busy: str) -> None:
    first = submit(site, "first", 3)
    lines = explained(site, first, "(Resources); estimated start")
    assert re.fullmatch(
        r"it waits: the nodes that it needs are busy \(Resources\); estimated start today \d\d:\d\d", lines[0]
    )
    assert "  no other job waits before it for the same nodes" in lines
    job = site.job(busy)
    assert [line for line in lines if "would start" in line] == [
        "  -> on 2 nodes it would start now",
        f"  -> in partition ondemand it would start now, preempting job {job} (busy-{busy})",
    ]
    assert any(line.endswith(f"then `slurmtrain resume --from-start {first} resources.nodes=2`") for line in lines)
    behind = submit(site, "behind", 4)
    lines = explained(site, behind, "Priority")
    assert lines[0].startswith("it waits: jobs of higher priority are before it (Priority)")
    assert "  1 other job waits before it for the same nodes" in lines
    # In its own partition it would still be behind the other one.
    assert [line.split(" it would")[0] for line in lines if "would start" in line] == ["  -> in partition ondemand"]
    held = submit(site, "held", hold=True)
    after = site.submit(site.commanding("true", "after", after="held", slurm=SPOT))
    answer = site.json("why", held)
    assert answer["headline"] == (
        f"it is held by its user; 'scontrol release {site.job(held)}' releases it (JobHeldUser)"
    )
    assert (answer["state"], answer["pending"]["code"], answer["sooner"]) == ("pending", "JobHeldUser", [])
    lines = site.call("why", after).stdout.splitlines()
    assert lines[0] == "it starts after held (pending)"
    assert f"  held ({held}) is pending: it is held by its user" in lines[2]
    for name, run_id in (("first", first), ("after", after)):
        headline = site.call("why", run_id).stdout.splitlines()[0]
        assert f"why         {headline}" in site.call("show", name).stdout, name
        assert site.call("doctor", run_id).stdout.splitlines()[0] == headline


@pytest.fixture
def limited(cluster: Cluster) -> Iterator[Callable[..., None]]:
    """Sets limits in accounting, which are taken back in the end."""
    taken_back: list[tuple[str, ...]] = []

    def limit(entity: str, *words: str, **limits: str) -> None:
        undone = {name: "node=-1" if "=" in value else "-1" for name, value in limits.items()}
        taken_back.append((entity, *words, "set", *(f"{name}={value}" for name, value in undone.items())))
        assigned = [f"{name}={value}" for name, value in limits.items()]
        cluster.slurm("sacctmgr", "-iQ", "modify", entity, *words, "set", *assigned)

    yield limit
    for words in taken_back:
        cluster.slurm("sacctmgr", "-iQ", "modify", *words)


@rare
def test_limits_of_qos_and_account_are_named_with_their_use(
    site: ClusterSite, busy: str, limited: Callable[..., None]
) -> None:
    del busy
    limited("qos", "normal", MaxJobsPerUser="1")
    lines = explained(site, submit(site, "by-qos"), "QOSMaxJobsPerUserLimit")
    assert lines[0] == "it waits: a limit of its QOS is reached: running jobs of each user (QOSMaxJobsPerUserLimit)"
    assert "  QOS normal has the limit MaxJobsPU=1, and 1 of it is in use" in lines
    limited("qos", "normal", MaxJobsPerUser="-1")
    limited("user", USER, "where", "account=research", GrpTRES="node=2")
    lines = explained(site, submit(site, "by-account"), "AssocGrpNodeLimit")
    assert lines[0] == "it waits: a limit of its account is reached: nodes of all jobs together (AssocGrpNodeLimit)"
    # The run that waited for the QOS may have started since.
    limit = rf"  account research, user {USER} has the limit GrpTRES node=2, and [23] of it is in use"
    assert any(re.fullmatch(limit, line) for line in lines)


@rare
def test_what_partitions_and_nodes_do_not_allow_is_named_with_what_they_do(site: ClusterSite, cluster: Cluster) -> None:
    too_long = submit(site, "too-long", partition="spot-cancel", hold=True)
    too_wide = submit(site, "too-wide", 4, partition="spot-cancel", hold=True)
    cluster.slurm("scontrol", "update", "PartitionName=spot-cancel", "MaxNodes=2", "MaxTime=5")
    cluster.slurm("scontrol", "update", "NodeName=node3", "State=DRAIN", "Reason=bad disk: ask ada")
    try:
        for run_id in (too_long, too_wide):
            cluster.slurm("scontrol", "release", site.job(run_id))
        lines = explained(site, too_long, "PartitionTimeLimit")
        assert "  partition spot-cancel allows 00:05:00" in lines
        assert any("with a time limit of 0:05:00 it would start now" in line for line in lines)
        lines = explained(site, too_wide, "Partition")
        assert any("partition spot-cancel allows" in line for line in lines)
        pinned = submit(site, "pinned", nodelist="node3")
        lines = explained(site, pinned, "ReqNodeNotAvail")
        # Slurm 24.11 says that it may be reserved.
        assert re.fullmatch(
            r"it waits: a node that it needs is down, drained or reserved \(ReqNodeNotAvail: (node3|May be .*)\)",
            lines[0],
        )
        assert any(re.fullmatch(r"  node3 is idle\+drain.*: bad disk: ask ada \(by root\)", line) for line in lines)
        assert "  -> without slurm.nodelist it would start now" in lines
    finally:
        cluster.slurm("scontrol", "update", "PartitionName=spot-cancel", "MaxNodes=UNLIMITED", "MaxTime=04:00:00")
        cluster.slurm("scontrol", "update", "NodeName=node3", "State=RESUME")


@rare
def test_a_sweep_in_parts_a_requeue_and_a_dependency_of_ones_own_say_why(site: ClusterSite, cluster: Cluster) -> None:
    other = submit(site, "other")
    spec = site.commanding(
        "sleep 600", "swept", params={"seed": 0}, sweep={"params.seed": [1, 2], "parallel": 1}, slurm=SPOT
    )
    _, second = (run["id"] for run in site.json("submit", str(spec), "--executor", "slurm")["runs"])
    lines = explained(site, second, "JobArrayTaskLimit")
    assert lines[0] == "it waits: its array runs as many tasks as it may (JobArrayTaskLimit)"
    assert "  of its array, at most 1 run at once (sweep.parallel)" in lines
    depends = submit(site, "depends", dependency=f"afterok:{site.job(other)}")
    lines = explained(site, depends, "Dependency")
    assert f"  it waits for the success of job {site.job(other)} (other-{other})" in lines
    site.call("cancel", second, depends)
    trains = site.submit(site.light("trains", params={"steps": 100000, "step_ms": 50}, slurm=SPOT))
    site.until_step(trains, 5)
    lines = site.call("why", trains).stdout.splitlines()
    assert re.match(
        r"it trains: step \d+ of 100000 \(0 %\), [\d.]+ steps/s, .* to go; it reaches its time limit in", lines[0]
    )
    preempt(cluster, lambda: site.status(trains)["state"] == "requeued")
    lines = explained(site, trains, "BeginTime")
    assert lines[0].startswith(
        "it was interrupted, and waits to go on: preempted by a job of higher priority after step"
    )


def test_what_is_known_comes_without_slurm_within_seconds_and_odd_names_are_refused(
    site: ClusterSite, cluster: Cluster
) -> None:
    assert "there is no run 'nobody'" in site.call("why", "nobody", code=2).stderr
    run_id = submit(site, "waits", hold=True)
    job = site.job(run_id)
    os.kill(cluster.daemon("slurmctld"), signal.SIGKILL)
    try:
        began = time.monotonic()
        answer = site.call("why", run_id)
        assert time.monotonic() - began < 15
        assert answer.stdout.startswith(f"it waits: its job {job} was submitted today ")
        assert "and Slurm does not answer" in answer.stdout.splitlines()[0]
        assert "squeue did not answer within 5 s" in answer.stderr
    finally:
        cluster.up()
    assert f"there is no run '{run_id}x'" in site.call("why", f"{run_id}x", code=2).stderr
