"""Nodes that fail a preflight, on a real cluster: the job goes on without them, however it is disturbed over it."""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from cluster.test_slurm_asking import Recorder
from cluster.test_slurm_kills import COMMAND, Killing
from helpers.cluster import NODES, Cluster, ClusterSite
from helpers.site import until

from slurmtrain.model.run.events.base import encode

# What a task of a job does that puts its own job back into the queue, without the agent.
PUT_BACK = """
import json, os, sys, time
from slurmtrain.runtime.environment.node import slurm_job_id
from slurmtrain.slurm.requeue import SlurmQueue
if os.environ["SLURM_NODEID"] == "0" and "SLURM_RESTART_COUNT" not in os.environ:
    job, without = slurm_job_id(os.environ), sys.argv[1].split(",")
    print("problem", json.dumps(SlurmQueue().exclusion_problem(job, without)), flush=True)
    if sys.argv[2] == "put-back":
        SlurmQueue().requeue_job(job, without, 0.0, None)
        time.sleep(600)
elif "SLURM_RESTART_COUNT" not in os.environ:
    time.sleep(600 if sys.argv[2] == "put-back" else 0)
else:
    print("again on", os.uname().nodename, flush=True)
"""
# A scontrol of which one verb fails, before the real one on PATH.
WRAPPER = """#!/bin/sh
case "$1" in
{case}
esac
exec {scontrol} "$@"
"""
# A run of two nodes that is about where it runs: it trains nothing.
TINY: dict[str, Any] = {"command": "true", "resources": {"nodes": 2, "procs_per_node": 1, "time": "00:10:00"}}


class Tiny:
    """A batch job of an ordinary user that puts itself back."""

    def __init__(self, site: ClusterSite, *options: str, without: str, act: str = "put-back") -> None:
        self.site = site
        (site.path / "putback.py").write_text(PUT_BACK)
        sbatch_options = ["--requeue", "--open-mode=append", "--ntasks-per-node=1", "--time=5", "--output=tiny.out",
                 f"--chdir={site.path}", *options]  # fmt: skip
        script = site.path / "tiny.sh"
        lines = [f"#SBATCH {option}" for option in sbatch_options]
        srun = f"srun {site.python} putback.py {without} {act}"
        script.write_text("\n".join(["#!/bin/bash", *lines, srun, ""]))
        command = ["sbatch", "--parsable", str(script)]
        completed = subprocess.run(command, env=site.environment(), capture_output=True, text=True, **site.identity)
        assert completed.returncode == 0, completed.stderr
        self.id = completed.stdout.strip()

    def lines(self) -> list[str]:
        out = self.site.path / "tiny.out"
        return out.read_text().splitlines() if out.exists() else []

    def exclusion_problem(self) -> Any:
        line = until(lambda: next((line for line in self.lines() if line.startswith("problem")), None), "an answer")
        return json.loads(line.removeprefix("problem "))

    def started_again_on(self, count: int) -> list[str]:
        def again() -> list[str]:
            return sorted(line.split()[-1] for line in self.lines() if line.startswith("again on"))

        return list(until(lambda: again() if len(again()) == count else None, "another start"))


def field(cluster: Cluster, job: str, name: str) -> str:
    shown = cluster.slurm("scontrol", "show", "job", job)
    return next(word.partition("=")[2] for word in shown.split() if word.startswith(f"{name}="))


def occupy(cluster: Cluster, nodes: str) -> str:
    """Have another job keep these two nodes for itself: what goes without node1 then waits until that has ended."""
    options = ("--exclusive", f"--nodelist={nodes}", "--nodes=2", "--time=10", "--output=/dev/null")
    job = cluster.slurm("sbatch", "--parsable", *options, "--wrap=sleep 600").strip()
    until(lambda: cluster.state(job) == "RUNNING", "the job that takes nodes")
    return job


