"""Chains of runs on a real cluster: each starts after the ones before it, whatever becomes of their jobs."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from typing import Any

import pytest
from helpers.cluster import Cluster, ClusterSite
from helpers.cluster_runs import SPOT, digests, events, preempt, until_trains
from helpers.expected_weights import expected_digests
from helpers.site import ONE_PROCESS, until

thorough = pytest.mark.skipif(
    os.environ.get("TEST_CHAINS") != "all", reason="only with TEST_CHAINS=all: chains of runs take half a minute each"
)
SLOW: dict[str, Any] = {"step_ms": 20, "slow_from": 15}


def chain(
    site: ClusterSite,
    *,
    pretrain: dict[str, Any] | None = None,
    held: bool = False,
    requeue: dict[str, Any] | None = None,
    last_after: Sequence[str] = ("finetune",),
    **more: Any,
) -> dict[str, list[str]]:
    """Submit a chain, whose last link is a sweep, the last first; the ids of the runs by name.

    ``pretrain``: what differs in the first. ``held``: the jobs behind it never start, as in a full queue. ``requeue``:
    the section of those behind it. ``last_after``: what the last link
    starts after.
    """
    common: dict[str, Any] = {"resources": ONE_PROCESS, "slurm": SPOT, "checkpoint": {"every": {"steps": 10}}}
    later = {**common, "slurm": {**SPOT, "hold": held}, "requeue": requeue or {}}
    first = {"steps": 60, **(pretrain or more)}
    files = [
        site.light(
            "evaluate",
            params={"steps": 20, "init": "${run.finetune.checkpoint}", "crash_rank": -1, **more},
            sweep={"params.crash_rank": [-1, -2]},
            after=list(last_after),
            **later,
        ),
        site.light("finetune", params={"steps": 40, "init": "${run.pretrain.checkpoint}", **more}, **later),
        site.light("pretrain", params=first, **common),
    ]
    runs = site.json("submit", *map(str, files), "--executor", "slurm")["runs"]
    return {name: [run["id"] for run in runs if run["name"] == name] for name in ("pretrain", "finetune", "evaluate")}


def all_of(ids: dict[str, list[str]]) -> list[str]:
    return [run_id for of_name in ids.values() for run_id in of_name]


def weights(site: ClusterSite, ids: dict[str, list[str]]) -> dict[str, set[str]]:
    return {name: {digest for each in of_name for digest in digests(site, each)} for name, of_name in ids.items()}


def began_with(site: ClusterSite, run_id: str) -> list[str]:
    return [line for line in site.printed(run_id) if line.startswith("began with")]


@pytest.fixture(scope="module")
def undisturbed_chain() -> dict[str, set[str]]:
    """The weights of a chain that nothing disturbs."""
    pretrain, finetune, evaluate = expected_digests(60, 40, 20)
    return {"pretrain": {pretrain}, "finetune": {finetune}, "evaluate": {evaluate}}


def test_a_chain_survives_a_preemption_of_each_of_its_runs(
    site: ClusterSite, cluster: Cluster, undisturbed_chain: dict[str, set[str]]
) -> None:
    ids = chain(site, **SLOW)
    [pretrain], [finetune], evaluations = ids.values()
    waiting = {run["id"]: run["reason"] for run in site.json("status")["runs"]}
    assert waiting[finetune].startswith("after pretrain (")
    assert all(waiting[each] == "after finetune (pending)" for each in evaluations)
    for names in ([pretrain], [finetune], evaluations):
        for run_id in names:
            until_trains(site, run_id, starts=1)
        preempt(cluster, lambda names=names: all(events(site, run_id, "end") for run_id in names))
    site.call("wait", *all_of(ids))
    for run_id in all_of(ids):
        # None of them started before its turn.
        assert [attempt["cause"] for attempt in site.show(run_id)["attempts"]] == ["preempted", "completed"]
    assert weights(site, ids) == undisturbed_chain
    assert set(began_with(site, finetune)) == {"began with step-60"}
    assert {line for each in evaluations for line in began_with(site, each)} == {"began with step-40"}
    shown = site.show(finetune)
    assert [(each["id"], each["condition"]) for each in shown["after"]] == [(pretrain, "afterok")]
    assert [each["id"] for each in shown["before"]] == evaluations


@thorough
def test_what_waits_for_a_failed_run_says_so_and_ends_and_can_be_resumed(site: ClusterSite, cluster: Cluster) -> None:
    ids = chain(site, pretrain={"steps": 60, "crash_rank": 0, "crash_step": 0})
    [pretrain], [finetune], evaluations = ids.values()
    until(lambda: not cluster.jobs(), "the end of all jobs")
    states = {run["id"]: run for run in site.json("status")["runs"]}
    assert {run["state"] for run in states.values()} == {"failed"}
    assert states[finetune]["reason"].startswith(f"run {pretrain} (pretrain) failed: ")
    assert all(states[each]["reason"].startswith(f"run {finetune} (finetune) failed: ") for each in evaluations)
    assert {states[each]["cause"] for each in (finetune, *evaluations)} == {"upstream"}
    refused = site.call("resume", finetune, code=2).stderr
    assert f"run {pretrain} (pretrain) failed" in refused
    site.call("resume", "--from-start", pretrain, "params.crash_step=-1")
    site.call("resume", finetune)
    assert site.status(finetune)["reason"].startswith("after pretrain (")
    for run_id in evaluations:
        site.call("resume", run_id)
    site.call("wait", *all_of(ids))


def test_cancelling_a_run_ends_at_once_what_waits_for_it(site: ClusterSite, cluster: Cluster) -> None:
    ids = chain(site, pretrain={"steps": 100_000, "step_ms": 20}, held=True)
    [pretrain], [finetune], evaluations = ids.values()
    until_trains(site, pretrain, starts=1)
    printed = site.call("cancel", pretrain).stderr
    assert f"run {finetune} is failed: run {pretrain} (pretrain) was cancelled" in printed
    assert all(f"run {each} is failed: run {finetune} (finetune) failed" in printed for each in evaluations)
    until(lambda: not cluster.jobs(), "the end of all jobs")
    # None of their jobs was ever started.
    assert not any(site.show(each)["attempts"][0]["nodes"] for each in (finetune, *evaluations))


@thorough
def test_runs_wait_for_the_job_that_replaces_one_that_was_lost(
    site: ClusterSite, cluster: Cluster, undisturbed_chain: dict[str, set[str]]
) -> None:
    # What starts too early goes back also if nothing else would start it again.
    ids = chain(
        site,
        pretrain={"steps": 60, **SLOW},
        requeue={"enabled": False},
        last_after=("finetune", "afterany:pretrain"),
    )
    [pretrain], [finetune], evaluations = ids.values()
    until_trains(site, pretrain, starts=1)
    [agent] = events(site, pretrain, "agent")
    os.kill(agent["process"]["pid"], signal.SIGKILL)
    # Its job is over, and nothing else says so: the next one starts, sees that it is too early, and goes back.
    until(lambda: events(site, finetune, "requeue"), "the return of the next job into the queue")
    early = site.show(finetune)
    assert [attempt["cause"] for attempt in early["attempts"]][:1] == ["early"]
    until(lambda: cluster.state(site.job(finetune)) == "PENDING", "the job in the queue")
    until(lambda: "Requeue=0" in cluster.slurm("scontrol", "show", "job", site.job(finetune)), "the job as it was")
    site.call("sync")
    assert len({attempt["job_id"] for attempt in site.show(pretrain)["attempts"]}) == 2
    for run_id in (finetune, *evaluations):
        dependency = cluster.slurm("squeue", "--noheader", "--array", f"--jobs={site.job(run_id)}", "--format=%E")
        assert f"afterany:{site.job(pretrain)}" in dependency
    site.call("wait", *all_of(ids))
    assert weights(site, ids) == undisturbed_chain
    assert [attempt["cause"] for attempt in site.show(finetune)["attempts"]] == ["early", "completed"]
