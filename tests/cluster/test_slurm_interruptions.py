"""Runs that Slurm, nodes and faults interrupt on a real cluster, and that continue by themselves."""

from __future__ import annotations

import csv
import json
import os
import random
import signal
import sqlite3
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.cluster import NODES, Cluster, ClusterSite
from helpers.cluster_runs import (
    PARAMS,
    SPOT,
    STEPS,
    TWO,
    digests,
    events,
    pid_of,
    preempt,
    until_trains,
    watching,
)
from helpers.mlflow_server import mlflow_server
from helpers.postgres_server import PostgresServer
from helpers.rare import rare
from helpers.site import PATIENCE_S, until
from helpers.tracking_proxy import TrackingProxy, tracking_proxy

# From an interruption to the end: Slurm notices, the run starts again, and trains on, all of it on a busy machine. The
# longest run has four times as many steps as the others.
TO_THE_END_S = 2 * PATIENCE_S + 4 * STEPS * PARAMS["step_ms"] / 1000
# How often a run is preempted: more often by hand.
PREEMPTIONS = int(os.environ.get("TEST_PREEMPTIONS", "1"))


@pytest.fixture
def proxy(cluster: Cluster, tmp_path: Path) -> Iterator[TrackingProxy]:
    """The way from the nodes to an MLflow server on this machine."""
    with (
        mlflow_server(tmp_path, f"sqlite:///{tmp_path / 'mlflow.db'}") as server,
        tracking_proxy(server, cluster.controller_address) as proxy,
    ):
        yield proxy


@pytest.fixture
def undisturbed_curve(shared_site: ClusterSite, undisturbed: str) -> list[tuple[int, float]]:
    """The loss at each step of a run that nothing disturbs."""
    run_id = shared_site.submit(
        shared_site.light("undisturbed", params={**PARAMS, "step_ms": 0}, resources=TWO), "--wait"
    )
    assert digests(shared_site, run_id) == {undisturbed}
    return history(shared_site, run_id)


def test_preemptions_lose_no_step_and_the_record_has_the_curve_of_an_undisturbed_run(
    site: ClusterSite,
    cluster: Cluster,
    undisturbed_curve: list[tuple[int, float]],
    undisturbed: str,
    proxy: TrackingProxy,
    postgres: PostgresServer,
) -> None:
    tracking = {"mlflow": {"uri": proxy.uri}, "csv": {"enabled": True}}
    run_id = site.submit(
        site.light(params=PARAMS, resources=TWO, slurm=SPOT, checkpoint={"every": {"steps": 30}}, tracking=tracking)
    )
    for number in range(1, PREEMPTIONS + 1):
        until_trains(site, run_id, starts=number)
        # Two hosts write to a registry on a server, until they are preempted too.
        observers = on_nodes(site, postgres, f"--jobid={site.job(run_id)}", "--overlap")
        site.until_step(run_id, site.step(run_id) + random.Random(number).randrange(20))
        preempt(cluster, lambda number=number: len(events(site, run_id, "requeue")) >= number)
        observers.communicate(timeout=PATIENCE_S)
    site.until_state(run_id, "completed", patience_s=TO_THE_END_S)
    # No command has sent anything.
    until(lambda: len(steps_in_mlflow(proxy)) == STEPS, "the last metrics, from node 0")
    assert steps_in_mlflow(proxy) == set(range(1, STEPS + 1))
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
    # Node 0 has created it when training started; in later attempts it has used the same.
    shown = json_at(f"{proxy.upstream}/api/2.0/mlflow/runs/get?run_id={run['mlflow_run_id']}")
    assert shown["run"]["info"]["start_time"] == int(events(site, run_id, "agent")[0]["t"] * 1000)
    assert proxy.requests["runs/create"] == 1
    sent = len(proxy.metrics)
    site.call("sync")
    assert {name for name, _, _ in proxy.metrics[:sent]} == {"loss"}
    curve = undisturbed_curve
    assert [step for step, _ in curve] == list(range(1, STEPS + 1))
    assert history(site, run_id) == curve
    with (site.runs / "csv" / f"{run_id}.csv").open(newline="") as file:
        assert [(int(row["step"]), float(row["loss"])) for row in csv.DictReader(file)] == curve
    assert sorted(in_mlflow(proxy, run["mlflow_run_id"])) == curve
    observers = on_nodes(site, postgres, "--nodes=2", "--partition=spot")
    printed, _ = observers.communicate(timeout=PATIENCE_S)
    assert (observers.returncode, printed.count(f'"id": "{run_id}"')) == (0, 2), printed
    summaries = [summary_of(curve)]
    with sqlite3.connect(site.runs / "registry.db") as registry:
        assert registry.execute(SUMMARIES).fetchall() == summaries
    assert postgres.execute(SUMMARIES.replace("metric ", f"{postgres.registry(site.runs).schema}.metric ")) == summaries


SUMMARIES = "SELECT points, last_step, last, min, min_step, max, max_step FROM metric WHERE name = 'loss'"


def on_nodes(site: ClusterSite, postgres: PostgresServer, *where: str) -> subprocess.Popen[str]:
    """Start ``status`` on two nodes at once, whose registry is on a server."""
    return subprocess.Popen(
        [f"{site.cluster.programs}/srun", *where, "--ntasks=2", "--ntasks-per-node=1", "--mem=0",
         site.python, "-m", "slurmtrain", "status", "--all", "--json"],
        cwd=site.path,
        env={**site.environment(), "SLURMTRAIN_REGISTRY": postgres.url()},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        **site.identity,
    )  # fmt: skip