# --- a job puts itself back ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("array", [False, True])
def test_a_job_of_an_ordinary_user_starts_again_without_a_node_and_still_without_what_it_excluded(
    site: ClusterSite, cluster: Cluster, array: bool
) -> None:
    job = Tiny(site, "--nodes=2", "--exclude=node2", *(["--array=5"] if array else []), without="node1")
    assert job.exclusion_problem() is None
    assert job.started_again_on(2) == ["node0", "node3"]
    assert field(cluster, f"{job.id}_5" if array else job.id, "ExcNodeList") == "node[1-2]"


@pytest.mark.parametrize(
    ("options", "without", "expected"),
    [
        (["--nodes=2"], "node2,node3", None),
        (["--nodes=3"], "node1,node2", "node1, node2 cannot be excluded: 3 nodes are needed and 2 would be left"),
        (["--nodes=1", "--exclude=node[2-3]"], "node0,node1", "1 node is needed and none would be left"),
        (["--nodes=1", "--no-requeue"], "node1", "its job may not be requeued (Requeue=0)"),
        (["--nodes=1", "--nodelist=node0"], "node0", "node0 cannot be excluded: Slurm says: allocation failure"),
        (["--nodes=1"], "node9", "node9 cannot be excluded: Slurm knows no node node9"),
    ],
)
def test_slurm_says_whether_a_job_could_start_again(
    site: ClusterSite, options: list[str], without: str, expected: str | None
) -> None:
    objection = Tiny(site, *options, without=without, act="ask").exclusion_problem()
    assert (objection is None) if expected is None else (expected in objection)


def test_a_job_that_a_person_cancels_does_not_come_to_life_again(site: ClusterSite, cluster: Cluster) -> None:
    sleeper = cluster.slurm(
        "sbatch", "--parsable", "--requeue", f"--uid={site.person.name}", "--account=research",
        f"--chdir={site.path}", "--output=/dev/null", "--wrap=trap '' TERM; srun sh -c \"trap '' TERM; sleep 60\"",
    ).strip()  # fmt: skip
    until(lambda: cluster.state(sleeper) == "RUNNING", "the job")
    cluster.slurm("scancel", sleeper)
    program = (
        f"from slurmtrain.slurm.requeue import SlurmQueue; SlurmQueue().requeue_job('{sleeper}', ['node1'], 0.0, None)"
    )
    completed = subprocess.run(
        [site.python, "-c", program],
        env=site.environment(),
        capture_output=True,
        text=True,
        **site.identity,
    )
    assert "SlurmDown" in completed.stderr
    until(lambda: sleeper not in cluster.jobs(), "the end of the job")
    assert cluster.state(sleeper) == "CANCELLED"


# --- runs whose agents cannot put them back -----------------------------------------------------------------------


def real_scontrol(site: ClusterSite) -> str:
    """The path of the cluster's scontrol."""
    return f"{site.cluster.programs}/scontrol"


def without_verb(site: ClusterSite, case: str) -> list[str]:
    """Lines of setup with which the job has a scontrol that goes wrong."""
    place = site.path / "broken"
    place.mkdir()
    place.chmod(0o755)
    (place / "scontrol").write_text(WRAPPER.format(case=case, scontrol=real_scontrol(site)))
    (place / "scontrol").chmod(0o755)
    return [f"export PATH={shlex.quote(str(place))}:$PATH"]


@dataclass(frozen=True)
class RequeuedRun:
    """A run of two nodes of which one had a wrong clock, and the node ledger, once it has completed."""

    site: ClusterSite
    run: dict[str, Any]
    ledger: list[dict[str, Any]]


@pytest.fixture(scope="module")
def requeued_run(shared_site: ClusterSite, running_cluster: Cluster) -> RequeuedRun:
    resources = {"nodes": 2, "procs_per_node": 1, "time": "00:10:00"}
    with running_cluster.wrong_clock(1, 5):
        run_id = shared_site.submit(shared_site.light(params={"steps": 5}, resources=resources), "--wait", code=None)
    return RequeuedRun(shared_site, shared_site.show(run_id), shared_site.json("nodes")["nodes"])


