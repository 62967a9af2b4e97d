"""Runs on a real cluster, from submission to their end."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from helpers.cluster import Cluster, ClusterSite
from helpers.cluster_runs import events
from helpers.rare import THOROUGH
from helpers.site import until

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
LONG = {"steps": 100000, "step_ms": 20}
# How many runs are started together, and how often: each time takes some seconds.
AT_ONCE = 3 if THOROUGH else 2
TIMES = int(os.environ.get("TEST_TIMES", "1"))


def test_a_run_of_two_nodes_trains_and_shows_where(site: ClusterSite) -> None:
    spec = site.light(params={"steps": 10}, resources={"nodes": 2, "procs_per_node": 2, "time": "00:10:00"})
    run_id = site.submit(spec, "--wait")
    run = site.show(run_id)
    assert (run["state"], run["step"], run["executor"]) == ("completed", 10, "slurm")
    [attempt] = run["attempts"]
    assert [node.startswith("node") for node in attempt["nodes"]] == [True, True]
    assert attempt["nodes"][0] != attempt["nodes"][1]
    assert not attempt["master_addr"].startswith("127.")
    assert attempt["master_port"] > 0
    assert set(attempt["interfaces"]) == set(attempt["nodes"])
    assert attempt["started_at"] < attempt["ended_at"]
    logs = site.call("logs", run_id).stdout
    assert {f"[1/rank {rank}]" for rank in range(4)} == {line.split("]")[0] + "]" for line in logs.splitlines()}


@pytest.fixture(scope="module")
def at_once(shared_site: ClusterSite) -> list[list[dict[str, Any]]]:
    """Runs that were started together on the same two nodes, once they have ended; perhaps several times so many."""
    site = shared_site
    resources = {"nodes": 2, "procs_per_node": 1, "time": "00:10:00"}
    slurm = {"nodelist": "node0,node1"}
    specs = [site.light(f"r{i}", params={"steps": 20}, resources=resources, slurm=slurm) for i in range(AT_ONCE)]
    shown = []
    for _ in range(TIMES):
        runs = [site.submit(spec) for spec in specs]
        site.call("wait", *runs, code=None)
        shown.append([site.show(run_id) for run_id in runs])
    return shown


@pytest.mark.usefixtures("cluster")
def test_runs_at_once_on_shared_nodes_do_not_disturb_each_other(at_once: list[list[dict[str, Any]]]) -> None:
    for shown in at_once:
        assert [run["state"] for run in shown] == ["completed"] * AT_ONCE, [run["reason"] for run in shown]
        assert [run["step"] for run in shown] == [20] * AT_ONCE
        assert {node for run in shown for node in run["attempts"][0]["nodes"]} == {"node0", "node1"}


@pytest.mark.usefixtures("cluster")
def test_runs_that_start_together_on_the_same_nodes_never_meet_at_one_port(at_once: list[list[dict[str, Any]]]) -> None:
    for shown in at_once:
        places = {(run["attempts"][0]["master_addr"], run["attempts"][0]["master_port"]) for run in shown}
        assert len(places) == len(shown)


@pytest.fixture(scope="module")
def cancelled(shared_site: ClusterSite) -> dict[str, Any]:
    """A run of two nodes that was cancelled after a few steps, as it was then."""
    spec = shared_site.light("cancelled", params=LONG, resources={"nodes": 2, "procs_per_node": 1})
    run_id = shared_site.submit(spec)
    shared_site.until_step(run_id, 5)
    shared_site.call("cancel", run_id)
    return shared_site.show(run_id)


def test_a_running_run_is_cancelled_with_what_it_has_saved(cancelled: dict[str, Any], cluster: Cluster) -> None:
    assert (cancelled["state"], cancelled["lost_steps"]) == ("cancelled", 0)
    assert cancelled["checkpoint"]["step"] == cancelled["step"] >= 5
    until(lambda: cancelled["job_id"] not in cluster.jobs(), "the end of the job")


@pytest.mark.usefixtures("cluster")
def test_a_run_continues_where_it_was_cancelled(shared_site: ClusterSite, cancelled: dict[str, Any]) -> None:
    saved = cancelled["step"]
    shared_site.call("resume", cancelled["id"], f"params.steps={saved + 5}", "--wait")
    run = shared_site.show(cancelled["id"])
    assert (run["state"], run["step"]) == ("completed", saved + 5)
    assert [attempt["first_step"] for attempt in run["attempts"]] == [0, saved]
    assert run["attempts"][0]["job_id"] != run["attempts"][1]["job_id"]


def test_a_pending_run_says_why_it_waits_and_is_cancelled(site: ClusterSite, cluster: Cluster) -> None:
    options = ("--exclusive", "--nodes=4", "--time=10", "--output=/dev/null")
    blocker = cluster.slurm("sbatch", "--parsable", *options, "--wrap=sleep 600").strip()
    until(lambda: cluster.state(blocker) == "RUNNING", "the blocking job")
    run_id = site.submit(site.steady(resources={"nodes": 2, "procs_per_node": 1, "time": "00:10:00"}))
    run = until(lambda: (r := site.status(run_id))["pending"]["code"] in ("Resources", "Priority") and r, "a reason")
    assert run["state"] == "pending"
    assert any(words in run["reason"] for words in ("are busy", "higher priority"))
    until(lambda: site.status(run_id)["pending"]["estimated_start"], "Slurm's estimate")
    assert "estimated start" in site.status(run_id)["reason"]
    assert site.call("cancel", run_id).stderr.startswith(f"run {run_id} is cancelled")
    assert site.show(run_id)["attempts"][0]["cause"] == "cancelled"
    assert site.show(run_id)["attempts"][0]["nodes"] == []


def test_a_run_whose_processes_were_all_killed_is_closed_by_the_state_that_slurm_gives(
    site: ClusterSite, cluster: Cluster
) -> None:
    run_id = site.submit(site.light(params=LONG, requeue={"enabled": False}))
    site.until_step(run_id, 3)
    [node] = site.show(run_id)["attempts"][0]["nodes"]
    cluster.kill_all_of(site.person.uid, int(node.removeprefix("node")))
    run = site.until_state(run_id, "failed", "cancelled", "lost")
    assert run["state"] == "failed"
    assert run["reason"].startswith("Slurm says FAILED with ")
    [attempt] = site.show(run_id)["attempts"]
    assert (attempt["cause"], attempt["ended_at"] is not None) == ("crash", True)
    assert attempt["lost_steps"] == run["step"] - (run["checkpoint"] or {"step": 0})["step"]


def test_a_node_that_dies_is_the_cause_and_the_run_continues_elsewhere(site: ClusterSite, cluster: Cluster) -> None:
    params = {"steps": 200, "step_ms": 20, "slow_from": 20}
    spec = site.light(params=params, resources={"nodes": 2, "procs_per_node": 1}, checkpoint={"every": {"steps": 10}})
    run_id = site.submit(spec)
    site.until_step(run_id, 1)
    victim = int(site.show(run_id)["attempts"][0]["nodes"][1].removeprefix("node"))
    until(lambda: list((site.runs / run_id).glob("checkpoints/step-*/MANIFEST.json")), "a checkpoint")
    cluster.script("kill-node", str(victim))
    try:
        until(lambda: len({event["attempt"] for event in events(site, run_id, "agent")}) == 2, "the second attempt")
        site.call("wait", run_id)
    finally:
        cluster.script("start-node", str(victim))
    run = site.show(run_id)
    assert (run["state"], run["step"]) == ("completed", 200)
    first, second = run["attempts"]
    assert (first["cause"], first["job_id"], second["restart"]) == ("node_fail", second["job_id"], 1)
    assert f"node{victim}" not in second["nodes"]
    assert second["first_step"] >= 10


def test_a_job_that_ends_within_its_grace_has_completed_whatever_slurm_says(
    site: ClusterSite, cluster: Cluster
) -> None:
    spec = site.path / "deaf.yaml"
    # A script without the library, which is done a moment after it was asked to stop, and whose exit code says so.
    spec.write_text(
        "command: 'bash -c \"trap asked=1 TERM; echo ready; until [ $asked ]; do sleep 0.1; done; exit 0\"'\n"
        "requeue: {exit_zero: completed}\n"
        "resources: {nodes: 1, procs_per_node: 1, time: '00:10:00'}\n"
        "tracking: {mlflow: {enabled: false}}\n"
    )
    run_id = site.submit(spec)
    until(lambda: "ready" in site.printed(run_id), "the script")
    cluster.script("preempt", run_id, "--seconds", "1")
    site.until_state(run_id, "completed")
    until(lambda: not cluster.jobs(), "the end of the job")
    site.call("sync")
    assert len(site.show(run_id)["attempts"]) == 1


# What a script names that this cluster has not, or has less of, is taken back on the command line; it reads all lines.
_TAKEN_BACK = {
    "one-node": [],
    "setup-lines": [],
    "four-nodes": ["--account=research", "--reservation=", "--mem=1000", "--cpus-per-task=1", "--time=60"],
    "odd-characters": ["--constraint=", "--licenses="],
}


@pytest.mark.parametrize("name", sorted(_TAKEN_BACK))
def test_slurm_takes_the_golden_scripts(site: ClusterSite, name: str) -> None:
    script = site.path / f"{name}.sh"
    script.write_text((GOLDEN / f"{name}.sh").read_text())
    command = ["sbatch", "--test-only", *_TAKEN_BACK[name], str(script)]
    submitted = subprocess.run(command, env=site.environment(), capture_output=True, text=True, **site.identity)
    assert submitted.returncode == 0, submitted.stderr
    assert "to start at" in submitted.stderr


def test_a_run_that_is_submitted_from_within_a_job_is_a_run_of_its_own(site: ClusterSite, cluster: Cluster) -> None:
    resources = {"nodes": 2, "procs_per_node": 1, "time": "00:10:00"}
    spec = site.light(params={"steps": 3}, resources=resources)
    inner = f"{site.python} -m slurmtrain submit {spec} --executor slurm"
    environ = {**site.environment(), "MASTER_ADDR": "10.9.8.7", "WORLD_SIZE": "64", "SBATCH_TIMELIMIT": "7"}
    outer = subprocess.run(
        ["sbatch", "--parsable", "--nodes=3", "--cpus-per-task=2", f"--chdir={site.path}", f"--wrap={inner}"],
        env=environ, capture_output=True, text=True, **site.identity,
    )  # fmt: skip
    assert outer.returncode == 0, outer.stderr
    # Its files are there earlier, under a name that no command knows.
    until(lambda: site.json("status")["runs"], "the run")
    [run] = site.json("status")["runs"]
    site.call("wait", run["id"])
    shown = site.show(run["id"])
    assert (shown["state"], shown["step"], len(shown["attempts"][0]["nodes"])) == ("completed", 3, 2)
    assert shown["job_id"] != outer.stdout.strip()
    limit = cluster.slurm("squeue", "--noheader", "--states=all", f"--jobs={shown['job_id']}", "--format=%l").strip()
    assert limit == "10:00"


def test_a_run_is_killed_at_once_where_force_is_asked_for(site: ClusterSite, cluster: Cluster) -> None:
    run_id = site.submit(site.steady(resources={"nodes": 2, "procs_per_node": 1}))
    site.wait_for_lines(run_id)
    cancelled = site.call("cancel", "--force", run_id)
    assert cancelled.stderr.startswith(f"run {run_id} is cancelled")
    until(lambda: not cluster.jobs(), "the end of the job")
    assert site.status(run_id)["state"] == "cancelled"


def test_a_job_keeps_its_nodes_after_a_crash_for_whoever_wants_to_look(site: ClusterSite, cluster: Cluster) -> None:
    def crashes(keep: str) -> str:
        requeue = {"keep_nodes": keep, "max_failures": 0, "restarts_in_place": 0}
        return site.submit(site.commanding("python -c 'import sys; sys.exit(3)'", f"kept-{keep}", requeue=requeue))

    run_id, briefly = crashes("10m"), crashes("1s")
    until(lambda: events(site, run_id, "kept"), "the end of the ranks")
    run = site.status(run_id)
    assert run["state"] == "running"
    assert f"srun --jobid={run['job_id']} --overlap --pty bash" in run["reason"]
    inside = ("srun", f"--jobid={run['job_id']}", "--overlap", "printenv", "SLURM_JOB_ID")
    assert subprocess.run(
        inside, env=site.environment(), cwd=site.path, capture_output=True, text=True, **site.identity
    ).stdout.split() == [run["job_id"]]
    cluster.slurm("scancel", "--signal=USR2", run["job_id"])
    assert site.until_state(run_id, "failed")["reason"].startswith("rank 0 exited with code 3")
    site.until_state(briefly, "failed")
    [kept] = events(site, briefly, "kept")
    [end] = events(site, briefly, "end")
    assert end["t"] >= kept["until"]


def test_a_run_that_ran_out_of_memory_gets_a_job_with_more(site: ClusterSite) -> None:
    script = site.path / "hungry.py"
    script.write_text(
        "import os, sys\n"
        "if int(os.environ['SLURM_MEM_PER_NODE']) < 400:\n"
        "    sys.exit('MemoryError')\n"
        "print('enough:', os.environ['SLURM_MEM_PER_NODE'])\n"
    )
    resources = {"nodes": 1, "procs_per_node": 1, "mem": "128MB", "time": "00:05:00"}
    rules = {"oom": {"mem": "x2", "at_most": "480MB"}}
    run_id = site.submit(site.commanding(f"python {script}", resources=resources, requeue=rules), "--wait")
    run = site.show(run_id)
    assert [attempt["cause"] for attempt in run["attempts"]] == ["oom", "oom", "completed"]
    assert [attempt["overrides"] for attempt in run["attempts"]] == [[], ["resources.mem=256M"], ["resources.mem=480M"]]
    assert "enough: 480" in site.printed(run_id)
