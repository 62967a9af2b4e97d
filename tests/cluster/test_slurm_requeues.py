"""Which jobs Slurm starts again, and which not: on a cluster whose Slurm differs from this machine's in that."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Iterator
from typing import Any

import pytest
from helpers.cluster import NAME, SLURM, Cluster, ClusterSite, Person
from helpers.cluster_runs import SPOT, events, preempt, until_trains, watching
from helpers.site import ONE_PROCESS, until

# Since 24.05 Slurm itself requeues a job that exits within its grace, and takes the next normal end of a job that was
# requeued within its grace for that of the grace. TEST_SLURM=22.05 shows what is different before.
VERSION = SLURM or "24.11"
COUNTS_EXITS = (24, 5)
OVER = ("COMPLETED", "FAILED", "CANCELLED", "PREEMPTED", "TIMEOUT")
SLOW: dict[str, Any] = {"steps": 150, "step_ms": 20, "slow_from": 20}


@pytest.fixture(scope="module")
def running_cluster(person: Person) -> Iterator[Cluster]:
    """A cluster with that version."""
    started = Cluster(f"{NAME}-v", slurm=VERSION)
    try:
        started.up()
        yield started
    finally:
        started.script("down", check=False)


def end_of(cluster: Cluster, job: str) -> str:
    """The state in which a job has ended, or in which it waits to start again."""
    ended = (*OVER, "PENDING", "REQUEUE_HOLD")
    return str(until(lambda: state if (state := cluster.state(job)) in ended else None, f"the end of job {job}"))


def starts_of(cluster: Cluster, job: str) -> int:
    """How often Slurm has started a job."""
    return cluster.restarts(job) + 1


def surplus(site: ClusterSite, run_id: str) -> list[dict[str, Any]]:
    """Starts of a run that was over."""
    return events(site, run_id, "surplus")


def broken_scontrol(site: ClusterSite, condition: str) -> list[str]:
    """Lines of setup with which the job has a scontrol that fails under a condition."""
    place = site.path / "broken"
    place.mkdir()
    place.chmod(0o755)
    wrapper = place / "scontrol"
    wrapper.write_text(f'#!/bin/sh\n{condition}\nexec {site.cluster.programs}/scontrol "$@"\n')
    wrapper.chmod(0o755)
    return [f"export PATH={shlex.quote(str(place))}:$PATH"]


def test_runs_that_are_over_after_a_preemption_are_not_started_again(site: ClusterSite, cluster: Cluster) -> None:
    where: dict[str, Any] = {"resources": ONE_PROCESS, "slurm": SPOT}
    crash = {**SLOW, "crash_rank": 0, "crash_step": 100}
    completes = site.submit(site.light("completes", params=SLOW, **where))
    fails = site.submit(site.light("fails", params=crash, requeue={"max_failures": 0}, **where))
    stays = site.submit(site.light("stays", params=SLOW, requeue={"enabled": False}, **where))
    jobs = {run_id: site.job(run_id) for run_id in (completes, fails, stays)}
    for run_id in jobs:
        until_trains(site, run_id, starts=1)
    preempt(cluster, lambda: all(events(site, run_id, "end") for run_id in jobs))
    site.until_state(completes, "completed")
    site.until_state(fails, "failed")
    assert all(end_of(cluster, job) in OVER for job in jobs.values())
    assert [starts_of(cluster, jobs[run_id]) for run_id in jobs] == [2, 2, 1]
    assert [surplus(site, run_id) for run_id in jobs] == [[], [], []]
    site.call("sync")
    causes = {run_id: [attempt["cause"] for attempt in site.show(run_id)["attempts"]] for run_id in jobs}
    assert causes == {completes: ["preempted", "completed"], fails: ["preempted", "crash"], stays: ["preempted"]}
    assert site.status(stays)["state"] == "failed"
    assert site.show(completes)["lost_steps"] == 0
    assert "DUE TO" not in site.call("doctor", fails).stdout
    # A person may start the failed one again all the same.
    site.call("resume", fails, "params.crash_step=-1")
    assert site.until_state(fails, "completed")["attempt"] == 3


def test_a_run_that_slurm_starts_again_though_it_is_over_ends_at_once_and_for_good(
    site: ClusterSite, cluster: Cluster
) -> None:
    killed = site.path / "killed"
    # The agent is killed when it is about to keep Slurm from starting the job again.
    kill = f'case "$*" in *Requeue=0*) [ -e {killed} ] || {{ touch {killed}; kill -9 "$PPID"; exit 1; }};; esac'
    spec = site.light(
        params={**SLOW, "crash_rank": 0, "crash_step": 100},
        requeue={"max_failures": 0},
        resources=ONE_PROCESS,
        slurm=SPOT,
        setup=broken_scontrol(site, kill),
    )
    run_id = site.submit(spec)
    job = site.job(run_id)
    until_trains(site, run_id, starts=1)
    preempt(cluster, lambda: events(site, run_id, "requeue"))
    until(killed.exists, "the end of the agent")
    if cluster.version() < COUNTS_EXITS:
        assert end_of(cluster, job) == "FAILED"
        cluster.slurm("scontrol", "requeue", job)
    until(lambda: surplus(site, run_id), "a start of the run that is over")
    assert end_of(cluster, job) in OVER
    assert "Requeue=0" in cluster.slurm("scontrol", "show", "job", job)
    site.call("sync")
    run = site.show(run_id)
    assert (run["state"], [attempt["cause"] for attempt in run["attempts"]]) == ("failed", ["preempted", "crash"])


def test_a_job_that_slurm_holds_for_too_many_starts_is_replaced(site: ClusterSite, cluster: Cluster) -> None:
    newer = cluster.version() >= COUNTS_EXITS
    # Older versions do not know the setting.
    with cluster.configured("MaxBatchRequeue=1") if newer else contextlib.nullcontext():
        # Its agent cannot requeue it, and Slurm does so once too often, or not at all.
        setup = broken_scontrol(site, '[ "$1" = requeue ] && exit 1')
        run_id = site.submit(site.light(params=SLOW, resources=ONE_PROCESS, slurm=SPOT, setup=setup))
        job = site.job(run_id)
        until_trains(site, run_id, starts=1)
        preempt(cluster, lambda: events(site, run_id, "requeue_failed"))
        held = end_of(cluster, job)
        assert held == "REQUEUE_HOLD" if newer else held in OVER
        second = site.runs / run_id / "submissions" / "2"
        with watching(site):
            until(lambda: second.exists() and site.job(run_id) != job, "another job")
            site.until_state(run_id, "completed")
    run = site.show(run_id)
    assert [attempt["cause"] for attempt in run["attempts"]] == ["preempted", "completed"]
    assert run["lost_steps"] == 0
    assert end_of(cluster, job) == ("CANCELLED" if newer else held)


def test_a_run_that_is_cancelled_while_it_is_preempted_is_cancelled_when_the_command_returns(
    site: ClusterSite, cluster: Cluster
) -> None:
    params = {"steps": 100_000, "step_ms": 20}
    run_id = site.submit(site.light(params=params, resources=ONE_PROCESS, slurm=SPOT))
    until_trains(site, run_id, starts=1)
    preempt(cluster, lambda: events(site, run_id, "requeue"))
    site.call("cancel", run_id)
    assert site.status(run_id)["state"] == "cancelled"
    assert end_of(cluster, site.job(run_id)) == "CANCELLED"
