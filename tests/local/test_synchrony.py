"""Ranks with a session that never wraps its model: the run completes, and names DDP."""

from __future__ import annotations

from helpers.site import SCRIPTS, Site

TWO = {"nodes": 1, "procs_per_node": 2, "time": "00:05:00"}
PROBLEM = "the 2 ranks have exchanged no gradients in 12 steps, as with a forgotten DDP: each trains a model of its own"


def test_a_forgotten_ddp_is_named_although_the_run_completes(site: Site) -> None:
    run_id = site.submit(site.spec("alone", command=f"python {SCRIPTS / 'forgotten.py'}", resources=TWO))
    run = site.until_state(run_id, "completed", "failed")
    assert run["state"] == "completed"
    assert run["reason"].startswith(PROBLEM)
    assert PROBLEM in " ".join(site.call("show", run_id).stdout.split())
    assert PROBLEM in " ".join(site.call("doctor", run_id).stdout.split())
