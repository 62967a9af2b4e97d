"""What Slurm is asked, how often, and what becomes of an answer that does not come."""

from __future__ import annotations

import json
import os
import signal
import tempfile
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.cluster import Cluster, ClusterSite, Person
from helpers.rare import rare
from helpers.site import until
from helpers.terminal import on_terminal

from slurmtrain.model.experiment.plan import make_plan
from slurmtrain.model.experiment.spec import read_spec

WRAPPED = ("squeue", "sacct", "scontrol", "sbatch", "scancel", "sinfo")


class Recorder:
    """Wrappers around Slurm's commands, first on PATH, which note each call."""

    def __init__(self, site: ClusterSite) -> None:
        self.calls = site.path / "calls"
        self.programs = site.path / "recorded"
        self.programs.mkdir()
        for name in WRAPPED:
            wrapper = self.programs / name
            wrapper.write_text(
                f'#!/bin/sh\necho {name} >>"$RECORDED_CALLS"\nexec {site.cluster.programs}/{name} "$@"\n'
            )
            wrapper.chmod(0o755)
        self.environment = {
            "PATH": f"{self.programs}:{site.environment()['PATH']}",
            "RECORDED_CALLS": str(self.calls),
        }

    def since(self) -> Counter[str]:
        """Calls since the last time this was asked."""
        calls = Counter(self.calls.read_text().split() if self.calls.exists() else [])
        self.calls.unlink(missing_ok=True)
        return calls


def synthesize(site: ClusterSite, job_ids: list[str]) -> list[str]:
    """Run directories as if each job had been submitted from here."""
    runs = []
    site.runs.mkdir(exist_ok=True)
    keys = {"name": "n", "command": "python x.py", "tracking": {"mlflow": {"enabled": False}}}
    spec = read_spec(keys, lambda at, message: pytest.fail(f"{at}: {message}"))
    plan = json.dumps(make_plan(spec, workdir="/", python="python", template=keys)[0].to_json())
    for number, job_id in enumerate(job_ids):
        run_id = f"{number:010d}"
        directory = site.runs / run_id
        for name in ("journal", "attempts", "submissions", "checkpoints"):
            (directory / name).mkdir(parents=True)
        events = [
            {"t": 1.0, "kind": "created", "name": "n", "executor": "slurm"},
            {"t": 2.0, "kind": "submitting", "submission": 1, "attempt": 1, "executor": "slurm"},
            {"t": 3.0, "kind": "submitted", "submission": 1, "job_id": job_id},
        ]
        (directory / "plan.json").write_text(plan)
        lines = "".join(json.dumps(event) + "\n" for event in events)
        (directory / "journal" / "submit.jsonl").write_text(lines)
        runs.append(run_id)
    for path in [site.runs, *site.runs.rglob("*")]:
        os.chown(path, site.person.uid, site.person.gid)
    return runs


@pytest.mark.parametrize("count", [1, 1200])
def test_any_command_asks_squeue_once_and_sacct_at_most_once(site: ClusterSite, cluster: Cluster, count: int) -> None:
    arrays = []
    for first in range(0, count, 1000):
        size = min(1000, count - first)
        command = ["sbatch", "--parsable", "--hold", f"--array=0-{size - 1}", f"--uid={site.person.name}",
                   "--account=research", f"--chdir={site.path}", "--output=/dev/null", "--wrap=true"]  # fmt: skip
        arrays.append((cluster.slurm(*command).strip(), size))
    runs = synthesize(site, [f"{array}_{task}" for array, size in arrays for task in range(size)])
    recorder = Recorder(site)
    status = site.json("status", env=recorder.environment)["runs"]
    assert {run["state"] for run in status} == {"pending"}
    assert {run["pending"]["code"] for run in status} == {"JobHeldUser"}
    assert len(status) == count
    assert recorder.since() == {"squeue": 1}
    for command in (("show", runs[0]), ("sync",), ("status",)):
        site.call(*command, env=recorder.environment)
        assert recorder.since() == {"squeue": 1}, command
    cluster.slurm("scancel", "--user", site.person.name)
    assert {run["state"] for run in site.json("status", env=recorder.environment)["runs"]} == {"cancelled"}
    calls = recorder.since()
    assert calls["squeue"] == 1
    assert calls["sacct"] <= 1
    assert set(calls) <= {"squeue", "sacct"}
    site.call("status", env=recorder.environment)
    assert recorder.since() == {}


