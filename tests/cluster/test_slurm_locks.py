"""Runs on a cluster whose lock is held by a command that hangs in sbatch, and runs whose runs root is renamed."""

from __future__ import annotations

import shutil

from helpers.cluster import Cluster, ClusterSite
from helpers.cluster_runs import SPOT, events, preempt
from helpers.site import PATIENCE_S, until

HANGING = """#!/bin/sh
touch {folder}/hangs
until [ -e {folder}/go-on ]; do sleep 0.1; done
exec {sbatch} "$@"
"""


def test_a_run_is_cancelled_while_its_submission_hangs_in_sbatch_and_no_job_of_it_trains(
    site: ClusterSite, cluster: Cluster
) -> None:
    folder = site.path / "bin"
    folder.mkdir()
    folder.chmod(0o777)
    path = site.environment()["PATH"]
    (folder / "sbatch").write_text(HANGING.format(folder=folder, sbatch=shutil.which("sbatch", path=path)))
    (folder / "sbatch").chmod(0o755)
    submit = site.start("submit", str(site.light()), "--executor", "slurm", env={"PATH": f"{folder}:{path}"})
    until((folder / "hangs").exists, "the call of sbatch")
    [run_id] = [entry.name for entry in site.runs.iterdir() if (entry / "plan.json").exists()]
    cancelled = site.call("cancel", run_id, code=1)
    assert f"run {run_id} is being started by another command: its lock is held by " in cancelled.stderr
    (folder / "go-on").touch()
    output, _ = submit.communicate(timeout=PATIENCE_S)
    assert f"run {run_id} was cancelled while its job was being submitted" in output
    until(lambda: not cluster.jobs(), "the end of its job")
    site.until_state(run_id, "cancelled")
    assert site.step(run_id) == 0


def test_a_run_whose_runs_root_was_renamed_saves_when_it_is_preempted_and_continues_from_there(
    site: ClusterSite, cluster: Cluster
) -> None:
    params = {"steps": 300, "step_ms": 20, "slow_from": 40}
    spec = site.light(params=params, slurm=SPOT, checkpoint={"every": {"steps": 20}})
    run_id = site.submit(spec)
    until(lambda: [*site.runs.glob("*/checkpoints/step-*/MANIFEST.json")], "the first checkpoint")
    before, site.runs = site.runs, site.path / "renamed"
    before.rename(site.runs)
    preempt(cluster, lambda: events(site, run_id, "end"))
    # Its job is not requeued: where it would start, there is nothing any more. 'sync' submits the run anew.
    until(lambda: site.call("sync") and site.status(run_id)["attempt"] == 2, "another job")
    run = site.until_state(run_id, "completed", "failed", "lost")
    assert (run["state"], run["step"], run["lost_steps"]) == ("completed", 300, 0), run
    first, _ = site.show(run_id)["attempts"]
    assert (
        f"its directory was moved from {before / run_id} to {site.runs / run_id} while it was running"
        in first["reason"]
    )
    assert not before.exists()