@pytest.mark.usefixtures("cluster")
def test_a_node_whose_clock_is_5_s_ahead_is_named_and_the_job_goes_on_without_it(requeued_run: RequeuedRun) -> None:
    run = requeued_run.run
    assert (run["state"], run["step"]) == ("completed", 5), run["reason"]
    refused, trained = run["attempts"]
    assert (refused["cause"], refused["nodes"]) == ("preflight", ["node0", "node1"])
    assert "node1: clock: 5" in refused["reason"]
    assert "ahead of" in refused["reason"]
    assert refused["clock"]["node1"]["offset_ms"] == pytest.approx(5000, abs=refused["clock"]["node1"]["bound_ms"] + 1)
    assert (len(trained["nodes"]), "node1" in trained["nodes"]) == (2, False)
    assert (trained["job_id"], trained["restart"]) == (refused["job_id"], 1)
    assert not list((requeued_run.site.runs / run["id"] / "attempts" / f"{refused['job_id']}.0").glob("logs/*"))
    [entry] = requeued_run.ledger
    assert (entry["host"], entry["run_id"]) == ("node1", run["id"])


def test_a_run_is_put_back_by_its_agent_and_its_node_is_left_out_until_it_is_forgiven(
    requeued_run: RequeuedRun, cluster: Cluster
) -> None:
    site, shown = requeued_run.site, requeued_run.run
    assert [attempt["cause"] for attempt in shown["attempts"]] == ["preflight", "completed"]
    assert (shown["attempts"][1]["without"], "node1" in shown["attempts"][1]["nodes"]) == (["node1"], False)
    [entry] = requeued_run.ledger
    report = (entry["host"], entry["checks"], entry["run_id"], entry["attempt"])
    assert report == ("node1", ["clock"], shown["id"], 1)
    assert entry["evidence"]["clock"]["offset_ms"] > 4000

    # Held: the agents of its jobs would be recorded too.
    spec = site.spec(**TINY, slurm={"hold": True})
    recorder = Recorder(site)
    completed = site.call("submit", str(spec), "--executor", "slurm", env=recorder.environment)
    assert recorder.since() == {"scontrol": 1, "sinfo": 1, "sbatch": 1}
    assert "excluded, because a preflight failed there: node1 (clock: " in completed.stderr
    second = completed.stdout.strip()
    assert site.show(second)["attempts"][0]["without"] == ["node1"]
    assert field(cluster, site.job(second), "ExcNodeList") == "node1"

    wide = site.spec("wide", **{**TINY, "resources": {"nodes": NODES, "procs_per_node": 1, "time": "00:10:00"}})
    completed = site.call("submit", str(wide), "--executor", "slurm")
    assert "node1 is in the node ledger (clock: " in completed.stderr
    assert f"({NODES} nodes are needed and {NODES - 1} would be left)" in completed.stderr

    completed = site.call("nodes", "forgive", "node2", code=2)
    assert "the node ledger does not list node2; it lists node1" in completed.stderr
    site.call("nodes", "forgive", "node1")
    site.call("registry", "rebuild")
    assert site.json("nodes")["nodes"] == []
    assert [listed["state"] for listed in site.json("nodes", "--all")["nodes"]] == ["forgiven"]
    recorder.since()
    completed = site.call("submit", str(spec), "--executor", "slurm", env=recorder.environment)
    assert recorder.since() == {"scontrol": 1, "sbatch": 1}
    assert "left out" not in completed.stderr


def test_a_job_that_its_agent_left_held_is_let_go_by_sync(site: ClusterSite, cluster: Cluster) -> None:
    spec = site.spec(**TINY, setup=without_verb(site, "update) echo 'not now' >&2; exit 1;;"))
    with cluster.wrong_clock(1, 5):
        run_id = site.submit(spec)
        run = until(
            lambda: (r := site.status(run_id))["pending"] and "Held" in r["pending"]["code"] and r, "a held job"
        )
    assert run["state"] == "requeued"
    assert "node1: clock: " in run["reason"]
    assert "could not be requeued (scontrol: not now)" in run["reason"]
    synced = site.json("sync")
    assert (synced["released"], synced["problems"]) == ([run_id], [])
    assert site.json("sync")["released"] == []
    assert field(cluster, site.job(run_id), "ExcNodeList") == "node1"
    site.call("wait", run_id)
    attempts = site.show(run_id)["attempts"]
    assert [attempt["cause"] for attempt in attempts] == ["preflight", "completed"]
    assert attempts[0]["job_id"] == attempts[1]["job_id"]
    assert "node1" not in attempts[1]["nodes"]