def test_submit_asks_for_partitions_and_submits_and_cancel_makes_one_scancel(site: ClusterSite) -> None:
    recorder = Recorder(site)
    spec = site.spec(slurm={"hold": True}, params={"seed": 0}, sweep={"params.seed": [1, 2, 3]})
    runs = [
        run["id"] for run in site.json("submit", str(spec), "--executor", "slurm", env=recorder.environment)["runs"]
    ]
    # scontrol tells which partitions there are, and how large a job array may be.
    assert recorder.since() == {"scontrol": 2, "sbatch": 1}
    site.call("cancel", *runs, env=recorder.environment)
    # scontrol forbids Slurm to start them again.
    calls = recorder.since()
    # squeue may still list the array, without its elements: accounting then tells what has become of them.
    assert calls.pop("sacct", 0) <= 1
    assert calls == {"scontrol": 1, "scancel": 1, "squeue": 1}
    assert {run["state"] for run in site.json("status")["runs"]} == {"cancelled"}


def test_commands_that_wait_share_one_answer_of_slurm(site: ClusterSite) -> None:
    recorder = Recorder(site)
    run_id = site.submit(site.spec(slurm={"hold": True}))
    environ = {**recorder.environment, "SLURMTRAIN_SLURM_INTERVAL": "600"}
    waiting = site.start("wait", run_id, env=environ)
    until(lambda: (site.runs / ".squeue.json").exists(), "the shared answer")
    watching = site.start("status", "--watch", "--interval", "0.5", env=environ)
    assert watching.stdout is not None
    lines = [watching.stdout.readline() for _ in range(6)]
    watching.kill()
    watching.wait()
    assert sum("held" in line for line in lines) == 3
    assert recorder.since() == {"squeue": 1}
    site.call("cancel", run_id)
    assert waiting.wait(timeout=120) == 1


def test_the_live_page_asks_no_more_often_and_cancels_with_one_scancel(site: ClusterSite) -> None:
    recorder = Recorder(site)
    site.submit(site.spec(slurm={"hold": True}))
    environ = {**site.environment(), **recorder.environment, "SLURMTRAIN_SLURM_INTERVAL": "600"}
    environ["XDG_CONFIG_HOME"] = str(site.path / "no-config")
    page = on_terminal(
        "top", "--interval", "0.5", env=environ, cwd=site.path, identity=site.identity,
        columns=140, command=(site.python, "-m", "slurmtrain"),
    )  # fmt: skip
    with page as terminal:
        terminal.wait_for("held")
        terminal.wait_for("Slurm 3s ago")
        assert recorder.since() == {"squeue": 1}
        terminal.press("c")
        terminal.wait_for("Cancel")
        terminal.press("y")
        terminal.wait_for("is cancelled")
        assert recorder.since() == {"scontrol": 1, "scancel": 1, "squeue": 1}
        terminal.press("q")
        assert terminal.wait_for_end() == 0


