"""Runs execute the code that they were submitted with, whatever becomes of it meanwhile."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from helpers.repositories import environment_with_editable
from helpers.site import ONE_PROCESS, Site, until

SESSION = """
import sys, time
import slurmtrain
from package import VERSION
from helper import HELP

class Counter:
    def state_dict(self):
        return {"count": 1}

    def load_state_dict(self, state):
        pass

with slurmtrain.session() as run:
    run.checkpoint(counter=Counter())
    print(VERSION, HELP, "script-old", open("data/x").read(), flush=True)
    for step in run.steps(int(sys.argv[1])):
        # The first attempt takes its time to be stopped.
        time.sleep(0.3 if run.attempt == 1 else 0.01)
        run.log(loss=float(step))
"""
PLAIN = """
import os, time
from helper import HELP

print(HELP, os.environ["SLURMTRAIN_WORKDIR"], flush=True)
open("results/of-any-attempt", "w").write("kept")
while not os.path.exists("data/enough"):
    time.sleep(0.02)
"""
SETUP = ["pwd > setup-directory"]


def git(directory: Path, *arguments: str) -> None:
    identity = ("-c", "user.name=a", "-c", "user.email=a@b")
    subprocess.run(["git", *identity, "-C", str(directory), *arguments], check=True, capture_output=True)


@pytest.fixture
def project(site: Site) -> Path:
    """A repository with a script, a module next to it, a package, and data that git ignores."""
    root = site.path / "project"
    for path, content in {
        "train.py": SESSION,
        "plain.py": PLAIN,
        "run.sh": "echo shell-old\nmkdir -p results\npython plain.py && echo done\n",
        "helper.py": "HELP = 'helper-old'\n",
        "src/package/__init__.py": "VERSION = 'package-old'\n",
        ".gitignore": "data/\n",
        "data/x": "data",
    }.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(content)
    git(site.path, "init", "--quiet", "project")
    git(root, "add", ".")
    git(root, "commit", "--quiet", "--message", "first")
    return root


def edit(project: Path) -> None:
    """Change all code, and commit it."""
    for path in ("train.py", "plain.py", "run.sh", "helper.py", "src/package/__init__.py"):
        (project / path).write_text((project / path).read_text().replace("-old", "-new"))
    git(project, "commit", "--quiet", "--all", "--message", "second")


def setup_directories(site: Site, run_id: str) -> set[str]:
    """Where the line of :data:`SETUP` was executed, relative to the run's directory, in any attempt."""
    run = site.runs / run_id
    return {os.path.relpath(path.read_text().strip(), run) for path in run.rglob("setup-directory")}


def code(site: Site, run_id: str) -> Any:
    return site.show(run_id)["code"]


def test_a_preempted_session_goes_on_with_the_old_script_module_and_installed_package(
    site: Site, project: Path
) -> None:
    env = environment_with_editable(site.path / "env", project / "src", site.environment())
    spec = site.commanding("python train.py 100", "trained", workdir=str(project))
    run_id = site.submit(spec, env=env)
    until(lambda: site.step(run_id) > 5, "training")
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=project, check=True, capture_output=True).stdout
    edit(project)
    site.signal_all(run_id, signal.SIGTERM)
    until(lambda: not site.processes(run_id), "the end of the first attempt")
    site.call("sync")
    assert site.json("wait", run_id)["runs"][0]["state"] == "completed"
    old = "package-old helper-old script-old data"
    assert site.printed(run_id) == [old, old]
    first = code(site, run_id)
    assert [attempt["code"] for attempt in site.show(run_id)["attempts"]] == [first["snapshot"]] * 2
    assert Path(first["dir"]) == site.runs / run_id / "code" / "project"
    answered = subprocess.run(["git", "rev-parse", "HEAD"], cwd=first["dir"], check=True, capture_output=True)
    assert answered.stdout == commit

    resumed = site.call("resume", run_id, "command=python train.py 102", "--code", "now", "--wait")
    changed = "4 changed (helper.py, run.sh, src/package/__init__.py and 1 more)"
    assert f"clean): {changed} since snapshot {first['snapshot'][:12]}" in resumed.stderr
    assert sorted(site.printed(run_id)) == ["package-new helper-new script-new data", old, old]
    assert [attempt["code"] == first["snapshot"] for attempt in site.show(run_id)["attempts"]] == [True, True, False]
    text = site.call("show", run_id).stdout
    assert f"code      snapshot {first['snapshot'][:12]}" in text
    assert f"code        snapshot {code(site, run_id)['snapshot'][:12]} of {project}" in text


def test_a_killed_shell_script_starts_again_with_the_old_programs(site: Site, project: Path) -> None:
    command = f"bash {project}/run.sh --output-dir results"
    run_id = site.submit(site.commanding(command, "shell", workdir=str(project), setup=SETUP))
    site.wait_for_lines(run_id, 2)
    edit(project)
    site.signal_all(run_id, signal.SIGKILL)
    site.call("sync")
    site.wait_for_lines(run_id, 4)
    # Data is where it was, and what appears there reaches the run.
    (project / "data" / "enough").touch()
    assert site.json("wait", run_id)["runs"][0]["state"] == "completed"
    attempt = ["shell-old", f"helper-old {project}"]
    # The logs of jobs are in no order.
    assert sorted(site.printed(run_id)) == sorted([*attempt, *attempt, "done"])
    # Results are where the command says, and lines of setup run where it does.
    assert (project / "results" / "of-any-attempt").read_text() == "kept"
    assert setup_directories(site, run_id) == {f"code/{project.name}"}


def test_without_a_snapshot_a_run_executes_what_is_there(site: Site, project: Path) -> None:
    (project / "data" / "enough").touch()
    spec = site.commanding("bash run.sh", "live", workdir=str(project), code="none", setup=SETUP)
    run_id = site.submit(spec, "--wait")
    assert code(site, run_id) is None
    assert not (site.runs / ".code").exists()
    assert (project / "setup-directory").read_text() == f"{project}\n"


def test_torchrun_starts_the_copy_on_every_node(site: Site, project: Path) -> None:
    (project / "launched.py").write_text("import os, helper\nprint(os.getcwd(), helper.HELP, flush=True)\n")
    keys = {"workdir": str(project), "resources": {**ONE_PROCESS, "nodes": 2}}
    run_id = site.submit(site.commanding("torchrun launched.py", "launched", **keys))
    edit(project)
    assert site.json("wait", run_id)["runs"][0]["state"] == "completed"
    copy = site.runs / run_id / "code" / "project"
    assert [line for line in site.printed(run_id) if "helper" in line] == [f"{copy} helper-old"] * 2


def test_a_mistake_is_refused_before_anything_is_created(site: Site, project: Path) -> None:
    keys: dict[str, Any] = {"mode": "snapshot", "include": ["missing/*.so"]}
    spec = site.commanding("bash run.sh", "mistaken", code=keys, workdir=str(project))
    refused = site.call("submit", str(spec), "--executor", "local", code=2)
    assert "'code.include': nothing in" in refused.stderr
    assert not list(site.runs.glob("*/plan.json"))
