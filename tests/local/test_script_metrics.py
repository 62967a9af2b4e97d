"""Steps and metrics of scripts that know nothing of slurmtrain, from their logs and from files that grow."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from helpers.site import SCRIPTS, Site

IN_LOG = {"pattern": r"loss=(?P<loss>\S+)", "step": r"step (?P<step>\d+)/(?P<total>\d+)"}
IN_FILE = {"file": "{run_dir}/output/metrics.csv", "step": "iter", "total": 30}


def run(site: Site, output: str, metrics: dict[str, Any], **requeue: int) -> dict[str, Any]:
    spec = site.commanding(
        f"python {SCRIPTS / 'counting.py'} {{run_dir}}/output {output}",
        checkpoint={"glob": "{run_dir}/output/state"},
        tracking={"metrics": metrics},
        requeue={"backoff_s": 0, **requeue},
    )
    [finished] = site.json("submit", str(spec), "--executor", "local", "--wait")["runs"]
    return finished


def check(site: Site, finished: dict[str, Any]) -> None:
    """The run says of its steps what one with a session would say, and its curve has each step once."""
    assert (finished["state"], finished["step"], finished["total_steps"]) == ("completed", 30, 30)
    assert finished["metrics"] == {"loss": pytest.approx(1 / 30, abs=1e-4)}
    assert finished["lost_steps"] == 7
    [plotted] = site.json("plot", finished["id"], "loss", "--all")["runs"]
    loss = plotted["metrics"]["loss"]
    assert loss["step"] == list(range(1, 31))
    assert loss["value"] == pytest.approx([1 / step for step in range(1, 31)], abs=1e-4)
    # Each attempt has written what it has trained, once.
    assert loss["superseded"]["step"] == list(range(11, 18))


def test_the_log_of_rank_0_has_the_steps_of_both_attempts(site: Site) -> None:
    finished = run(site, "log", IN_LOG, restarts_in_place=0)
    check(site, finished)
    assert [attempt["first_step"] for attempt in site.show(finished["id"])["attempts"]] == [0, 10]


def test_a_table_that_grows_over_restarted_ranks_has_the_steps_of_all_of_them(site: Site) -> None:
    finished = run(site, "csv", IN_FILE)
    check(site, finished)
    [metrics] = Path(finished["dir"]).glob("attempts/*/metrics.jsonl")
    steps = [json.loads(line)["step"] for line in metrics.read_text().splitlines()]
    assert steps == [*range(1, 18), *range(11, 31)]