@rare
def test_live_pages_in_many_browsers_ask_no_more_often(site: ClusterSite) -> None:
    recorder = Recorder(site)
    run_id = site.submit(site.spec(slurm={"hold": True}))
    environ = {**recorder.environment, "SLURMTRAIN_SLURM_INTERVAL": "600"}
    serving = site.start("serve", "--interval", "0.5", "--json", env=environ)
    assert serving.stdout is not None
    address = json.loads(serving.stdout.readline())
    server = f"http://127.0.0.1:{address['port']}"
    opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(), urllib.request.ProxyHandler({}))
    opener.open(address["url"])
    streams = [opener.open(f"{server}/events/run/{run_id}") for _ in range(5)]

    def facts() -> Any:
        return json.load(opener.open(f"{server}/facts/run/{run_id}"))

    def hear() -> None:
        """All streams tell of these facts."""
        for stream in streams:
            events = (json.loads(line[6:]) for line in stream if line.startswith(b"data: "))
            next(event for event in events if event["revision"] == facts()["revision"])

    hear()
    assert facts()["run"]["pending"]["code"] == "JobHeldUser"
    assert recorder.since() == {"squeue": 1}
    site.call("cancel", run_id)
    until(lambda: facts()["run"]["state"] == "cancelled", "the end of the run")
    hear()
    # The command has its own environment: no page has asked again.
    assert recorder.since() == {}
    serving.terminate()
    assert serving.wait(timeout=60) == 0


REFUSED = {
    "partition": ({"slurm": {"partition": "sopt"}}, "there is no partition 'sopt'; did you mean 'spot'?"),
    "account": ({"slurm": {"account": "nobodys"}}, "Invalid account"),
    "qos": ({"slurm": {"qos": "golden"}}, "Invalid qos"),
    "gres": ({"slurm": {"gres": "quantum:1"}}, "Invalid generic resource (gres) specification"),
    "constraint": ({"slurm": {"constraint": "liquid"}}, "Invalid feature specification"),
    "gpus": ({"resources": {"nodes": 4, "gpus_per_node": 8}}, "has 8 GPUs, not 32"),
    "memory": ({"resources": {"mem": "10TB"}}, "Slurm refused the job"),
    "time": ({"resources": {"time": "5-00:00:00"}}, "partition spot lets a job run for 04:00:00 at most"),
    "nodes": ({"resources": {"nodes": 99}}, "partition spot gives a job 4 nodes at most, not 99"),
}


@pytest.mark.parametrize("request_key", sorted(REFUSED))
def test_an_impossible_request_is_refused_and_leaves_nothing(
    site: ClusterSite, cluster: Cluster, request_key: str
) -> None:
    keys, message = REFUSED[request_key]
    refused = site.call("submit", str(site.spec(**keys)), "--executor", "slurm", code=2)
    assert message in refused.stderr
    assert [path.name for path in site.runs.glob("*") if not path.name.startswith(".")] == []
    assert cluster.jobs() == {}
    assert not list(site.runs.glob(".new-*"))


def test_a_user_without_an_account_is_refused(site: ClusterSite, cluster: Cluster) -> None:
    stranger = ClusterSite(site.path, cluster, Person("nobody", site.person.home, site.person.python, site.person.code))
    stranger.runs = site.path / "of-nobody"
    site.path.chmod(0o777)
    refused = stranger.call("submit", str(site.spec()), "--executor", "slurm", code=2)
    assert "Invalid account" in refused.stderr
    assert "sacctmgr show assoc" in refused.stderr
    # No run; a snapshot of the code is kept for the next submission.
    assert {path.name for path in stranger.runs.iterdir()} <= {".gitignore", ".code"}


@pytest.fixture
def without_slurmctld(cluster: Cluster) -> Iterator[None]:
    """Slurm's controller is dead."""
    os.kill(cluster.daemon("slurmctld"), signal.SIGKILL)
    yield
    cluster.up()


@pytest.mark.usefixtures("without_slurmctld")
def test_submit_creates_nothing_while_slurmctld_is_down(site: ClusterSite) -> None:
    refused = site.call("submit", str(site.spec()), "--executor", "slurm", code=1)
    assert "Slurm does not answer, so nothing was created; try again later" in refused.stderr
    assert not site.runs.exists()