def test_a_job_that_its_user_holds_is_left_alone(site: ClusterSite, cluster: Cluster) -> None:
    run_id = site.submit(site.spec(**TINY, slurm={"hold": True}))
    assert site.json("sync")["released"] == []
    assert cluster.state(site.job(run_id)) == "PENDING"
    # One that its agent has put back as it should, and that its user holds afterwards.
    occupy(cluster, "node[2-3]")
    with cluster.wrong_clock(1, 5):
        again = site.submit(site.spec(**TINY))
        job = site.job(again)
        until(lambda: field(cluster, job, "ExcNodeList") == "node1", "the job in the queue")
    cluster.slurm("scontrol", "uhold", job)
    assert len(site.show(again)["attempts"]) == 2
    assert site.json("sync")["released"] == []
    assert "Held" in site.status(again)["pending"]["code"]


def test_a_run_whose_job_may_not_be_requeued_is_submitted_again_without_the_node(
    site: ClusterSite, cluster: Cluster
) -> None:
    # Somebody forbids it after the agent has asked whether it may.
    lies = f"show) {real_scontrol(site)} \"$@\" | sed 's/Requeue=0/Requeue=1/'; exit;;"
    forbid = 'scontrol update JobId="$SLURM_JOB_ID" Requeue=0'
    spec = site.spec(**TINY, setup=[forbid, *without_verb(site, lies)])
    with cluster.wrong_clock(1, 5):
        run_id = site.submit(spec, "--wait")
    run = site.show(run_id)
    assert run["state"] == "completed", run["reason"]
    first, second = run["attempts"]
    assert (first["cause"], second["without"]) == ("preflight", ["node1"])
    assert (first["job_id"] != second["job_id"], second["restart"], "node1" in second["nodes"]) == (True, 0, False)
    # Doing it once more does nothing.
    assert site.json("sync")["started"] == []


def test_a_run_that_cannot_do_without_the_node_has_failed_and_says_so(site: ClusterSite, cluster: Cluster) -> None:
    resources = {"nodes": NODES, "procs_per_node": 1, "time": "00:10:00"}
    spec = site.spec(**{**TINY, "resources": resources})
    with cluster.wrong_clock(1, 5):
        run_id = site.submit(spec, "--wait", code=1)
    run = site.status(run_id)
    assert run["state"] == "failed"
    assert "node1: clock: " in run["reason"]
    assert f"node1 cannot be excluded: {NODES} nodes are needed and {NODES - 1} would be left" in run["reason"]
    until(lambda: not cluster.jobs(), "the end of the job")
    site.call("sync")
    assert cluster.jobs() == {}


def test_a_run_that_is_cancelled_while_it_waits_to_start_again_stays_cancelled(
    site: ClusterSite, cluster: Cluster
) -> None:
    other = occupy(cluster, "node[2-3]")
    with cluster.wrong_clock(1, 5):
        run_id = site.submit(site.spec(**TINY))
        site.until_state(run_id, "requeued")
        site.call("cancel", run_id, code=None)
    assert site.until_state(run_id, "cancelled")["state"] == "cancelled"
    cluster.slurm("scancel", other)
    until(lambda: not cluster.jobs(), "the end of the job")
    site.call("sync")
    assert cluster.jobs() == {}


# --- killed over it -----------------------------------------------------------------------------------------------


def test_a_job_whose_agent_is_killed_while_it_puts_it_back_comes_back_and_is_put_back_again(
    site: ClusterSite, cluster: Cluster
) -> None:
    mark = site.path / "killed"
    once = f'update) [ -e {mark} ] || {{ touch {mark}; kill -9 "$PPID"; exit 1; }};;'
    spec = site.spec(**TINY, setup=without_verb(site, once))
    with cluster.wrong_clock(1, 5):
        run_id = site.submit(spec, "--wait")
    assert mark.exists()
    run = site.show(run_id)
    assert run["state"] == "completed", run["reason"]
    causes = [attempt["cause"] for attempt in run["attempts"]]
    assert (causes[:-1], causes[-1]) == (["preflight"] * (len(causes) - 1), "completed")
    assert len({attempt["job_id"] for attempt in run["attempts"]}) == 1
    assert "node1" not in run["attempts"][-1]["nodes"]


