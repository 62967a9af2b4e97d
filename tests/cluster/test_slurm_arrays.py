"""Sweeps on a real cluster: one job array, whose elements are runs of their own."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from helpers.cluster import Cluster, ClusterSite
from helpers.cluster_runs import SPOT, STEPS, digests, events, preempt, until_trains
from helpers.site import ONE_PROCESS, until
from test_slurm_asking import Recorder
from test_slurm_kills import Killing, _launchers

from slurmtrain.model.run.layout import is_run_id
from slurmtrain.slurm.scheduler import GIVEN_UP_S

# What does not change the weights.
SWEEP = ("--sweep", "params.step_ms=50,51,52")


def submit_sweep(site: ClusterSite, spec: Path, *arguments: str) -> list[dict[str, Any]]:
    runs: list[dict[str, Any]] = site.json("submit", str(spec), *(arguments or SWEEP), "--executor", "slurm")["runs"]
    return runs


def restarts(cluster: Cluster, runs: list[dict[str, Any]]) -> list[int]:
    return [cluster.restarts(run["job_id"]) for run in runs]


def test_elements_that_are_preempted_complete_with_the_weights_of_an_undisturbed_run(
    site: ClusterSite, cluster: Cluster, undisturbed: str
) -> None:
    spec = site.light(
        params={"steps": STEPS, "step_ms": 50},
        resources={**ONE_PROCESS, "nodes": 2},
        slurm=SPOT,
        checkpoint={"every": {"steps": 10}},
    )
    runs = submit_sweep(site, spec, "--sweep", "params.step_ms=50,51")
    [array] = {run["job_id"].partition("_")[0] for run in runs}
    assert [run["job_id"] for run in runs] == [f"{array}_{index}" for index in range(2)]
    for run in runs:
        until_trains(site, run["id"], starts=1)
    preempt(cluster, lambda: all(events(site, run["id"], "end") for run in runs))
    site.call("wait", *(run["id"] for run in runs), code=None)
    shown = [site.show(run["id"]) for run in runs]
    assert [(run["state"], run["step"]) for run in shown] == [("completed", STEPS)] * 2, [r["reason"] for r in shown]
    for run in shown:
        assert [attempt["job_id"] for attempt in run["attempts"]] == [run["job_id"]] * 2
        assert [attempt["restart"] for attempt in run["attempts"]] == [0, 1]
        assert run["attempts"][0]["cause"] == "preempted"
        assert digests(site, run["id"]) == {undisturbed}
        assert f"{run['job_id']}_0_log.out" in os.listdir(site.runs / run["id"] / "submissions" / "1" / "submitit")


def states(site: ClusterSite, run_ids: list[str]) -> list[str]:
    return [site.status(run_id)["state"] for run_id in run_ids]


def test_failed_elements_are_resumed_as_one_array_and_people_may_use_slurms_own_commands(
    site: ClusterSite, cluster: Cluster
) -> None:
    """Also those of people who know nothing of slurmtrain."""
    spec = site.light(params={"steps": 100000, "step_ms": 50}, checkpoint={"every": {"steps": 10}})
    runs = submit_sweep(site, spec)
    ids = [run["id"] for run in runs]
    for run_id in ids:
        until(partial(events, site, run_id, "saved"), "a checkpoint of each")
    [array] = {run["job_id"].partition("_")[0] for run in runs}
    cluster.slurm("scancel", f"{array}_[1-2]")
    until(lambda: states(site, ids) == ["running", "cancelled", "cancelled"], "the end of two")
    recorder = Recorder(site)
    calls = recorder.environment
    failed = ("resume", "--failed", runs[0]["sweep"], "--cancelled")
    site.call("cancel", runs[0]["sweep"], env=calls)
    assert recorder.since()["scancel"] == 1
    listed = site.json(*failed, "--dry-run", env=calls)["runs"]
    assert [run["id"] for run in listed] == ids
    assert not recorder.since()["sbatch"]
    until(lambda: not cluster.jobs(), "the end of all elements")
    again = site.json(*failed, "resources.time=00:09:00", env=calls)["runs"]
    queries = recorder.since()
    assert (queries["sbatch"], queries["squeue"]) == (1, 1), queries
    [new] = {run["job_id"].partition("_")[0] for run in again}
    assert [run["job_id"] for run in again] == [f"{new}_{index}" for index in range(3)]
    for run_id in ids:
        until_trains(site, run_id, starts=2)
        assert events(site, run_id, "restored")
    assert {run["state"] for run in site.json("status", env=calls)["runs"]} == {"running"}
    queries = recorder.since()
    assert queries["squeue"] <= 1, queries
    cluster.slurm("scancel", new)
    until(lambda: set(states(site, ids)) == {"cancelled"}, "the end of the whole array")


def test_elements_that_a_person_cancels_before_they_begin_are_cancelled_and_no_others(
    site: ClusterSite, cluster: Cluster
) -> None:
    """Of which Slurm keeps nothing: neither the queue nor accounting names them any more."""
    spec = site.spec("held", slurm={"hold": True}, resources={"nodes": 1, "time": "00:05:00"}, params={"a": 1})
    runs = submit_sweep(site, spec, "--sweep", "params.a=range(5)")
    ids = [run["id"] for run in runs]
    [array] = {run["job_id"].partition("_")[0] for run in runs}
    cluster.slurm("scancel", f"{array}_[1-2]")
    cluster.slurm("scancel", f"{array}_3")
    queued = ("squeue", "--noheader", "--array", "--states=all", "--format=%i", f"--jobs={array}")
    until(lambda: cluster.slurm(*queued).split() == [f"{array}_0", f"{array}_4"], "the end of three elements")

    until(lambda: cluster.slurm("sacct", "--noheader", f"--jobs={array}"), "a row of the array in accounting")
    site.call("status")
    for run_id in ids[1:4]:
        backdate(absences(site, run_id), GIVEN_UP_S + 60)
    site.call("registry", "rebuild")
    assert states(site, ids) == ["pending", *["cancelled"] * 3, "pending"]
    assert ["over" in json.loads(site.runs.joinpath(run_id, "lease.json").read_text()) for run_id in ids] == [
        False, True, True, True, False,
    ]  # fmt: skip
    cluster.slurm("scancel", array)
    until(lambda: set(states(site, ids)) == {"cancelled"}, "the end of the others")


def absences(site: ClusterSite, run_id: str) -> list[Path]:
    """The journals that say that Slurm does not know the job of a run."""
    return [path for path in (site.runs / run_id / "journal").iterdir() if '"ABSENT"' in path.read_text()]


def backdate(journals: list[Path], seconds: float) -> None:
    """Make the events of journals older, in place."""
    for path in journals:
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        path.write_text("".join(json.dumps({**line, "t": line["t"] - seconds}) + "\n" for line in lines))


def test_a_sweep_that_is_longer_than_arrays_may_be_is_several_that_share_its_limit(
    site: ClusterSite, cluster: Cluster
) -> None:
    spec = site.spec("held", slurm={"hold": True}, resources={"nodes": 1, "time": "00:05:00"}, params={"a": 1})
    sweep = ("--sweep", "params.a=range(5)", "--parallel", "2")
    with cluster.configured("MaxArraySize=3"):
        runs = submit_sweep(site, spec, *sweep)
        lines = cluster.slurm("squeue", "--noheader", "--format=%F %K").splitlines()
        arrays = dict(line.split() for line in lines if line.split()[1] != "N/A")
        jobs = [run["job_id"].partition("_") for run in runs]
        assert [index for _, _, index in jobs] == ["0", "1", "2", "0", "1"]
        assert sorted(arrays.values()) == ["0-1%1", "0-2%1"]
        assert {array for array, _, _ in jobs} == set(arrays)
        assert {run["state"] for run in site.json("status")["runs"]} == {"pending"}


def test_a_sweep_that_is_larger_than_an_account_allows_leaves_nothing_twice_and_is_completed_later(
    site: ClusterSite, cluster: Cluster
) -> None:
    spec = site.spec("held", slurm={"hold": True}, resources={"nodes": 1, "time": "00:05:00"}, params={"a": 1})
    submitting = ("submit", str(spec), "--sweep", "params.a=range(5)", "--executor", "slurm")
    with limited(cluster, site, "MaxSubmitJobs=3"):
        error = site.call(*submitting, code=2).stderr
        assert "AssocMaxSubmitJobLimit" in error, error
        assert "each run of a sweep is a job" in error, error
        assert error.endswith("; nothing was created\n"), error
        assert site.json("status")["runs"] == []
        with cluster.configured("MaxArraySize=3"):
            error = site.call(*submitting, "--idempotency-key=k", code=1).stderr
        first = [run["id"] for run in site.json("status")["runs"]]
        assert error.endswith(f"; submitted: {', '.join(first)}; not created: 2 run(s)\n"), error
    complete = site.json(*submitting, "--idempotency-key=k")["runs"]
    assert [run["id"] for run in complete][:3] == first
    assert [run["params"]["a"] for run in complete] == list(range(5))
    jobs = cluster.slurm("squeue", "--noheader", "--array", "--format=%i").split()
    assert sorted(jobs) == sorted(run["job_id"] for run in complete)


@contextlib.contextmanager
def limited(cluster: Cluster, site: ClusterSite, setting: str) -> Iterator[None]:
    """Within this context the user has a limit, such as ``MaxSubmitJobs=3``."""
    name, _, value = setting.partition("=")

    def is_set(number: str) -> bool:
        shown = cluster.slurm("scontrol", "show", "assoc_mgr", f"users={site.person.name}", "flags=assoc")
        return f"{name}={number}(" in shown or (not number and f"{name}= " in shown)

    change = ("sacctmgr", "-i", "modify", "user", site.person.name, "set")
    cluster.slurm(*change, setting)
    try:
        until(lambda: is_set(value), "the limit")
        yield
    finally:
        cluster.slurm(*change, f"{name}=-1")
        until(lambda: is_set(""), "the end of the limit")


def test_an_element_that_is_resumed_while_slurm_still_ends_it_waits_for_its_last_job(
    site: ClusterSite, cluster: Cluster
) -> None:
    hold = site.path / "hold"
    hold.touch()
    spec = site.commanding(
        "sh -c 'exit ${params.code}'",
        params={"code": 1, "a": 0},
        requeue={"max_failures": 0},
        setup=[f"trap 'while [ -e {hold} ]; do sleep 0.2; done' EXIT"],
    )
    runs = submit_sweep(site, spec, "--sweep", "params.a=1,2")
    ids = [run["id"] for run in runs]
    until(lambda: states(site, ids) == ["failed", "failed"], "the failure of both")
    again = site.json("resume", "--failed", runs[0]["sweep"], "params.code=0")["runs"]
    for run, before in zip(again, runs, strict=True):
        assert cluster.state(before["job_id"]) == "RUNNING"
        assert cluster.state(run["job_id"]) == "PENDING"
        waits_for = cluster.slurm("squeue", "--noheader", f"--jobs={run['job_id']}", "--format=%E").strip()
        assert waits_for == f"afterany:{before['job_id']}(unfulfilled)"
    hold.unlink()
    site.call("wait", *ids)
    assert states(site, ids) == ["completed", "completed"]


def test_a_requeue_and_a_cancel_concern_one_element(site: ClusterSite, cluster: Cluster) -> None:
    spec = site.light(params={"steps": 100000, "step_ms": 50}, checkpoint={"every": {"steps": 10}})
    runs = submit_sweep(site, spec)
    first, second, *others = runs
    for run in runs:
        until_trains(site, run["id"], starts=1)
    cluster.slurm("scontrol", "requeue", first["job_id"])
    until(lambda: cluster.restarts(first["job_id"]) == 1, "the requeue")
    site.call("cancel", second["id"])
    assert site.status(second["id"])["state"] == "cancelled"
    assert restarts(cluster, others) == [0]
    until_trains(site, first["id"], starts=2)
    states = {run["id"]: run["state"] for run in site.json("status")["runs"]}
    assert [states[run["id"]] for run in runs] == ["running", "cancelled", "running"]
    site.call("cancel", runs[0]["sweep"])
    until(lambda: not cluster.jobs(), "the end of all elements")
    assert {run["state"] for run in site.json("status")["runs"]} == {"cancelled"}


@pytest.mark.parametrize("within", ["slurmtrain", "slurmtrain.slurm.sbatch_process"])
def test_a_killed_submit_leaves_one_element_a_run(site: ClusterSite, cluster: Cluster, within: str) -> None:
    killing = Killing(site)
    killing.spec.write_text(killing.spec.read_text() + "params: {a: 1}\nsweep: {params.a: [1, 2, 3]}\n")
    killing.submit_dying(within=within)
    assert killing.submit_dying(within=within) == 0
    effects = killing.effects()
    for point in killing.points(effects):
        code = killing.submit_dying(within=within, at=point)
        assert code == (-9 if within == "slurmtrain" else 1), (point, effects[point - 1])
    until(lambda: not _launchers(site.runs), "the end of all launchers")
    killing.settle()
    listed = killing.site.json("status")["runs"]
    assert sorted(run["id"] for run in listed) == sorted(filter(is_run_id, os.listdir(site.runs)))
    assert {run["state"] for run in listed} == {"pending"}
    jobs = cluster.slurm("squeue", "--noheader", "--array", "--format=%i").split()
    assert sorted(jobs) == sorted(run["job_id"] for run in listed)