def test_a_run_stays_what_it_was_while_slurm_does_not_answer(site: ClusterSite, cluster: Cluster) -> None:
    run_id = site.submit(site.steady())
    site.wait_for_lines(run_id)
    cluster.kill_controller(site.job(run_id))
    try:
        shown = site.call("status", run_id)
        assert "running" in shown.stdout
        assert "warning: squeue" in shown.stderr
        assert "these are the last known states" in shown.stderr
        site.wait_for_lines(run_id, len(site.printed(run_id)) + 10)
    finally:
        cluster.up()
    site.call("cancel", run_id)
    assert site.status(run_id)["state"] == "cancelled"


def test_a_killed_run_is_closed_by_squeue_alone_where_there_is_no_accounting(
    site: ClusterSite, cluster: Cluster
) -> None:
    conf = site.path / "slurm.conf"
    lines = Path(cluster.conf).read_text().splitlines()
    kept = [line for line in lines if not line.startswith(("AccountingStorage", "JobAcct"))]
    conf.write_text("\n".join([*kept, "AccountingStorageType=accounting_storage/none"]) + "\n")
    without = {"SLURM_CONF": str(conf)}
    run_id = site.submit(site.steady(requeue={"enabled": False}))
    site.wait_for_lines(run_id)
    [node] = site.show(run_id)["attempts"][0]["nodes"]
    cluster.kill_all_of(site.person.uid, int(node.removeprefix("node")))
    until(lambda: not cluster.jobs(), "the end of the job")
    [run] = site.json("status", run_id, env=without)["runs"]
    assert run["state"] == "failed"
    assert run["reason"].startswith("Slurm says FAILED with ")


def test_a_runs_root_that_nodes_cannot_see_is_reported(site: ClusterSite, cluster: Cluster) -> None:
    cluster.hide(site.path, 2)
    try:
        run_id = site.submit(site.steady(slurm={"nodelist": "node2"}))
        run = site.until_state(run_id, "failed", "lost", "cancelled", "completed")
        assert run["state"] == "failed"
        assert f"cannot see {site.runs / run_id}" in run["reason"]
        assert run["reason"] in site.call("show", run_id).stdout
    finally:
        cluster.unhide(site.path, 2)


def test_a_python_that_nodes_cannot_execute_is_reported(site: ClusterSite, cluster: Cluster) -> None:
    programs = site.person.python.parent
    cluster.hide(programs, 2)
    try:
        run_id = site.submit(site.steady(slurm={"nodelist": "node2"}))
        run = site.until_state(run_id, "failed", "lost", "cancelled", "completed")
        assert run["state"] == "failed"
        assert "python" in run["reason"]
        assert "No such file or directory" in run["reason"]
        assert "No such file or directory" in site.call("logs", run_id).stdout
    finally:
        cluster.unhide(programs, 2)


def test_names_with_bars_and_spaces_of_other_jobs_confuse_nobody(site: ClusterSite, cluster: Cluster) -> None:
    cluster.slurm("sbatch", "--hold", f"--uid={site.person.name}", "--account=research", f"--chdir={site.path}",
                  "--job-name=a|b  c|1 PENDING", "--output=/dev/null", "--wrap=true")  # fmt: skip
    run_id = site.submit(site.commanding("true", slurm={"hold": True}))
    assert site.status(run_id)["pending"]["code"] == "JobHeldUser"
    cluster.slurm("scontrol", "release", site.job(run_id))
    assert site.call("wait", run_id).returncode == 0


def test_a_runs_root_on_a_filesystem_of_this_machine_alone_is_warned_of(site: ClusterSite) -> None:
    spec = site.spec(slurm={"hold": True})
    assert "warning: the runs root" not in site.call("submit", str(spec), "--executor", "slurm").stderr
    with tempfile.TemporaryDirectory(dir="/dev/shm") as place:
        os.chown(place, site.person.uid, site.person.gid)
        submitted = site.call("--runs", f"{place}/runs", "submit", str(spec), "--executor", "slurm")
    assert f"the runs root {place}/runs is on this machine's own /dev/shm" in submitted.stderr
