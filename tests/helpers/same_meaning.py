"""One spec that uses each key which can mean something with both executors, and what its ranks must see with either."""

from __future__ import annotations

import json
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from helpers.site import Site, until

FACTS = """
import json, os, resource, signal, sys

stack, umask = resource.getrlimit(resource.RLIMIT_STACK)[0], os.umask(0)
print(json.dumps({"argv": sys.argv[1:], "cwd": os.getcwd(), "stack": stack, "umask": umask, "env": dict(os.environ)}))
"""
SETUP = [
    "export RELATIVE=$(cat data.txt) PLACE=$PWD",
    "source ./env.sh",
    "[ -f nothing ] && echo nothing",
    "if true; then",
    "  export PATH=$PWD/bin:$PATH PYTHONHOME=",
    "fi",
    "unset PYTHONHOME",
    "export PYTHONSTARTUP=/nowhere",
    "ulimit -s 4096; umask 027",
    "sleep 600 & echo $! > background.pid",
    "echo set up",
]
KEYS: dict[str, Any] = {
    "command": "python facts.py {run_id} {attempt} --resume {resume_from}",
    "params": {"lr": 0.1, "name": "a b"},
    "seed": 7,
    "deterministic": True,
    "launcher": "ranks",
    "resources": {"nodes": 2, "procs_per_node": 2, "cpus_per_proc": 1, "mem": "500M", "time": "00:05:00"},
    "network": {"interface": "auto"},
    "env": {"TEXT": "it's $HOME", "BOTH": "env"},
    "requeue": {"signal": "SIGUSR1"},
    "checkpoint": {"glob": "ckpt-*.pt", "format": "torch"},
    "setup": SETUP,
}
Facts = dict[str, Any]
# What a rank must see, by the key of the spec.
ROWS: dict[str, Callable[[Facts, Site, str], bool]] = {
    "command": lambda facts, _, run_id: facts["argv"] == [run_id, "1"],
    "workdir": lambda facts, site, run_id: facts["cwd"] == str(copy_of(site, run_id)),
    "params": lambda facts, *_: json.loads(facts["env"]["SLURMTRAIN_PARAMS"]) == KEYS["params"],
    "seed": lambda facts, *_: (facts["env"]["PYTHONHASHSEED"], facts["env"]["SLURMTRAIN_SEED"]) == ("7", "7"),
    "deterministic": lambda facts, *_: facts["env"]["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8",
    "launcher": lambda facts, *_: facts["env"]["LOCAL_WORLD_SIZE"] == "2",
    "resources": lambda facts, *_: (facts["env"]["WORLD_SIZE"], facts["env"]["OMP_NUM_THREADS"]) == ("4", "1"),
    "network": lambda facts, *_: bool(facts["env"]["GLOO_SOCKET_IFNAME"]),
    "env": lambda facts, *_: (facts["env"]["TEXT"], facts["env"]["BOTH"]) == ("it's $HOME", "env"),
    "requeue": lambda facts, *_: facts["env"]["SLURMTRAIN_STOP_SIGNAL"] == "SIGUSR1",
    "checkpoint": lambda facts, *_: facts["env"]["SLURMTRAIN_RESUME_FROM"] == "",
    "setup: relative paths": lambda facts, *_: facts["env"]["RELATIVE"] == "data",
    "setup: directory": lambda facts, site, run_id: facts["env"]["PLACE"] == str(copy_of(site, run_id)),
    "setup: source": lambda facts, *_: facts["env"]["SOURCED"] == "yes",
    "setup: python": lambda facts, *_: facts["env"].get("OF_SETUP") == "yes",
    "setup: variables of Python": lambda facts, *_: facts["env"]["PYTHONSTARTUP"] == "/nowhere",
    "setup: limits": lambda facts, *_: (facts["stack"], facts["umask"]) == (4096 * 1024, 0o027),
}
# What other tests hold for both, or what one executor refuses.
ELSEWHERE = {
    "name": "test_runs, test_slurm_runs", "after": "test_chains, test_slurm_chains", "start_from": "test_forks",
    "strategy": "test_strategies", "tracking": "test_script_metrics", "preflight": "test_runs", "code": "test_code",
    "log": "tests of its own", "slurm": "means nothing here", "setup_node": "test_node_helpers",
    "completed_by": "test_slurm_launchers", "sidecars": "the same", "teardown": "the same",
    "profile": "test_profile", "idle_after": "test_idle, test_slurm_idle",
    "measures": "test_measures",
}  # fmt: skip


def copy_of(site: Site, run_id: str) -> Path:
    """Where the command of a run works: in its own copy of the code."""
    return site.runs / run_id / "code" / "project"


def make_project(site: Site) -> None:
    """Write what the spec reads into the directory of its command."""
    project = site.path / "project"
    (project / "bin").mkdir(parents=True)
    (project / "facts.py").write_text(FACTS)
    (project / "data.txt").write_text("data")
    # As activation scripts are: tests that fail, and variables that are not set.
    (project / "env.sh").write_text('[ -n "$NOSUCH" ]\nfalse\nexport SOURCED=yes BOTH=setup\n')
    python = project / "bin" / "python"
    python.write_text(f'#!/bin/sh\nOF_SETUP=yes exec {site.python} "$@"\n')
    for path in (project, project / "bin", python):
        path.chmod(stat.S_IRWXU | stat.S_IRWXG | stat.S_IRWXO)


def check_ranks(site: Site, executor: str, **keys: Any) -> None:
    """Submit the spec, and compare what each of its ranks sees with every row."""
    make_project(site)
    spec = site.spec("same", workdir=str(site.path / "project"), **{**KEYS, **keys})
    run_id = str(site.json("submit", str(spec), "--executor", executor)["runs"][0]["id"])
    run = site.until_state(run_id, "completed", "failed", "lost")
    assert run["state"] == "completed", run["reason"]
    logs = site.call("logs", run_id).stdout.splitlines()
    assert "[1/setup 0] set up" in logs
    ranks = [json.loads(line.partition("] ")[2]) for line in logs if line.startswith("[1/rank ") and "{" in line]
    wrong = [
        (facts["env"]["RANK"], key) for facts in ranks for key, holds in ROWS.items() if not holds(facts, site, run_id)
    ]
    assert (len(ranks), wrong) == (4, []), (wrong, ranks[:1])
    assert f"'setup' makes python {copy_of(site, run_id)}/bin/python" in site.call("show", run_id).stdout
    background = int((copy_of(site, run_id) / "background.pid").read_text())
    until(lambda: not psutil.pid_exists(background), "the end of what setup left running")


def check_failing_line(site: Site, executor: str, **keys: Any) -> None:
    """A line of setup that fails ends a run on two nodes before a rank starts, and all commands say which."""
    setup = ["echo before", "module load nothing", "touch after"]
    spec = site.commanding("touch began", "failing", **{"setup": setup, "resources": KEYS["resources"], **keys})
    run_id = str(site.json("submit", str(spec), "--executor", executor)["runs"][0]["id"])
    run = site.until_state(run_id, "failed", "lost", "completed")
    reason = "line 2 of 'setup' (module load nothing) failed with code 127: module: command not found"
    shown = site.show(run_id)
    assert (run["state"], [attempt["cause"] for attempt in shown["attempts"]]) == ("failed", ["crash"])
    assert run["reason"].startswith(reason)
    assert reason in site.call("doctor", run_id, code=None).stdout
    logs = site.call("logs", run_id).stdout
    assert "[1/setup 0] before\n" in logs
    assert "module: command not found" in logs
    assert not (site.path / "after").exists()
    assert not (site.path / "began").exists()
