"""A scaling study of real runs, whose command is killed, and one of whose runs is cancelled."""

from __future__ import annotations

import signal
import subprocess
import sys
from typing import Any

from helpers.site import ONE_PROCESS, Site, until

# Twice the processes need 0.6 of the time. It begins when it may. Output of less than 2 s would tell no speed.
SCRIPT = """import os, sys, time
from pathlib import Path
Path("started").touch()
while not Path("begin").exists():
    time.sleep(0.02)
workers, batch = int(os.environ["WORLD_SIZE"]), int(sys.argv[1])
for step in range(40):
    time.sleep(0.024 + 0.096 * batch / 64 / workers)
    print(f"step {step + 1}/40 loss=1.0", flush=True)
"""
SAME = ("steps_per_second", "rate_error", "gpus", "processes", "memory_bytes", "utilization", "total_seconds")


def test_an_interrupted_study_goes_on_and_its_figures_are_those_of_its_runs(site: Site) -> None:
    (site.path / "train.py").write_text(SCRIPT)
    pattern = {"pattern": r"loss=(?P<loss>\S+)", "step": r"step (?P<step>\d+)/(?P<total>\d+)"}
    spec = site.commanding(
        f"python {site.path / 'train.py'} ${{params.batch_size}}",
        params={"batch_size": 64},
        code="none",
        tracking={"mlflow": {"enabled": False}, "metrics": pattern},
    )
    words = ("scale", str(spec), "--procs", "1,2", "--executor", "local")
    command = [sys.executable, "-m", "slurmtrain", *words, "--wait"]
    with subprocess.Popen(command, cwd=site.path, env=site.environment(), stderr=subprocess.PIPE) as waiting:
        until((site.path / "started").exists, "a running study")
        waiting.send_signal(signal.SIGKILL)
    first, second = runs(site)
    begun = site.call("scale", "plain-scale")
    assert begun.stdout == ""
    assert "study plain-scale is not complete (2 runs: 1 running, 1 pending)" in " ".join(begun.stderr.split())
    site.call("cancel", second["id"])
    (site.path / "begin").touch()
    completed = site.call(*words, "--wait")
    assert " ago; 1 run was started again; --again submits a new one" in completed.stderr
    assert "2 processes: " in completed.stdout
    ended = runs(site)
    assert [run["id"] for run in ended] == [first["id"], second["id"]]
    assert all(run["tags"] == ["scale"] and run["state"] == "completed" for run in ended)

    study = site.json("scale", first["sweep"])
    alone = site.json("compare", first["sweep"], "--performance")["runs"]
    assert study["complete"]
    for run, same in zip(study["runs"], alone, strict=True):
        assert run["id"] == same["id"]
        assert [run[name] for name in SAME] == [same[name] for name in SAME]
        assert (run["speedup"], run["efficiency"]) == (same["speedup"], same["of_ideal"])
        assert run["batch"] == 64
    [series] = study["scaling"]
    assert (series["law"]["kind"], series["law"]["first"]) == ("strong", 1)
    assert series["advice"].startswith("2 processes: ")
    page = site.path / "study.html"
    printed = site.call("scale", first["sweep"], "--markdown", "--html", str(page)).stdout
    assert f"| {second['id']} | 1 | 2 | 64 |" in printed
    assert "Scaling study" in page.read_text()


def test_a_study_of_a_script_that_reports_no_steps_says_so_and_is_not_submitted_twice(site: Site) -> None:
    spec = site.commanding("python -c pass", resources=ONE_PROCESS, code="none")
    words = ("scale", str(spec), "--nodes", "1,2", "--executor", "local")
    failed = site.call(*words, "--wait", code=1)
    assert failed.stdout == ""
    assert (
        "no run has recorded its speed (2 runs: 2 completed); it needs two finished steps, reported by" in failed.stderr
    )
    # The same again is the same study, unless a new one is asked for.
    site.call(*words, code=1)
    assert len(runs(site)) == 2
    assert "was submitted: 2 runs" in site.call(*words, "--again", "--wait", code=1).stderr
    assert len(runs(site)) == 4
    site.call("delete", runs(site)[-1]["id"], "--yes", "--forget")
    deleted = site.call(*words, code=2).stderr
    assert "of this study was deleted: --again submits a new study" in deleted


def runs(site: Site) -> list[dict[str, Any]]:
    """All runs, the oldest first."""
    listed = site.json("status", "--all", "--no-fold")["runs"]
    return sorted(listed, key=lambda run: run["id"])
