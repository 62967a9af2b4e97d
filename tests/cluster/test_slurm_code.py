"""Runs on several nodes of a cluster execute the code that they were submitted with, also after a preemption."""

from __future__ import annotations

import os

from helpers.cluster import Cluster, ClusterSite
from helpers.cluster_runs import SPOT, events, preempt
from helpers.site import until

SCRIPT = """
import pathlib, time
from helper import VERSION

print(VERSION, flush=True)
while not pathlib.Path("results/enough").exists():
    time.sleep(0.05)
"""


def test_a_preempted_run_goes_on_with_the_code_of_its_submission_on_every_node(
    site: ClusterSite, cluster: Cluster
) -> None:
    project = site.path / "project"
    for path, content in {"train.py": SCRIPT, "helper.py": "VERSION = 'old'\n", "results/README": ""}.items():
        (project / path).parent.mkdir(parents=True, exist_ok=True)
        (project / path).write_text(content)
    for place in (project, *project.rglob("*")):
        os.chown(place, site.person.uid, site.person.gid)
    resources = {"nodes": 2, "procs_per_node": 1, "time": "00:10:00"}
    keys = {"code": "snapshot", "workdir": str(project), "resources": resources, "slurm": SPOT}
    run_id = site.submit(site.commanding(f"python {project}/train.py", "snapshot", **keys))
    site.wait_for_lines(run_id, 2)
    (project / "helper.py").write_text("VERSION = 'new'\n")
    preempt(cluster, lambda: events(site, run_id, "requeue"))
    until(lambda: len(site.printed(run_id)) >= 4, "the second attempt")
    (project / "results" / "enough").touch()
    site.until_state(run_id, "completed")
    assert site.printed(run_id) == ["old"] * 4
    attempts = site.show(run_id)["attempts"]
    assert len({attempt["code"] for attempt in attempts}) == 1
    assert len(attempts) == 2
    # Made once, by the first node of the first attempt.
    assert len(events(site, run_id, "code")) == 1