def history(site: ClusterSite, run: str) -> list[tuple[int, float]]:
    """The loss of a run at each step of its surviving line."""
    [plotted] = site.json("plot", run, "loss")["runs"]
    loss = plotted["metrics"]["loss"]
    assert loss["superseded"]["step"] == []
    return list(zip(loss["step"], loss["value"], strict=True))


def in_mlflow(proxy: TrackingProxy, mlflow_id: str) -> list[tuple[int, float]]:
    """The same, as MLflow has it."""
    history = json_at(f"{proxy.uri}/api/2.0/mlflow/metrics/get-history?run_id={mlflow_id}&metric_key=loss")
    return [(each["step"], each["value"]) for each in history["metrics"]]


def json_at(address: str) -> Any:
    """What the server answers."""
    with urllib.request.urlopen(address, timeout=PATIENCE_S) as answer:
        return json.loads(answer.read())


def summary_of(curve: list[tuple[int, float]]) -> tuple[int, int, float, float, int, float, int]:
    """What registries keep of a curve."""
    (last_step, last), by_value = curve[-1], {value: step for step, value in reversed(curve)}
    low, high = min(by_value), max(by_value)
    return len(curve), last_step, last, low, by_value[low], high, by_value[high]


def steps_in_mlflow(proxy: TrackingProxy) -> set[int]:
    """The steps of which the server has the loss."""
    return {step for name, step, _ in proxy.metrics if name == "loss"}


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
    site.until_state(run_id, "completed", patience_s=TO_THE_END_S)
    run = site.show(run_id)
    [attempt] = run["attempts"]
    assert [restart["cause"] for restart in attempt["restarts"]] == ["crash", "hang"]
    assert "rank 1" in attempt["restarts"][1]["why"]
    assert "stopped" in attempt["restarts"][1]["why"]
    assert (run["step"], digests(site, run_id)) == (STEPS, {undisturbed})
    assert 0 < run["lost_steps"] < STEPS
    assert not cluster.jobs()


def test_a_run_with_a_spare_continues_when_a_node_dies(site: ClusterSite, cluster: Cluster, undisturbed: str) -> None:
    spec = site.light(params=PARAMS, resources={**TWO, "spares": 1}, checkpoint={"every": {"steps": 20}})
    run_id = site.submit(spec)
    until_trains(site, run_id, starts=1)
    until(lambda: events(site, run_id, "saved"), "a checkpoint")
    host = next(e["host"] for e in events(site, run_id, "agent") if e["node"] == 1)
    node = int(host.removeprefix("node"))
    cluster.script("kill-node", str(node))
    try:
        site.until_state(run_id, "completed", patience_s=TO_THE_END_S)
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
        site.until_state(run_id, "completed", patience_s=TO_THE_END_S)
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
    run_id = site.submit(site.light(params=PARAMS, slurm=SPOT))
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
    # Two ranks, as those of the undisturbed run.
    resources = {**TWO, "nodes": 1, "procs_per_node": 2}
    run_id = site.submit(site.light(params=PARAMS, resources=resources, slurm=SPOT))
    job = site.job(run_id)
    cluster.slurm("scontrol", "update", f"JobId={job}", "Requeue=0")
    with watching(site):
        until_trains(site, run_id, starts=1)
        second = site.runs / run_id / "submissions" / "2"
        preempt(cluster, lambda: events(site, run_id, "requeue_failed") or second.exists())
        until(lambda: second.exists() and site.job(run_id) != job, "another job")
        site.until_state(run_id, "completed", patience_s=TO_THE_END_S)
    run = site.show(run_id)
    assert [attempt["cause"] for attempt in run["attempts"]] == ["preempted", "completed"]
    assert (run["lost_steps"], digests(site, run_id)) == (0, {undisturbed})
    names = cluster.slurm(
        "sacct", "--noheader", "--allocations", "--format=JobName%60", "--starttime=now-1hour", "--parsable2"
    )
    assert sum(name.endswith(run_id) for name in names.split()) == 2


@rare
def test_a_suspended_job_says_so_and_its_time_is_neither_training_nor_a_hang(
    site: ClusterSite, cluster: Cluster
) -> None:
    spec = site.light(params={"steps": 100_000, "step_ms": 20}, requeue={"hang_after": 10}, resources=TWO)
    run_id = site.submit(spec)
    until_trains(site, run_id, starts=1)
    job = site.job(run_id)
    cluster.slurm("scontrol", "suspend", job)
    until(lambda: "Slurm has suspended it since" in site.status(run_id)["reason"], "the suspension")
    since = time.monotonic()
    suspended = site.status(run_id)
    assert (suspended["state"], suspended["eta_seconds"], suspended["steps_per_second"]) == ("running", None, None)
    doctor = site.call("doctor", run_id).stdout
    assert doctor.startswith("Slurm has suspended it since")
    assert f"`scontrol resume {job}`" in doctor
    until(lambda: time.monotonic() - since > 20, "more than a hang takes")
    cluster.slurm("scontrol", "resume", job)
    until(lambda: events(site, run_id, "suspended"), "its end")
    site.until_step(run_id, site.step(run_id) + 100)
    assert site.status(run_id)["reason"] == ""
    site.call("cancel", run_id)
    assert events(site, run_id, "hang", "restart") == []
    assert len(events(site, run_id, "suspended")) == 1
    [attempt] = site.show(run_id)["attempts"]
    assert attempt["seconds"]["queue"] > 20
