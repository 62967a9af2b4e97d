"""Ranks that take long for a step, and ranks that hang, as the agents of two nodes judge them."""

from __future__ import annotations

from typing import Any

import pytest
from helpers.site import Site

pytestmark = pytest.mark.slow
TWO_NODES = {"nodes": 2, "procs_per_node": 1}


def trained(site: Site, hang_after: int, *, code: int = 0, **params: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The run of a script whose rank 0 takes long in its fourth step, and its only attempt."""
    requeue = {"hang_after": hang_after, "enabled": False}
    spec = site.spec(script="evaluate.py", resources=TWO_NODES, params=params, requeue=requeue)
    run_id = site.submit(spec, "--wait", code=code)
    run = site.show(run_id)
    [attempt] = run["attempts"]
    return run, attempt


def test_an_evaluation_that_computes_for_longer_than_the_limit_raises_it(site: Site) -> None:
    run, attempt = trained(site, 2, does="compute", seconds=7)
    assert (run["state"], run["step"]) == ("completed", 8)
    assert attempt["hangs"] == []
    assert [(change["limit_s"], change["raised_s"]) for change in attempt["raised_limits"][:2]] == [(2, 4), (4, 8)]
    for change in attempt["raised_limits"]:
        assert change["ranks"] == [0]
        assert "evaluate.py" in change["why"]
    assert "raised to 4s: rank 0 (node 0)" in site.call("show", run["id"]).stdout


def test_a_pause_may_take_longer_than_the_limit_and_others_may_wait_for_it(site: Site) -> None:
    run, attempt = trained(site, 1, does="pause", seconds=12)
    assert (run["state"], run["step"]) == ("completed", 8)
    assert attempt["hangs"] == attempt["raised_limits"] == []
    [journal] = (site.runs / run["id"]).glob("attempts/*/node-0.jsonl")
    events = journal.read_text()
    assert '"kind":"paused","ranks":[0],"step":4,"activity":"evaluation"' in events.replace(" ", "")
    assert '"resumed"' in events


@pytest.mark.parametrize("does", ["wait", "compute"])
def test_a_rank_that_waits_for_ever_hangs_and_so_does_one_that_computes_for_ever(site: Site, does: str) -> None:
    run, attempt = trained(site, 1, code=1, does=does, seconds=10**6)
    assert (run["state"], run["step"], attempt["cause"]) == ("failed", 4, "hang")
    [hang] = attempt["hangs"]
    assert hang["culprits"] == [0]
    assert [change["raised_s"] for change in attempt["raised_limits"]] == {"wait": [], "compute": [2, 4, 8]}[does]
