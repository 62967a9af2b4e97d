"""A run whose nodes have something to do before, beside and after its ranks, on either executor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psutil

from helpers.site import Site, until

TWO_NODES = {"nodes": 2, "procs_per_node": 1, "time": "00:10:00"}
KEYS: dict[str, Any] = {
    "resources": TWO_NODES,
    "setup": ["export FIRST=1"],
    "setup_node": ["export PREPARED=$FIRST$FIRST", "echo preparing"],
    "sidecars": ["echo $$ >> {pids}; exec sleep 600", "exit 3"],
    "teardown": ["echo tearing down $PREPARED", "false"],
}


# What fails before there are ranks, by the reason with which the attempt ends, and the nodes that have torn down.
UNREADY: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "line 2 of 'setup' (false) failed with code 1": ({"setup": ["export STAGED=1", "false"]}, (0, 1)),
    "line 2 of 'setup_node' (false) failed with code 1": ({"setup_node": ["export STAGED=1", "false"]}, (0, 1)),
    "disk: ": ({"setup": ["export STAGED=1"], "preflight": {"disk": {"min_gb": 10**6}}}, (0, 1)),
}


def check_torn_down(site: Site, executor: str, **keys: Any) -> None:
    """What was staged is cleaned up, whatever keeps the attempt from having ranks; its outcome stays the same."""
    runs = {}
    for reason, (more, _) in UNREADY.items():
        own = {"setup": [], "setup_node": [], "teardown": ["sleep 0.5", "echo removing $STAGED", "exit 7"]}
        runs[reason] = submit(site, executor, "touch began", **{**own, **more, **keys})
    for reason, run_id in runs.items():
        run = site.until_state(run_id, "completed", "failed", "lost")
        assert (run["state"], reason in run["reason"]) == ("failed", True), run["reason"]
        lines = site.call("logs", run_id).stdout.splitlines()
        torn_down = [node for node in range(2) if f"[1/teardown {node}] removing 1" in lines]
        assert torn_down == list(UNREADY[reason][1]), (reason, lines)
        assert "line 3 of 'teardown' (exit 7) failed with code 7" in site.call("show", run_id).stdout
    assert not list(site.path.rglob("began"))


def check_stopped_setup(site: Site, executor: str, **keys: Any) -> None:
    """A run that is cancelled while its lines of ``setup`` run is torn down on the first node, which ran them."""
    setup = ["export STAGED=1", "touch {staged}; sleep 600".format(staged=site.path / "staged")]
    run_id = submit(site, executor, "true", setup=setup, teardown=["echo removing $STAGED"], **keys)
    until((site.path / "staged").exists, "the lines of setup")
    site.call("cancel", run_id)
    run = site.until_state(run_id, "cancelled", "completed", "failed", "lost")
    assert run["state"] == "cancelled"
    log = next(site.runs.glob(f"{run_id}/attempts/*/logs")) / "teardown-0.log"
    until(lambda: log.exists() and "removing" in log.read_text(), "teardown")


def submit(site: Site, executor: str, command: str, **keys: Any) -> str:
    """Submit it with a command; return the run's id."""
    sidecars = [line.format(pids=site.path / "pids") for line in KEYS["sidecars"]]
    spec = site.commanding(command, "helped", **{**KEYS, "sidecars": sidecars, **keys})
    return str(site.json("submit", str(spec), "--executor", executor)["runs"][0]["id"])


def sidecars(site: Site) -> list[int]:
    """The process ids of all sidecars so far."""
    path = Path(site.path / "pids")
    return [int(line) for line in path.read_text().split()] if path.exists() else []


def check_logs(site: Site, run_id: str, attempt: int = 1) -> None:
    """Each node has prepared itself, and has torn down what it made; no sidecar is left."""
    lines = site.call("logs", run_id, "--attempt", str(attempt)).stdout.splitlines()
    for node in range(2):
        assert f"[{attempt}/setup_node {node}] preparing" in lines
        assert f"[{attempt}/teardown {node}] tearing down 11" in lines
    until(lambda: not any(map(psutil.pid_exists, sidecars(site))), "the end of the sidecars")


def check_completed(site: Site, executor: str, **keys: Any) -> None:
    """What fails beside the ranks is said, and changes nothing."""
    run_id = submit(site, executor, "bash -c 'echo rank $PREPARED; sleep 1'", **keys)
    run = site.until_state(run_id, "completed", "failed", "lost")
    assert run["state"] == "completed", run["reason"]
    check_logs(site, run_id)
    assert len(sidecars(site)) == 2
    assert "[1/rank 1] rank 11" in site.call("logs", run_id).stdout
    shown = site.call("show", run_id).stdout
    assert "sidecar 1 (exit 3) ended with code 3, on node 1" in shown
    assert "line 2 of 'teardown' (false) failed with code 1: tearing down 11, on node 0" in shown


def check_unready(site: Site, executor: str, **keys: Any) -> None:
    """If one node cannot be prepared, none has ranks, and all are torn down."""
    lines = ["echo preparing", "[ $SLURM_NODEID$SUBMITIT_LOCAL_GLOBALID != 1 ] || cd nothere"]
    run_id = submit(site, executor, "touch began", setup_node=lines, teardown=["echo tearing down 11"], **keys)
    run = site.until_state(run_id, "completed", "failed", "lost")
    assert run["state"] == "failed"
    assert run["reason"].startswith(f"line 2 of 'setup_node' ({lines[1]}) failed with code 1: cd: nothere")
    assert ", on node 1" in run["reason"]
    check_logs(site, run_id)
    assert not list(site.path.rglob("began"))
