"""Runs whose ranks get shares of a batch by their speeds."""

from __future__ import annotations

import json
import os
import signal
from typing import Any

import pytest
from helpers.site import Site, until

STEPS = 120
# Steps that are finished when a rank is killed: shares have changed, and there is no checkpoint.
BEFORE = 40


def records(site: Site, run_id: str, name: str) -> list[dict[str, Any]]:
    """The lines of such files of the run's only attempt."""
    paths = sorted((site.runs / run_id).glob(f"attempts/*/{name}"))
    return [json.loads(line) for path in paths for line in path.read_text().split("\n")[:-1]]


@pytest.mark.slow
def test_steps_that_are_repeated_after_a_kill_have_their_shares_again_and_every_bit(site: Site) -> None:
    keys = {
        "resources": {"nodes": 1, "procs_per_node": 2, "mixed": True},
        "checkpoint": {"every": {"steps": STEPS}},
        "requeue": {"backoff_s": 0},
    }
    # Rank 0 is the slower one after the restart: shares that followed from its speed would be others.
    spec = site.spec("uneven", script="uneven.py", params={"steps": STEPS, "seconds": [0.001, 0.004]}, **keys)
    run_id = site.submit(spec)
    until(lambda: site.step(run_id) >= BEFORE, f"step {BEFORE}")
    [started] = [each for each in records(site, run_id, "node-0*.jsonl") if each["kind"] == "workers"]
    os.kill(started["processes"]["1"]["pid"], signal.SIGKILL)
    site.until_state(run_id, "completed")

    points = [(record["step"], record["metrics"]) for record in records(site, run_id, "metrics.jsonl")]
    restart = next(index for index in range(1, len(points)) if points[index][0] == 1)
    killed, repeated = points[:restart], points[restart:]
    assert len(killed) >= BEFORE
    assert len({metrics["samples"] for _, metrics in killed}) > 1
    assert repeated[: len(killed)] == killed
    # Then it measures, and follows the speeds.
    assert killed[-1][1]["samples"] > 14
    assert repeated[-1][1]["samples"] < 10
    choices = [
        (each["step"], each["shares"]) for each in records(site, run_id, "rank-0*.jsonl") if each["kind"] == "shares"
    ]
    first = [each for each in choices if each[0] <= len(killed)]
    assert first[: len(first) // 2] == first[len(first) // 2 :]
