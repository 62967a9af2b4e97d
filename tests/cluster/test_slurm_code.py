"""Runs on several nodes of a cluster execute the code that they were submitted with, also after a preemption."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from helpers.cluster import Cluster, ClusterSite
from helpers.cluster_runs import SPOT, events, preempt
from helpers.repositories import environment_with_editable
from helpers.site import until

SCRIPT = """
import pathlib, time
from helper import VERSION
from package import INSTALLED

print(VERSION, INSTALLED, flush=True)
while not pathlib.Path("results/enough").exists():
    time.sleep(0.05)
"""
CODE = {
    "train.py": SCRIPT,
    "helper.py": "VERSION = 'old'\n",
    "src/package/__init__.py": "INSTALLED = 'old'\n",
    "results/README": "",
}


@pytest.fixture
def project(site: ClusterSite) -> Path:
    """A directory with a script, a module, a package that :func:`installed` has, and a directory for results."""
    root = site.path / "project"
    for path, content in CODE.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(content)
    for place in (root, *root.rglob("*")):
        os.chown(place, site.person.uid, site.person.gid)
    return root


def installed(site: ClusterSite, project: Path) -> dict[str, str]:
    """Variables of a shell whose ``python`` has the project's package installed as editable."""
    return environment_with_editable(site.path / "env", project / "src", site.environment())


def edit(project: Path) -> None:
    """Change all code."""
    for path in ("helper.py", "src/package/__init__.py"):
        (project / path).write_text((project / path).read_text().replace("old", "new"))


def test_a_preempted_run_goes_on_with_the_code_of_its_submission_on_every_node(
    site: ClusterSite, cluster: Cluster, project: Path
) -> None:
    resources = {"nodes": 2, "procs_per_node": 1, "time": "00:10:00"}
    keys = {"workdir": str(project), "resources": resources, "slurm": SPOT}
    spec = site.commanding(f"python {project}/train.py", "snapshot", **keys)
    run_id = site.submit(spec, env=installed(site, project))
    site.wait_for_lines(run_id, 2)
    edit(project)
    preempt(cluster, lambda: events(site, run_id, "requeue"))
    until(lambda: len(site.printed(run_id)) >= 4, "the second attempt")
    (project / "results" / "enough").touch()
    site.until_state(run_id, "completed")
    assert site.printed(run_id) == ["old old"] * 4
    attempts = site.show(run_id)["attempts"]
    assert len({attempt["code"] for attempt in attempts}) == 1
    assert len(attempts) == 2
    # Made once, by the first node of the first attempt.
    assert len(events(site, run_id, "code")) == 1


def test_a_requeued_element_of_a_sweep_goes_on_with_the_code_that_all_share(
    site: ClusterSite, cluster: Cluster, project: Path
) -> None:
    command = "python train.py --output-dir results/${params.a}"
    keys = {"workdir": str(project), "params": {"a": 1}, "sweep": {"params.a": [1, 2, 3]}}
    spec = site.commanding(command, "swept", **keys)
    runs = site.json("submit", str(spec), "--executor", "slurm", env=installed(site, project))["runs"]
    for run in runs:
        site.wait_for_lines(run["id"], 1)
    edit(project)
    cluster.slurm("scontrol", "requeue", runs[1]["job_id"])
    site.wait_for_lines(runs[1]["id"], 2)
    (project / "results" / "enough").touch()
    for run in runs:
        site.until_state(run["id"], "completed")
    assert [site.printed(run["id"]) for run in runs] == [["old old"], ["old old"] * 2, ["old old"]]
    assert len({run["job_id"].partition("_")[0] for run in runs}) == 1
    # One snapshot, of which each has a copy.
    shown = [site.show(run["id"])["code"] for run in runs]
    assert {path.name for path in (site.runs / ".code").iterdir() if path.is_dir()} == {shown[0]["snapshot"]}
    assert [code["dir"] for code in shown] == [str(site.runs / run["id"] / "code" / "project") for run in runs]