def refused(site: ClusterSite, spec: Path) -> str:
    """A run, whose new jobs wait for ever, that sync has to submit again: its last job is over, by the journals."""
    run_id = site.submit(spec)
    job = site.job(run_id)
    run = site.runs / run_id
    attempt = run / "attempts" / f"{job}.0"
    attempt.mkdir()
    now = time.time()
    agent = {"node": 0, "nodes": 2, "host": "node0", "executor": "slurm", "submission": 1, "attempt": 1}
    lines = [
        encode(now, "agent", agent),
        encode(now, "requeue", {"exclude": ["node1"], "why": "node1: clock: 5 s"}),
        encode(now, "end", {"cause": "preflight", "reason": "node1: clock: 5 s", "failed_at": now}),
    ]
    (attempt / "node-0.jsonl").write_bytes(b"".join(lines))
    over = encode(now, "observed", {"job_id": job, "restart": 0, "state": "COMPLETED", "ended_at": now})
    (run / "journal" / "observe.jsonl").write_bytes(over)
    for path in (attempt, attempt / "node-0.jsonl", run / "journal" / "observe.jsonl"):
        subprocess.run(["chown", f"{site.person.uid}:{site.person.gid}", str(path)], check=True)
    site.cluster.slurm("scancel", job)
    return run_id


def test_a_killed_sync_submits_a_run_again_exactly_once(site: ClusterSite, cluster: Cluster) -> None:
    killing = Killing(site)
    first = refused(site, killing.spec)
    assert killing.call("sync", within=COMMAND) == 0
    points = killing.points(killing.effects())
    runs = {first: 0, **{refused(site, killing.spec): point for point in points}}
    for point in points:
        killing.call("sync", within=COMMAND, at=point)
    killing.settle()
    killing.settle()
    for run_id in runs:
        shown = site.show(run_id)
        assert (shown["state"], len(shown["attempts"])) == ("pending", 2), shown["reason"]
        assert shown["attempts"][1]["without"] == ["node1"]
    assert killing.all_jobs(cluster) == dict.fromkeys(runs, 2)
    assert {name.rpartition("-")[2] for name in cluster.jobs().values()} == set(runs)
    assert len(cluster.jobs()) == len(runs)


# --- the checks alone ---------------------------------------------------------------------------------------------


def test_preflight_tells_which_node_fails_and_leaves_none_out(site: ClusterSite, cluster: Cluster) -> None:
    with cluster.wrong_clock(1, 5):
        completed = site.call("preflight", "--nodes", str(NODES), "--executor", "slurm", code=1)
        [line] = [line for line in completed.stdout.splitlines() if line.startswith("clock") and " fail " in line]
        assert line.split()[:3] == ["clock", "fail", "node1"]
        report = site.json(
            "preflight", "--executor", "slurm", "slurm.nodelist=node0,node1", "resources.nodes=2", code=1
        )
    assert set(report["checks"]) == {"node0", "node1"}
    assert any("evidence" in finding for finding in report["checks"]["node1"])
    assert report["run"]["name"] == "preflight"
    assert len(report["run"]["attempts"]) == 1
    assert set(report["run"]["attempts"][0]["clock"]) == {"node0", "node1"}


def test_an_interrupted_preflight_ends_its_job(site: ClusterSite, cluster: Cluster) -> None:
    waiting = site.start("preflight", "--executor", "slurm", "slurm.hold=true")
    until(lambda: cluster.jobs(), "the job")
    until(lambda: (site.runs / ".squeue.json").exists(), "a look at it")
    waiting.send_signal(signal.SIGINT)
    assert waiting.wait(timeout=120) == 130
    until(lambda: not cluster.jobs(), "the end of the job")
    assert [run["state"] for run in site.json("status")["runs"]] == ["cancelled"]
